"""Dense with a mask: every expert meets every tile of tokens, and the routing weight, 0 where not chosen, is the mask.

Sorting costs a launch, gathering costs scattered reads, and both pay only if tokens that share an expert can be brought
together. Where few tokens hit nearly all experts anyway (a small E, K near E), nothing is gained by it: the weights have
to be read whole in any case, and a tile of 16 tokens costs the tensor cores the same whether 2 or 16 of its rows count.
So a program takes BLOCK_M tokens as they lie and one expert. It first looks at the tile's ids, K numbers a token: an
expert that no token of the tile chose is left unread; a row that did not choose it enters as zeros and is not stored.

Arithmetic grows with E / K times the tokens, so beyond a few tiles this path loses to the sorted one. It has a launch
less (no sort) and the same rounding: rows go to their pairs (token, slot), and `combine` adds them in slot order.

Every output is written by one program, once; ids outside 0..E-1 meet no expert. Offsets that grow with weights or pairs
are 64 bits wide. Source: the masked dense form of Shazeer's layer (2017, arXiv 1701.06538), as compared in MegaBlocks
(arXiv 2211.15841). Reference: tinymoe.ops.reference.dense_masked.
"""

import torch
import triton
import triton.language as tl

from tinymoe.kernels.checks import check_layer, check_routes
from tinymoe.kernels.combine import combine
from tinymoe.kernels.grouped_gemm import Tile, multiply, precision, silu


