"""Grouped matrix products: every tile of sorted rows times the weights of its own expert. One program is one tile of outputs.

`up` gathers its rows from the tokens (no copy of the input is made), multiplies them by gate and up together and stores
silu(gate) * up; `down` takes those rows as they lie and scatters its answers, times the routing weight, to their pairs.
Two outputs per launch differ in nothing but their epilogue, yet each has tiles of its own: their shapes differ.

Few rows per expert: the weights are what has to be read, so tiles are narrow in rows (16) and the operands are swapped:
W @ x^T has the weights' rows where the tensor core wants at least 64 (wgmma m64n16k16) and the 16 tokens where it accepts
few. Many rows: 64 or 128 rows a tile, and tiles that share weights run side by side, so that the weights stay in L2.

With `tma=True` whole tiles of both operands are fetched by tensor descriptors (Hopper's copy engine), which leaves the
threads' registers to the products. A descriptor cannot gather, so `up` then needs its rows copied into sorted order first.

A mask guards every load: what a tile computes for rows beyond its expert's last is never stored. Offsets that grow with
the number of weights or pairs are 64 bits wide. No atomics: each output is written by one program, once.

Reference: tinymoe.ops.reference.fused_moe. Tiles: tinymoe.kernels.sort_tokens.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tinymoe.kernels.checks import FLOATS, check
from tinymoe.kernels.sort_tokens import Sorted


class Tile(NamedTuple):
    """What one program computes: block_n outputs of up to `Sorted.block_m` rows, block_k inputs at a time. group: tiles
    of rows that pass over the same weights together. swap: compute the transpose. tma: load by tensor descriptors."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 1
    swap: bool = False
    tma: bool = False


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def place(num_tiles, N, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """(tile of rows, block of outputs) of this program: GROUP tiles of rows take a block of outputs together."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP * blocks)
    size = tl.minimum(num_tiles - group * GROUP, GROUP)
    inside = pid % (GROUP * blocks)
    # Programs beyond the last tile, and those beyond the last block of a small group, leave at once.
    size = tl.maximum(size, 1)
    return group * GROUP + inside % size, inside // size


@triton.jit
def multiply(x_MK, w_NK, acc, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    if SWAP:
        return tl.dot(w_NK, tl.trans(x_MK), acc, input_precision=PRECISION)
    else:
        return tl.dot(x_MK, tl.trans(w_NK), acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["K"])
def up_kernel(
    x, w, h, order, offsets, tile_expert, tile_row, num_tiles, stride_x, stride_w, K,
    H: tl.constexpr, I: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """x [T, H] -> h [P, I] in sorted order; w [E, 2I, H], gate rows first."""
    count = tl.load(num_tiles)
    tile, block = place(count, I, BLOCK_N, GROUP)
    if (tile >= count) | (block * BLOCK_N >= I):
        return
    expert = tl.load(tile_expert + tile)
    first = tl.load(tile_row + tile)
    rows = first + tl.arange(0, BLOCK_M)
    live = rows < tl.load(offsets + expert + 1)
    pair = tl.load(order + rows, mask=live, other=0)
    token = (pair // K).to(tl.int64)
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
        x_MK = tl.load(x_at + start, mask=live[:, None] & left, other=0.0)
        w_mask = (n[:, None] < I) & left
        gate_NK = tl.load(w_at + start, mask=w_mask, other=0.0)
        up_NK = tl.load(w_at + I * H + start, mask=w_mask, other=0.0)
        gate = multiply(x_MK, gate_NK, gate, SWAP, PRECISION)
        up = multiply(x_MK, up_NK, up, SWAP, PRECISION)
    out = (silu(gate) * up).to(h.dtype.element_ty)
    if SWAP:
        at = h + rows[None, :].to(tl.int64) * I + n[:, None]
        tl.store(at, out, mask=live[None, :] & (n[:, None] < I))
    else:
        at = h + rows[:, None].to(tl.int64) * I + n[None, :]
        tl.store(at, out, mask=live[:, None] & (n[None, :] < I))


@triton.jit
def down_kernel(
    h, w, y, weights, order, offsets, tile_expert, tile_row, num_tiles, stride_w,
    H: tl.constexpr, I: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """h [P, I] in sorted order -> y [P, H] by pair, times the routing weight; w [E, H, I]."""
    count = tl.load(num_tiles)
    tile, block = place(count, H, BLOCK_N, GROUP)
    if (tile >= count) | (block * BLOCK_N >= H):
        return
    expert = tl.load(tile_expert + tile)
    first = tl.load(tile_row + tile)
    rows = first + tl.arange(0, BLOCK_M)
    live = rows < tl.load(offsets + expert + 1)
    pair = tl.load(order + rows, mask=live, other=0)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    h_at = h + rows[:, None].to(tl.int64) * I + k[None, :]
    w_at = w + expert.to(tl.int64) * stride_w + n[:, None] * I + k[None, :]
    ACC_M: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    ACC_N: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    acc = tl.zeros((ACC_M, ACC_N), tl.float32)
    for start in range(0, I, BLOCK_K):
        left = k[None, :] < I - start
        h_MK = tl.load(h_at + start, mask=live[:, None] & left, other=0.0)
        w_NK = tl.load(w_at + start, mask=(n[:, None] < H) & left, other=0.0)
        acc = multiply(h_MK, w_NK, acc, SWAP, PRECISION)
    weight = tl.load(weights + pair, mask=live, other=0.0)
    if SWAP:
        at = y + pair[None, :].to(tl.int64) * H + n[:, None]
        tl.store(at, (acc * weight[None, :]).to(y.dtype.element_ty), mask=live[None, :] & (n[:, None] < H))
    else:
        at = y + pair[:, None].to(tl.int64) * H + n[None, :]
        tl.store(at, (acc * weight[:, None]).to(y.dtype.element_ty), mask=live[:, None] & (n[None, :] < H))


@triton.jit
def up_tma_kernel(
    x_sorted, w, h, offsets, tile_expert, tile_row, num_tiles,
    I: tl.constexpr, H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """As up_kernel, from descriptors of x_sorted [P, H] and w [E * 2I, H]. Rows beyond the expert's last are computed
    from its neighbour's and not stored."""
    count = tl.load(num_tiles)
    tile, block = place(count, I, BLOCK_N, GROUP)
    if (tile >= count) | (block * BLOCK_N >= I):
        return
    expert = tl.load(tile_expert + tile)
    first = tl.load(tile_row + tile)
    gate_row = expert * (2 * I) + block * BLOCK_N
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, H, BLOCK_K):
        x_MK = x_sorted.load([first, start])
        gate_NK = w.load([gate_row, start])
        up_NK = w.load([gate_row + I, start])
        gate = tl.dot(x_MK, gate_NK.T, gate)
        up = tl.dot(x_MK, up_NK.T, up)
    rows = first + tl.arange(0, BLOCK_M)
    live = rows < tl.load(offsets + expert + 1)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    out = (silu(gate) * up).to(h.dtype.element_ty)
    tl.store(h + rows[:, None].to(tl.int64) * I + n[None, :], out, mask=live[:, None] & (n[None, :] < I))


