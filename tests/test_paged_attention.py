"""Paged attention in torch against a loop over positions in float64, and which decodes share a call."""

from importlib import import_module

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinymoe import ops

paged = import_module("tinymoe.ops.paged_attention")  # the package has a function of this name


def spans_of(lengths, block_size, seed=0, shuffled=True):
    """Spans of (queries, context) pairs over shuffled blocks, or blocks in order, and the number of blocks."""
    order = np.arange(sum(-(-c // block_size) for _, c in lengths))
    if shuffled:
        order = np.random.default_rng(seed).permutation(order)
    spans, at, row = [], 0, 0
    for queries, context in lengths:
        count = -(-context // block_size)
        spans.append((row, row + queries, context, order[at : at + count].astype(np.int32)))
        at, row = at + count, row + queries
    return spans, at


def one_row(q_NH, positions, cache, window):
    """One query against the keys and values of `positions` (block, slot), the last of which is its own."""
    k, v = (torch.stack([c[b, s] for b, s in positions]).double() for c in cache)
    if window:
        k, v = k[-window:], v[-window:]
    group = q_NH.shape[0] // k.shape[1]
    out = []
    for n, q in enumerate(q_NH.double()):
        weights = (k[:, n // group] @ q / q.shape[0] ** 0.5).softmax(0)
        out.append(weights @ v[:, n // group])
    return torch.stack(out)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 9)],
        [(4, 18)],  # a verification alone
        [(2, 2)],
        [(5, 7), (3, 22)],
        [(1, 1), (1, 33), (1, 7)],  # decodes alone, in order
        [(3, 11), (1, 30), (4, 4), (1, 2), (1, 17)],  # decodes between chunks
    ],
)
def test_every_row_sees_its_own_past_and_nothing_else(lengths, shuffled, window, monkeypatch):
    monkeypatch.setattr(paged, "CALL", 20)  # so that even these few take more than one call
    spans, blocks = spans_of(lengths, block_size=4, shuffled=shuffled)
    generator = torch.Generator().manual_seed(1)
    k_cache, v_cache = torch.randn(2, blocks, 4, 2, 8, generator=generator)
    q = torch.randn(sum(n for n, _ in lengths), 6, 8, generator=generator)
    used = {
        (int(b), s)
        for _, _, context, table in spans
        for i in range(context)
        for b, s in [(table[i // 4], i % 4)]
    }
    for b in range(blocks):
        for s in range(4):
            if (b, s) not in used:  # the rest of a last page
                k_cache[b, s] = v_cache[b, s] = float("nan")
    out = ops.paged_attention(q, k_cache, v_cache, ops.plan_attention(spans, 4, window))
    for start, stop, context, table in spans:
        for row in range(start, stop):
            seen = context - (stop - row) + 1
            positions = [(int(table[i // 4]), i % 4) for i in range(seen)]
            wanted = one_row(q[row], positions, (k_cache, v_cache), window)
            assert torch.allclose(out[row].double(), wanted, atol=1e-5)


@given(st.lists(st.integers(1, 4000), max_size=40))
def test_decodes_share_a_call_until_padding_costs_more_than_another(contexts):
    decodes = [(start, context, None) for start, context in enumerate(contexts)]
    groups = paged._share_calls(decodes)
    assert sorted(d for group in groups for d in group) == decodes
    wasted = []
    for group in groups:
        assert group == sorted(group)
        longest = max(d[1] for d in group)
        wasted.append(sum(longest - d[1] for d in group))
    assert all(w <= paged.CALL for w in wasted)
    for group, waste, after in zip(groups, wasted, groups[1:]):  # the next one would not have fitted
        longest = max(d[1] for d in group)
        assert waste + longest - max(d[1] for d in after) > paged.CALL