@triton.jit
def place_dense(T, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(tile of tokens, block of outputs, expert) of this program: tiles that read the same weights run side by side."""
    pid = tl.program_id(0)
    tiles, blocks = tl.cdiv(T, BLOCK_M), tl.cdiv(N, BLOCK_N)
    return pid % tiles, (pid // tiles) % blocks, pid // (tiles * blocks)


@triton.jit
def slot_of(ids, token, T, expert, K: tl.constexpr, KP: tl.constexpr):
    """Where each token names `expert` among its K choices; K if it does not."""
    j = tl.arange(0, KP)
    inside = (token[:, None] < T) & (j[None, :] < K)
    named = tl.load(ids + token[:, None] * K + j[None, :], mask=inside, other=-1)
    return tl.min(tl.where(named == expert, j[None, :], K), 1)


@triton.jit(do_not_specialize=["T"])
def dense_up_kernel(
    x, w, h, ids, T, stride_x, stride_w,
    H: tl.constexpr, I: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x [T, H] -> h [T * K, I] by pair; w [E, 2I, H], gate rows first."""
    tile, block, expert = place_dense(T, I, BLOCK_M, BLOCK_N)
    token = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    slot = slot_of(ids, token, T, expert, K, KP)
    if tl.min(slot, 0) == K:
        return
    chosen = slot < K
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x + token[:, None] * stride_x + k[None, :]
    w_at = w + expert.to(tl.int64) * stride_w + n[:, None] * H + k[None, :]
    ACC_M: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    ACC_N: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    gate = tl.zeros((ACC_M, ACC_N), tl.float32)
    up = tl.zeros((ACC_M, ACC_N), tl.float32)
    for start in range(0, H, BLOCK_K):
        left = k[None, :] < H - start
        x_MK = tl.load(x_at + start, mask=chosen[:, None] & left, other=0.0)
        w_mask = (n[:, None] < I) & left
        gate_NK = tl.load(w_at + start, mask=w_mask, other=0.0)
        up_NK = tl.load(w_at + I * H + start, mask=w_mask, other=0.0)
        gate = multiply(x_MK, gate_NK, gate, SWAP, PRECISION)
        up = multiply(x_MK, up_NK, up, SWAP, PRECISION)
    out = (silu(gate) * up).to(h.dtype.element_ty)
    pair = token * K + slot
    if SWAP:
        tl.store(h + pair[None, :] * I + n[:, None], out, mask=chosen[None, :] & (n[:, None] < I))
    else:
        tl.store(h + pair[:, None] * I + n[None, :], out, mask=chosen[:, None] & (n[None, :] < I))


@triton.jit(do_not_specialize=["T"])
def dense_down_kernel(
    h, w, y, weights, ids, T, stride_w,
    H: tl.constexpr, I: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """h [T * K, I] -> y [T * K, H], both by pair, times the routing weight; w [E, H, I]."""
    tile, block, expert = place_dense(T, H, BLOCK_M, BLOCK_N)
    token = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    slot = slot_of(ids, token, T, expert, K, KP)
    if tl.min(slot, 0) == K:
        return
    chosen = slot < K
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    h_at = h + (token * K + slot)[:, None] * I + k[None, :]
    w_at = w + expert.to(tl.int64) * stride_w + n[:, None] * I + k[None, :]
    ACC_M: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    ACC_N: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    acc = tl.zeros((ACC_M, ACC_N), tl.float32)
    for start in range(0, I, BLOCK_K):
        left = k[None, :] < I - start
        h_MK = tl.load(h_at + start, mask=chosen[:, None] & left, other=0.0)
        w_NK = tl.load(w_at + start, mask=(n[:, None] < H) & left, other=0.0)
        acc = multiply(h_MK, w_NK, acc, SWAP, PRECISION)
    for j in range(K):  # a caller's ids may name an expert twice: each slot gets its row
        pair = token * K + j
        hit = tl.load(ids + pair, mask=token < T, other=-1) == expert
        weight = tl.load(weights + pair, mask=hit, other=0.0)
        if SWAP:
            at, mask = y + pair[None, :] * H + n[:, None], hit[None, :] & (n[:, None] < H)
            tl.store(at, (acc * weight[None, :]).to(y.dtype.element_ty), mask=mask)
        else:
            at, mask = y + pair[:, None] * H + n[None, :], hit[:, None] & (n[None, :] < H)
            tl.store(at, (acc * weight[:, None]).to(y.dtype.element_ty), mask=mask)


# block_m, up, down: 16 rows with the operands swapped read weights; 64 rows multiply; float32 needs twice the room
DENSE16 = (16, Tile(64, 128, 4, 3, swap=True), Tile(64, 128, 4, 4, swap=True))
DENSE64 = (64, Tile(64, 64, 4, 4), Tile(128, 64, 4, 3))
DENSE_WIDE = (64, Tile(32, 32, 4, 2), Tile(64, 32, 4, 2))


def dense_tiles(num_tokens: int, dtype: torch.dtype) -> tuple[int, Tile, Tile]:
    if dtype is torch.float32:
        return DENSE_WIDE
    return DENSE16 if num_tokens <= 32 else DENSE64


def dense_masked(
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    gate_up_E2IH: torch.Tensor,
    down_EHI: torch.Tensor,
    residual_TH: torch.Tensor | None = None,
    shared_TH: torch.Tensor | None = None,
    *,
    tiles: tuple[int, Tile, Tile] | None = None,
) -> torch.Tensor:
    """x [T, H], ids [T, K] int32, weights [T, K] float32, gate_up [E, 2I, H] (gate rows first), down [E, H, I]
    -> [T, H]: the weighted sum over each token's slots, + shared, + residual. tiles: rows of a tile, and the tiles of up
    and down; None takes those for the number of tokens.
    ids and weights are contiguous, all else is as for fused_moe. Raises ValueError for shapes, dtypes and layouts that do
    not fit.
    """
    check_layer(x_TH, gate_up_E2IH, down_EHI, residual_TH, shared_TH)
    check_routes(ids_TK, weights_TK, x_TH.shape[0])
    T, H = x_TH.shape
    E, _, I = down_EHI.shape
    K = ids_TK.shape[1]
    block_m, up, down = tiles or dense_tiles(T, x_TH.dtype)
    out_TH = torch.empty(T, H, dtype=x_TH.dtype, device=x_TH.device)
    if not T:
        return out_TH
    h_PI = torch.empty(T * K, I, dtype=x_TH.dtype, device=x_TH.device)
    y_PH = torch.empty(T * K, H, dtype=x_TH.dtype, device=x_TH.device)
    dense_up(x_TH, ids_TK, gate_up_E2IH, h_PI, block_m, up)
    dense_down(h_PI, ids_TK, weights_TK, down_EHI, y_PH, block_m, down)
    combine(y_PH, ids_TK, E, out_TH, residual_TH, shared_TH)
    return out_TH


def dense_up(x_TH, ids_TK, gate_up_E2IH, h_PI, block_m: int, tile: Tile) -> None:
    """Writes h [T*K, I] of every pair with an expert; the rows of other pairs stay as they are."""
    T, H, I = *x_TH.shape, h_PI.shape[1]
    grid = (gate_up_E2IH.shape[0] * triton.cdiv(T, block_m) * triton.cdiv(I, tile.block_n),)
    dense_up_kernel[grid](
        x_TH, gate_up_E2IH, h_PI, ids_TK, T, x_TH.stride(0), gate_up_E2IH.stride(0),
        **_constants(H, I, ids_TK.shape[1], block_m, tile, x_TH.dtype),
    )  # fmt: skip


def dense_down(h_PI, ids_TK, weights_TK, down_EHI, y_PH, block_m: int, tile: Tile) -> None:
    """Writes weight * (h @ down^T) to y [T*K, H] of every pair with an expert."""
    T, (E, H, I) = ids_TK.shape[0], down_EHI.shape
    dense_down_kernel[(E * triton.cdiv(T, block_m) * triton.cdiv(H, tile.block_n),)](
        h_PI, down_EHI, y_PH, weights_TK, ids_TK, T, down_EHI.stride(0),
        **_constants(H, I, ids_TK.shape[1], block_m, tile, h_PI.dtype),
    )  # fmt: skip


def _constants(H: int, I: int, K: int, block_m: int, tile: Tile, dtype: torch.dtype) -> dict:
    return {
        "H": H,
        "I": I,
        "K": K,
        "KP": triton.next_power_of_2(K),
        "BLOCK_M": block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "SWAP": tile.swap,
        "PRECISION": precision(dtype),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