@triton.jit
def down_tma_kernel(
    h, w, y, weights, order, offsets, tile_expert, tile_row, num_tiles,
    H: tl.constexpr, I: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """As down_kernel, from descriptors of h [P, I] and w [E * H, I]."""
    count = tl.load(num_tiles)
    tile, block = place(count, H, BLOCK_N, GROUP)
    if (tile >= count) | (block * BLOCK_N >= H):
        return
    expert = tl.load(tile_expert + tile)
    first = tl.load(tile_row + tile)
    w_row = expert * H + block * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, I, BLOCK_K):
        acc = tl.dot(h.load([first, start]), w.load([w_row, start]).T, acc)
    rows = first + tl.arange(0, BLOCK_M)
    live = rows < tl.load(offsets + expert + 1)
    pair = tl.load(order + rows, mask=live, other=0)
    weight = tl.load(weights + pair, mask=live, other=0.0)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    at = y + pair[:, None].to(tl.int64) * H + n[None, :]
    tl.store(at, (acc * weight[:, None]).to(y.dtype.element_ty), mask=live[:, None] & (n[None, :] < H))


@triton.jit(do_not_specialize=["K"])
def gather_kernel(x, order, offsets, out, stride_x, K, H: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr):
    """out [P, H]: the token of every sorted row."""
    row = tl.program_id(0)
    if row < tl.load(offsets + E):
        token = (tl.load(order + row) // K).to(tl.int64)
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + token * stride_x + n, mask=n < H, other=0.0)
        tl.store(out + row.to(tl.int64) * H + n, values, mask=n < H)


def takes_tma(*tensors: torch.Tensor) -> bool:
    """Whether tensor descriptors can describe these: dense, 16-byte aligned rows; pointers serve for the rest."""
    return all(
        t.is_contiguous() and t.data_ptr() % 16 == 0 and t.shape[-1] * t.element_size() % 16 == 0
        for t in tensors
    )


def precision(dtype: torch.dtype) -> str:
    """float32 is multiplied as float32: its tensor-core form would drop 13 bits."""
    return "ieee" if dtype is torch.float32 else "tf32"


