"""Paged attention on any device, in torch: decodes of similar length share one padded call; longer chunks, and a decode that
has no company, run one by one.

The kernel of the same name takes this place on a GPU. Kwon et al., SOSP 2023, arXiv 2309.06180.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinymoe.ops.reference import all_finite, causal_attention, causal_mask, gather_pages

CALL = 1024  # positions of padding that cost as much as one more call


class DecodeGroup(NamedTuple):
    """Decodes that share one call: blocks [S * B] int64, visible [S, 1, 1, C] bool.

    tokens: their places in the step, [S] int64; None if they are the whole step, in order.
    """

    tokens: Tensor | None
    blocks: Tensor
    visible: Tensor


class Chunk(NamedTuple):
    """Tokens start..stop-1 of one sequence with `context` positions.

    blocks: [B] int64, or the number of the first if they follow one another in memory. mask: what each may see, as
    causal_attention takes it.
    """

    start: int
    stop: int
    context: int
    blocks: Tensor | int
    mask: Tensor | None


class AttentionPlan(NamedTuple):
    """How the tokens of one step attend; made once a step, used by every layer with the same window."""

    groups: list[DecodeGroup]
    chunks: list[Chunk]
    window: int | None
    block_size: int


def plan_attention(
    spans: list, block_size: int, window: int | None, device: torch.device | str = "cpu"
) -> AttentionPlan:
    """Sort spans (start, stop, context, block table) into padded decode groups and single chunks."""
    if len(spans) == 1:
        start, stop, context, blocks = spans[0]
        return AttentionPlan([], [_chunk(start, stop, context, blocks, window, device)], window, block_size)
    decodes = [(start, context, blocks) for start, stop, context, blocks in spans if stop - start == 1]
    lone, shared = [], []
    for members in _share_calls(decodes):
        (shared if len(members) > 1 else lone).append(members)
    alone = {members[0][0] for members in lone}
    chunks = [
        _chunk(start, stop, context, blocks, window, device)
        for start, stop, context, blocks in spans
        if stop - start > 1 or start in alone
    ]
    groups = []
    for members in shared:
        contexts = np.array([context for _, context, _ in members])
        width = max(len(blocks) for _, _, blocks in members)
        table = np.zeros((len(members), width), dtype=np.int64)  # block 0 pads: it is read, then masked
        for row, (_, _, blocks) in enumerate(members):
            table[row, : len(blocks)] = blocks
        key = np.arange(width * block_size)
        visible = key < contexts[:, None]
        if window is not None:
            visible &= key >= contexts[:, None] - window
        tokens = torch.tensor([start for start, _, _ in members])
        groups.append(
            DecodeGroup(
                None if len(members) == len(spans) else tokens.to(device),
                torch.from_numpy(table.reshape(-1)).to(device),
                torch.from_numpy(visible[:, None, None, :]).to(device),
            )
        )
    return AttentionPlan(groups, chunks, window, block_size)


def _chunk(
    start: int, stop: int, context: int, blocks: np.ndarray, window: int | None, device: torch.device | str
) -> Chunk:
    """blocks: as many as `context` needs, at least."""
    numbers = blocks.tolist()
    in_order = bool(numbers) and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    where = numbers[0] if in_order else torch.tensor(numbers, dtype=torch.int64, device=device)
    T = stop - start
    plain = T == 1 or (window is None and context == T)  # a prompt from its start needs no mask
    mask = None if plain else causal_mask(T, context, window, device)
    return Chunk(start, stop, context, where, mask)


def _share_calls(decodes: list) -> list[list]:
    """Longest first, decodes share a call until the padding of the shorter ones would cost more than another call."""
    groups, padding = [], 0
    for decode in sorted(decodes, key=lambda d: -d[1]):
        padding += groups[-1][0][1] - decode[1] if groups else 0
        if not groups or padding > CALL:
            groups.append([])
            padding = 0
        groups[-1].append(decode)
    return [sorted(group, key=lambda d: d[0]) for group in groups]


def paged_attention(q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan) -> Tensor:
    """q [T, N, H] over caches [num_blocks, block_size, G, H] -> [T, N, H].

    The step's own keys and values are already in the cache.
    """
    if not plan.groups and len(plan.chunks) == 1:
        return _attend_chunk(q_TNH, k_cache, v_cache, plan.chunks[0], plan)
    _, N, H = q_TNH.shape
    G = k_cache.shape[2]
    out_TNH = torch.empty_like(q_TNH)
    for tokens, blocks, visible in plan.groups:
        S = visible.shape[0]
        k = k_cache.index_select(0, blocks).view(S, -1, G, H).transpose(1, 2)
        v = v_cache.index_select(0, blocks).view(S, -1, G, H).transpose(1, 2)
        q = (q_TNH if tokens is None else q_TNH.index_select(0, tokens)).view(S, N, 1, H)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=N != G)
        if not all_finite(o):  # what the mask hides (stale or foreign slots) may hold NaN, and 0 · NaN is NaN
            k, v = (t.masked_fill(~visible.transpose(2, 3), 0) for t in (k, v))
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=N != G)
        if tokens is None:
            return o.view(S, N, H)
        out_TNH.index_copy_(0, tokens, o.view(S, N, H))
    for chunk in plan.chunks:
        rows = slice(chunk.start, chunk.stop)
        out_TNH[rows] = _attend_chunk(q_TNH[rows], k_cache, v_cache, chunk, plan)
    return out_TNH


def _attend_chunk(
    q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, chunk: Chunk, plan: AttentionPlan
) -> Tensor:
    """The queries of one chunk over its own pages."""
    k, v = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    if isinstance(chunk.blocks, int):
        start = chunk.blocks * plan.block_size
        k, v = k.narrow(0, start, chunk.context), v.narrow(0, start, chunk.context)
    else:
        k, v = (gather_pages(rows, chunk.blocks, plan.block_size, chunk.context) for rows in (k, v))
    return causal_attention(q_TNH, k, v, window=plan.window, mask_TC=chunk.mask)
