"""Block-sparse: all experts are one wide layer, of whose activations a token fills only the columns of its experts.

Seen this way the activations are one matrix of E * I columns, and one row for every visit of a token to an expert. Its
rows are sorted by expert, and each expert's rows are filled up to a multiple of `block`. Then whole blocks of block x
block are either needed or zero, and MegaBlocks (Gale et al. 2022, arXiv 2211.15841) stores the needed ones alone, in
BCSR: row_offsets says which blocks belong to a row of blocks, column_indices where in the row each one stands.

    SDD    x (dense) times gate and up (dense) -> h (sparse): one program computes one needed block, with SwiGLU
    DSD    h (sparse) times down (dense) -> y (dense): a program walks over the blocks that its row has

No row has to be dropped and none waits for others; the price is the rows that fill up (`padding`), the less the smaller
the block, while tensor cores like large ones. Training also needs the transposed order of the blocks, inference does not.
A small launch builds the topology on the device from the sorted routes; its size is bounded by what the host knows.

Each block is written by one program, once, rows go to their pairs, and `combine` adds them in slot order.
Reference: tinymoe.ops.reference.blocked_sparse.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tinymoe.kernels.checks import check_layer, check_routes
from tinymoe.kernels.combine import combine
from tinymoe.kernels.grouped_gemm import Tile, multiply, place, precision, silu
from tinymoe.kernels.sort_tokens import Sorted, sort_tokens

BLOCKS = (16, 32, 64, 128)


class Topology(NamedTuple):
    """Which blocks there are. row_offsets [R + 1] int32: row r of blocks has entries row_offsets[r] .. row_offsets[r + 1]
    - 1; R bounds the rows, those beyond the last are empty. column_indices [R * per_expert] int32: column of each entry,
    counted in blocks; expert e has columns e * per_expert .. (e + 1) * per_expert - 1, the last one cut off at the
    expert's width. Entries beyond row_offsets[R] are undefined."""

    row_offsets: torch.Tensor
    column_indices: torch.Tensor
    per_expert: int
    block: int


@triton.jit
def topology_kernel(
    tile_expert, num_tiles, row_offsets, column_indices, PER_EXPERT: tl.constexpr, PADDED: tl.constexpr
):
    row = tl.program_id(0)
    count = tl.load(num_tiles)
    tl.store(row_offsets + row + 1, tl.minimum(row + 1, count) * PER_EXPERT)
    if row == 0:
        tl.store(row_offsets, 0)
    if row < count:
        c = tl.arange(0, PADDED)
        first = tl.load(tile_expert + row) * PER_EXPERT
        tl.store(column_indices + row * PER_EXPERT + c, first + c, mask=c < PER_EXPERT)


