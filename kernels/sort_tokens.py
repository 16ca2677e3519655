"""Counting sort: the rows of one expert side by side, cut into tiles of at most BLOCK_M rows.

A pair p = t * K + j is token t's visit to its j-th expert. Expert e's pairs begin where those of the experts below it
end, and inside an expert they keep their order (the sort is stable), so the result depends on nothing but the ids. A
tile never holds two experts: the matmul kernels read one expert's weights and some of its rows per tile. Nothing is
padded and nothing waits for the host: the number of tiles stays on the device, its bound P // BLOCK_M + E is known.

One program takes a chunk of pairs. It has to know how many pairs of each expert there are, and how many of them come in
earlier chunks: a first launch counts chunk by chunk (few pairs are one chunk, which counts itself). Inside the chunk it
sorts keys (id, place) in registers; a pair's rank is then its place less the place where its expert begins. The
program whose number is an expert's also writes that expert's tiles. Ids outside 0..E-1 (-1: a padded row) belong to
nobody and sort behind the last expert.

Reference: tinymoe.ops.reference.sort_tokens.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tinymoe.kernels.checks import check, check_number

CHUNK = 1024  # pairs of one program, at most


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
def load_ids(ids, P, chunk, E: tl.constexpr, CHUNK: tl.constexpr):
    """The experts of one chunk's pairs, E for those of nobody."""
    p = chunk * CHUNK + tl.arange(0, CHUNK)
    e = tl.load(ids + p, mask=p < P, other=-1)
    return tl.where((e >= 0) & (e < E), e, E)


@triton.jit(do_not_specialize=["P"])
def count_kernel(ids, counts, P, E: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr):
    chunk = tl.program_id(0)
    tl.store(counts + chunk * EP + tl.arange(0, EP), tl.histogram(load_ids(ids, P, chunk, E, CHUNK), EP))


@triton.jit(do_not_specialize=["P", "chunks"])
def sort_kernel(
    ids, counts, order, offsets, tile_expert, tile_row, num_tiles, P, chunks,
    E: tl.constexpr, EP: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, COUNTED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    me = tl.program_id(0)  # a chunk, an expert, or both
    e = tl.arange(0, EP)
    earlier = tl.zeros((EP,), tl.int32)
    if COUNTED:
        total = tl.zeros((EP,), tl.int32)
        for first in range(0, chunks, AT_ONCE):
            c = first + tl.arange(0, AT_ONCE)
            block = tl.load(counts + c[:, None] * EP + e[None, :], mask=c[:, None] < chunks, other=0)
            total += tl.sum(block, 0)
            earlier += tl.sum(tl.where(c[:, None] < me, block, 0), 0)
    else:
        total = tl.histogram(load_ids(ids, P, 0, E, CHUNK), EP)
    total = tl.where(e < E, total, 0)
    begin = tl.cumsum(total, 0) - total
    tiles = (total + BLOCK_M - 1) // BLOCK_M
    if me < E:
        mine = tl.sum(tl.where(e == me, total, 0), 0)
        row = tl.sum(tl.where(e == me, begin, 0), 0)
        tile = tl.sum(tl.where(e < me, tiles, 0), 0)
        tl.store(offsets + me, row)
        if me == E - 1:
            tl.store(offsets + E, row + mine)
            tl.store(num_tiles, tl.sum(tiles, 0))
        for i in range(tl.cdiv(mine, BLOCK_M)):
            tl.store(tile_expert + tile + i, me)
            tl.store(tile_row + tile + i, row + i * BLOCK_M)
    if me < chunks:
        here = load_ids(ids, P, me, E, CHUNK)
        place = tl.arange(0, CHUNK)
        size = tl.histogram(here, EP)
        to = (
            begin + earlier - (tl.cumsum(size, 0) - size)
        )  # of an expert's pairs: row less place in the sorted chunk
        keys = tl.sort(here * CHUNK + place)
        expert = keys // CHUNK
        row = tl.gather(to, expert, 0) + place
        tl.store(order + row, me * CHUNK + keys % CHUNK, mask=expert < E)


def max_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """A bound on the number of tiles, whatever the routes: each expert leaves at most one tile unfilled."""
    return min(num_pairs, num_pairs // block_m + num_experts)


def sort_tokens(ids_TK: torch.Tensor, num_experts: int, block_m: int) -> Sorted:
    """ids [T, K] int32, contiguous -> the pairs sorted by expert, in tiles of at most block_m rows.

    Raises ValueError for other ids, and for numbers below 1.
    """
    check("ids", ids_TK, ("T", "K"), (torch.int32,))
    check_number("num_experts", num_experts)
    check_number("block_m", block_m)
    P, device = ids_TK.numel(), ids_TK.device
    EP = max(16, triton.next_power_of_2(num_experts + 1))  # one more: nobody
    chunk = min(CHUNK, max(16, triton.next_power_of_2(P)))
    chunks = triton.cdiv(P, chunk)

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    bound = max_tiles(P, num_experts, block_m)
    result = Sorted(
        integers(P), integers(num_experts + 1), integers(bound), integers(bound), integers(1), block_m
    )
    counts = result.num_tiles
    if chunks > 1:
        counts = integers(chunks, EP)
        count_kernel[(chunks,)](ids_TK, counts, P, E=num_experts, EP=EP, CHUNK=chunk, num_warps=4)
    sort_kernel[(max(num_experts, chunks),)](
        ids_TK, counts, *result[:5], P, chunks, E=num_experts, EP=EP, BLOCK_M=block_m, CHUNK=chunk,
        COUNTED=chunks > 1, AT_ONCE=max(1, 2048 // EP), num_warps=4,
    )  # fmt: skip
    return result
