"""Counting sort: the rows of one expert side by side, cut into tiles of at most BLOCK_M rows. One program is one expert.

A pair p = t * K + j is token t's visit to its j-th expert. Expert e's pairs begin where those of the experts below it
end, and inside an expert they keep their order (the sort is stable), so the result depends on nothing but the ids. A
tile never holds two experts: the matmul kernels read one expert's weights and some of its rows per tile. Nothing is
padded and nothing waits for the host: the number of tiles stays on the device, its bound P // BLOCK_M + E is known.

Every program needs to know how many pairs and tiles lie below its expert. With few pairs each program counts all of them
itself; with many, a first launch counts chunk by chunk. Ids outside 0..E-1 (-1: a padded row) belong to nobody.

Reference: tinymoe.ops.reference.sort_tokens.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

CHUNK = 1024  # pairs looked at together
ALONE = 4096  # up to this many pairs, every program counts for itself


class Sorted(NamedTuple):
    """order [P] int32: pair of each sorted row (rows of nobody are missing at the end). offsets [E + 1] int32: expert e
    has rows offsets[e] .. offsets[e + 1] - 1. Tile i < num_tiles[0] holds up to block_m rows of expert tile_expert[i],
    from row tile_row[i]; entries from num_tiles[0] on are undefined."""

    order: torch.Tensor
    offsets: torch.Tensor
    tile_expert: torch.Tensor
    tile_row: torch.Tensor
    num_tiles: torch.Tensor
    block_m: int


@triton.jit
def histogram(ids, P, start, EP: tl.constexpr, CHUNK: tl.constexpr):
    """How often each expert occurs among pairs start .. start + CHUNK - 1: [EP] int32."""
    p = start + tl.arange(0, CHUNK)
    e = tl.load(ids + p, mask=p < P, other=-1)
    real = (e >= 0) & (e < EP)
    return tl.histogram(tl.where(real, e, 0), EP, mask=real)


@triton.jit(do_not_specialize=["P"])
def count_kernel(ids, counts, P, EP: tl.constexpr, CHUNK: tl.constexpr):
    chunk = tl.program_id(0)
    tl.store(counts + chunk * EP + tl.arange(0, EP), histogram(ids, P, chunk * CHUNK, EP, CHUNK))


@triton.jit(do_not_specialize=["P"])
def sort_kernel(
    ids, counts, order, offsets, tile_expert, tile_row, num_tiles, P,
    E: tl.constexpr, EP: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    e = tl.arange(0, EP)
    total = tl.zeros((EP,), tl.int32)
    for start in range(0, P, CHUNK):
        if COUNTED:
            total += tl.load(counts + (start // CHUNK) * EP + e)
        else:
            total += histogram(ids, P, start, EP, CHUNK)
    total = tl.where(e < E, total, 0)
    tiles = (total + BLOCK_M - 1) // BLOCK_M
    below = e < expert
    row = tl.sum(tl.where(below, total, 0), 0)
    tile = tl.sum(tl.where(below, tiles, 0), 0)
    mine = tl.sum(tl.where(e == expert, total, 0), 0)
    tl.store(offsets + expert, row)
    if expert == E - 1:
        tl.store(offsets + E, row + mine)
        tl.store(num_tiles, tl.sum(tiles, 0))
    for i in range(tl.cdiv(mine, BLOCK_M)):
        tl.store(tile_expert + tile + i, expert)
        tl.store(tile_row + tile + i, row + i * BLOCK_M)
    for start in range(0, P, CHUNK):
        p = start + tl.arange(0, CHUNK)
        hit = tl.load(ids + p, mask=p < P, other=-1) == expert
        rank = tl.cumsum(hit.to(tl.int32), 0)
        tl.store(order + row + rank - 1, p, mask=hit)
        row += tl.max(rank, 0)


def max_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """A bound on the number of tiles, whatever the routes: each expert leaves at most one tile unfilled."""
    return min(num_pairs, num_pairs // block_m + num_experts)


def sort_tokens(ids_TK: torch.Tensor, num_experts: int, block_m: int) -> Sorted:
    """ids [T, K] int32 -> the pairs sorted by expert, in tiles of at most block_m rows."""
    P, device = ids_TK.numel(), ids_TK.device
    EP = max(16, triton.next_power_of_2(num_experts))

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    bound = max_tiles(P, num_experts, block_m)
    result = Sorted(
        integers(P), integers(num_experts + 1), integers(bound), integers(bound), integers(1), block_m
    )
    counts = result.num_tiles
    if P > ALONE:
        counts = integers(triton.cdiv(P, CHUNK), EP)
        count_kernel[(triton.cdiv(P, CHUNK),)](ids_TK, counts, P, EP=EP, CHUNK=CHUNK, num_warps=4)
    sort_kernel[(num_experts,)](
        ids_TK, counts, *result[:5], P,
        E=num_experts, EP=EP, BLOCK_M=block_m, CHUNK=CHUNK, COUNTED=P > ALONE, num_warps=4,
    )  # fmt: skip
    return result