@triton.jit(do_not_specialize=["K"])
def sdd_kernel(
    x, w, h, order, offsets, tile_row, num_tiles, row_offsets, column_indices, stride_x, stride_w, K,
    H: tl.constexpr, I: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """x [T, H], gathered -> h [entries, BLOCK, BLOCK]; w [E, 2I, H], gate rows first."""
    count = tl.load(num_tiles)
    PER_EXPERT: tl.constexpr = (I + BLOCK - 1) // BLOCK
    row, place_in_row = place(count, I, BLOCK, GROUP)
    if (row >= count) | (place_in_row >= PER_EXPERT):  # the last group of rows may have programs to spare
        return
    entry = tl.load(row_offsets + row) + place_in_row
    column = tl.load(column_indices + entry)
    expert = column // PER_EXPERT
    i = tl.arange(0, BLOCK)
    n = (column % PER_EXPERT) * BLOCK + i
    sorted_row = tl.load(tile_row + row) + i
    live = sorted_row < tl.load(offsets + expert + 1)
    token = (tl.load(order + sorted_row, mask=live, other=0) // K).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_at = x + token[:, None] * stride_x + k[None, :]
    w_at = w + expert.to(tl.int64) * stride_w + n[:, None] * H + k[None, :]
    gate = tl.zeros((BLOCK, BLOCK), tl.float32)
    up = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, H, BLOCK_K):
        left = k[None, :] < H - start
        x_MK = tl.load(x_at + start, mask=live[:, None] & left, other=0.0)
        w_mask = (n[:, None] < I) & left
        gate_NK = tl.load(w_at + start, mask=w_mask, other=0.0)
        up_NK = tl.load(w_at + I * H + start, mask=w_mask, other=0.0)
        gate = multiply(x_MK, gate_NK, gate, False, PRECISION)
        up = multiply(x_MK, up_NK, up, False, PRECISION)
    at = h + entry.to(tl.int64) * BLOCK * BLOCK + i[:, None] * BLOCK + i[None, :]
    tl.store(at, (silu(gate) * up).to(h.dtype.element_ty))  # rows and columns that fill up are 0


@triton.jit
def dsd_kernel(
    h, w, y, weights, order, offsets, tile_expert, tile_row, num_tiles, row_offsets, column_indices, stride_w,
    H: tl.constexpr, I: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """h [entries, BLOCK, BLOCK] -> y [P, H] by pair, times the routing weight; w [E, H, I]."""
    count = tl.load(num_tiles)
    row, block = place(count, H, BLOCK_N, GROUP)
    if (row >= count) | (block >= tl.cdiv(H, BLOCK_N)):
        return
    PER_EXPERT: tl.constexpr = (I + BLOCK - 1) // BLOCK
    i = tl.arange(0, BLOCK)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK, BLOCK_N), tl.float32)
    first = tl.load(row_offsets + row)
    h_at = h + first.to(tl.int64) * BLOCK * BLOCK + i[:, None] * BLOCK + i[None, :]
    for entry in range(tl.load(row_offsets + row + 1) - first):
        column = tl.load(column_indices + first + entry)
        k = (column % PER_EXPERT) * BLOCK + i
        w_at = w + (column // PER_EXPERT).to(tl.int64) * stride_w + n[:, None] * I + k[None, :]
        w_NK = tl.load(w_at, mask=(n[:, None] < H) & (k[None, :] < I), other=0.0)
        acc = multiply(tl.load(h_at), w_NK, acc, False, PRECISION)
        h_at += BLOCK * BLOCK
    sorted_row = tl.load(tile_row + row) + i
    live = sorted_row < tl.load(offsets + tl.load(tile_expert + row) + 1)
    pair = tl.load(order + sorted_row, mask=live, other=0)
    weight = tl.load(weights + pair, mask=live, other=0.0)
    at = y + pair[:, None].to(tl.int64) * H + n[None, :]
    tl.store(at, (acc * weight[:, None]).to(y.dtype.element_ty), mask=live[:, None] & (n[None, :] < H))


def topology(s: Sorted, width: int) -> Topology:
    """The blocks that the sorted routes need: a tile of s is a row of blocks, and reaches over its expert's columns."""
    R, per_expert = s.tile_row.shape[0], triton.cdiv(width, s.block_m)
    options = {"dtype": torch.int32, "device": s.tile_row.device}
    t = Topology(torch.zeros(1, **options) if not R else torch.empty(R + 1, **options),
                 torch.empty(R * per_expert, **options), per_expert, s.block_m)  # fmt: skip
    if R:
        topology_kernel[(R,)](
            s.tile_expert, s.num_tiles, t.row_offsets, t.column_indices,
            PER_EXPERT=per_expert, PADDED=triton.next_power_of_2(per_expert), num_warps=1,
        )  # fmt: skip
    return t


def padding(counts_E: torch.Tensor, block: int) -> torch.Tensor:
    """Rows that are stored over rows that are real (1: nothing is filled up), float32 on counts' device; 1 if no rows."""
    stored = ((counts_E + block - 1) // block * block).sum()
    return torch.where(stored > 0, stored / counts_E.sum().clamp(min=1), 1.0)


def check_block(block: int) -> None:
    if block not in BLOCKS:
        raise ValueError(f"block must be one of {BLOCKS}, got {block}")


def block_tiles(block: int, dtype: torch.dtype) -> tuple[int, Tile, Tile]:
    """Block, SDD's tile (block_n is the block) and DSD's (block_k is the block)."""
    check_block(block)
    warps = 8 if block == 128 else 4
    if dtype is torch.float32:
        return block, Tile(block, 16 if block == 128 else 32, 8, 2, group=4), Tile(min(block, 64), block, 8, 1, group=4)  # fmt: skip
    down_n, stages = (128, 3) if block >= 64 else (64, 4)
    return block, Tile(block, 64, warps, 3 if block == 128 else 4, group=4), Tile(down_n, block, warps, stages, group=4)  # fmt: skip


def blocked_sparse(
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    gate_up_E2IH: torch.Tensor,
    down_EHI: torch.Tensor,
    residual_TH: torch.Tensor | None = None,
    shared_TH: torch.Tensor | None = None,
    *,
    block: int = 128,
    tiles: tuple[int, Tile, Tile] | None = None,
) -> torch.Tensor:
    """x [T, H], ids [T, K] int32, weights [T, K] float32, gate_up [E, 2I, H] (gate rows first), down [E, H, I]
    -> [T, H]: the weighted sum over each token's slots, + shared, + residual. block: one of 16, 32, 64, 128; tiles
    instead: block, SDD's tile and DSD's. ids and weights are contiguous, all else is as for fused_moe. Raises ValueError for
    another block, and for shapes, dtypes and layouts that do not fit.
    """
    check_layer(x_TH, gate_up_E2IH, down_EHI, residual_TH, shared_TH)
    check_routes(ids_TK, weights_TK, x_TH.shape[0])
    T, H = x_TH.shape
    E, _, I = down_EHI.shape
    block, up, down = tiles or block_tiles(block, x_TH.dtype)
    check_block(block)
    s = sort_tokens(ids_TK, E, block)
    t = topology(s, I)
    h = torch.empty(t.column_indices.shape[0], block, block, dtype=x_TH.dtype, device=x_TH.device)
    y_PH = torch.empty(ids_TK.numel(), H, dtype=x_TH.dtype, device=x_TH.device)
    out_TH = torch.empty(T, H, dtype=x_TH.dtype, device=x_TH.device)
    sdd(x_TH, gate_up_E2IH, s, t, h, ids_TK.shape[1], up)
    dsd(h, down_EHI, weights_TK, s, t, y_PH, down)
    combine(y_PH, ids_TK, E, out_TH, residual_TH, shared_TH)
    return out_TH


def sdd(x_TH, gate_up_E2IH, s: Sorted, t: Topology, h, top_k: int, tile: Tile) -> None:
    """Writes every needed block of silu(x @ gate^T) * (x @ up^T) to h [entries, block, block]."""
    H, I, R = x_TH.shape[1], gate_up_E2IH.shape[1] // 2, s.tile_row.shape[0]
    if R:
        sdd_kernel[(R * t.per_expert,)](
            x_TH, gate_up_E2IH, h, s.order, s.offsets, s.tile_row, s.num_tiles, t.row_offsets, t.column_indices,
            x_TH.stride(0), gate_up_E2IH.stride(0), top_k, H=H, I=I, BLOCK=t.block, BLOCK_K=tile.block_k,
            GROUP=tile.group, PRECISION=precision(x_TH.dtype), num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip


def dsd(h, down_EHI, weights_TK, s: Sorted, t: Topology, y_PH, tile: Tile) -> None:
    """Writes weight * (h @ down^T) to the rows of y [P, H] of every pair with an expert."""
    _, H, I = down_EHI.shape
    grid = (s.tile_row.shape[0] * triton.cdiv(H, tile.block_n),)
    if grid[0]:
        dsd_kernel[grid](
            h, down_EHI, y_PH, weights_TK, s.order, s.offsets, s.tile_expert, s.tile_row, s.num_tiles,
            t.row_offsets, t.column_indices, down_EHI.stride(0), H=H, I=I, BLOCK=t.block, BLOCK_N=tile.block_n,
            GROUP=tile.group, PRECISION=precision(y_PH.dtype), num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