def constants(s: Sorted, tile: Tile, dtype: torch.dtype) -> dict:
    return {
        "BLOCK_M": s.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP": tile.group,
        "SWAP": tile.swap,
        "PRECISION": precision(dtype),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def tma_constants(s: Sorted, tile: Tile) -> dict:
    every = constants(s, tile, torch.bfloat16)
    return {name: value for name, value in every.items() if name not in ("SWAP", "PRECISION")}


def up(
    x_TH: torch.Tensor, gate_up_E2IH: torch.Tensor, s: Sorted, h_PI: torch.Tensor, top_k: int, tile: Tile
) -> None:
    """Writes silu(x @ gate^T) * (x @ up^T) of every sorted row to h [P, I]; rows of nobody stay as they are.

    Raises ValueError for shapes, dtypes and layouts that do not fit.
    """
    P, E = s.order.shape[0], s.offsets.shape[0] - 1
    check("h", h_PI, (P, "I"))
    check("x", x_TH, ("T", "H"), FLOATS, "rows")
    (T, H), I = x_TH.shape, h_PI.shape[1]
    if T * top_k != P:
        raise ValueError(f"{T} tokens of top_k {top_k} are not the {P} pairs that were sorted")
    check("gate_up", gate_up_E2IH, (E, 2 * I, H), (x_TH.dtype,), "experts")
    grid = (s.tile_row.shape[0] * triton.cdiv(I, tile.block_n),)
    if grid[0] and tile.tma and takes_tma(x_TH, gate_up_E2IH):
        block = min(2048, triton.next_power_of_2(H))
        x_sorted = torch.empty(P, H, dtype=x_TH.dtype, device=x_TH.device)
        gather_kernel[(P, triton.cdiv(H, block))](
            x_TH, s.order, s.offsets, x_sorted, x_TH.stride(0), top_k, H=H, E=E, BLOCK=block, num_warps=4
        )
        up_tma_kernel[grid](
            TensorDescriptor.from_tensor(x_sorted, [s.block_m, tile.block_k]),
            TensorDescriptor.from_tensor(gate_up_E2IH.view(-1, H), [tile.block_n, tile.block_k]),
            h_PI, s.offsets, s.tile_expert, s.tile_row, s.num_tiles, H=H, I=I, **tma_constants(s, tile),
        )  # fmt: skip
    elif grid[0]:
        up_kernel[grid](
            x_TH, gate_up_E2IH, h_PI, s.order, s.offsets, s.tile_expert, s.tile_row, s.num_tiles,
            x_TH.stride(0), gate_up_E2IH.stride(0), top_k, H=H, I=I, **constants(s, tile, x_TH.dtype),
        )  # fmt: skip


def down(
    h_PI: torch.Tensor,
    down_EHI: torch.Tensor,
    weights_TK: torch.Tensor,
    s: Sorted,
    y_PH: torch.Tensor,
    tile: Tile,
) -> None:
    """Writes weight * (h @ down^T) of every sorted row to its pair's row of y [P, H]; pairs of nobody stay as they
    are. Raises ValueError for shapes, dtypes and layouts that do not fit.
    """
    P, E = s.order.shape[0], s.offsets.shape[0] - 1
    check("h", h_PI, (P, "I"))
    check("down", down_EHI, (E, "H", h_PI.shape[1]), (h_PI.dtype,), "experts")
    H, I = down_EHI.shape[1:]
    check("y", y_PH, (P, H))
    check("weights", weights_TK, ("T", "K"))
    if weights_TK.numel() != P:
        raise ValueError(f"weights [T, K] must hold one for each of {P} pairs, got {list(weights_TK.shape)}")
    grid = (s.tile_row.shape[0] * triton.cdiv(H, tile.block_n),)
    if grid[0] and tile.tma and takes_tma(h_PI, down_EHI):
        down_tma_kernel[grid](
            TensorDescriptor.from_tensor(h_PI, [s.block_m, tile.block_k]),
            TensorDescriptor.from_tensor(down_EHI.view(-1, I), [tile.block_n, tile.block_k]),
            y_PH, weights_TK, s.order, s.offsets, s.tile_expert, s.tile_row, s.num_tiles,
            H=H, I=I, **tma_constants(s, tile),
        )  # fmt: skip
    elif grid[0]:
        down_kernel[grid](
            h_PI, down_EHI, y_PH, weights_TK, s.order, s.offsets, s.tile_expert, s.tile_row, s.num_tiles,
            down_EHI.stride(0), H=H, I=I, **constants(s, tile, h_PI.dtype),
        )  # fmt: skip
