"""What sampling options do to logits: against plain float64 loops, and against transformers' processors."""

import math

import numpy as np
import pytest
import torch
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tinymoe.core.params import SamplingParams
from tinymoe.engine.sampling import Row
from tinymoe.engine.sampling import logits as logits_module
from tinymoe.engine.sampling.logits import apply_edits, restrict

V = 24
IDS = st.integers(0, V - 1)


def row(params=None, prompt=(), output=(), **kw):
    return Row(params or SamplingParams(), 1, len(prompt) + len(output), list(prompt), list(output), **kw)


def judge_edits(x, r):
    """Plain loops in float64, one rule after the other."""
    p, x = r.params, [float(v) for v in x]
    for i in range(len(x)):
        if p.allowed_token_ids is not None and i not in p.allowed_token_ids:
            x[i] = -math.inf
    for *head, last in r.bad_word_ids:
        if (
            len(head) <= len(r.output_token_ids)
            and r.output_token_ids[len(r.output_token_ids) - len(head) :] == head
        ):
            x[last] = -math.inf
    if len(r.output_token_ids) < p.min_tokens:
        for i in r.stop_ids:
            x[i] = -math.inf
    for i, bias in (p.logit_bias or {}).items():
        x[i] += bias
    for i in range(len(x)):
        if i in r.prompt_token_ids or i in r.output_token_ids:
            x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
        times = r.output_token_ids.count(i)
        x[i] -= p.frequency_penalty * times + (p.presence_penalty if times else 0)
    return x


def judge_probabilities(x, p):
    """Probabilities after temperature, min_p, top_k, top_p; and how close the top_p border was."""
    weights = np.exp((np.array(x) - max(x)) / p.temperature)
    weights[weights < p.min_p] = 0
    if 0 < p.top_k < len(x):
        weights[weights < sorted(weights)[-p.top_k]] = 0
    order = sorted(range(len(x)), key=lambda i: (-weights[i], i))
    total, before, kept, margin = weights.sum(), 0.0, [], 1.0
    for i in order:
        margin = min(margin, abs(before / total - p.top_p)) if p.top_p < 1 else margin
        if p.top_p == 1 or before < p.top_p * total or not kept:
            kept.append(i)
        before += weights[i]
    cut = np.zeros(len(x))
    cut[kept] = weights[kept]
    return cut / cut.sum(), margin


@st.composite
def rows(draw):
    maybe = lambda strategy: draw(st.none() | strategy)  # noqa: E731
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.3, 0.7, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, -1, 1, 3, V - 1, V, 100])),
        top_p=draw(st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.02, 0.3, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, -1.5, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.5, 2.0])),
        min_tokens=draw(st.integers(0, 4)),
        max_tokens=None,
        logit_bias=maybe(st.dictionaries(IDS, st.floats(-5, 5, width=32), max_size=4)),
        allowed_token_ids=maybe(st.lists(IDS, min_size=8, max_size=V)),
    )
    return row(
        params,
        draw(st.lists(IDS, max_size=6)),
        draw(st.lists(IDS, max_size=6)),
        stop_ids=draw(st.lists(IDS, max_size=2)),
        bad_word_ids=draw(st.lists(st.lists(IDS, min_size=1, max_size=2), max_size=3)),
    )


def random_logits(r, seed, scale=3.0, vocab=V):
    return torch.randn(r, vocab, generator=torch.Generator().manual_seed(seed)) * scale


@given(st.lists(rows(), min_size=1, max_size=5), st.integers(0, 10_000))
@settings(max_examples=120, deadline=None)
def test_every_row_equals_the_plain_loop(batch, seed):
    x = random_logits(len(batch), seed)
    before = x.clone()
    edited = apply_edits(x, batch)
    assert torch.equal(x, before), "the caller's logits were changed"
    for got, given_x, r in zip(edited, x, batch):
        want = judge_edits(given_x, r)
        assert (got == -math.inf).tolist() == [v == -math.inf for v in want]
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-5)
    assume(all(row.isfinite().any() for row in edited))
    for got, edited_x, r in zip(restrict(edited, batch).softmax(-1), edited, batch):
        want, margin = judge_probabilities(edited_x.tolist(), r.params)
        if margin > 1e-5:  # at the border itself rounding may decide
            assert ((got > 0) == torch.from_numpy(want > 0)).all()
            np.testing.assert_allclose(got.numpy(), want, atol=1e-6)


def test_nothing_to_do_copies_nothing():
    x = random_logits(2, 0)
    assert apply_edits(x, [row(), row(SamplingParams(temperature=0))]) is x


# transformers, one processor at a time and all together


def theirs(processors, x, history=()):
    ids = torch.tensor([list(history)])
    for process in processors:
        x = process(ids, x.clone())
    return x


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", [
    {"temperature": 0.35}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1},
    {"temperature": 1.7, "min_p": 0.01, "top_k": 40, "top_p": 0.9},
])  # fmt: skip
def test_equals_transformers_warpers(options, seed):
    x = random_logits(1, seed, vocab=500)
    make = {
        "temperature": transformers.TemperatureLogitsWarper, "min_p": transformers.MinPLogitsWarper,
        "top_k": transformers.TopKLogitsWarper, "top_p": transformers.TopPLogitsWarper,
    }  # fmt: skip
    want = theirs([make[name](options[name]) for name in make if name in options], x)
    got = restrict(x, [row(SamplingParams(**options))])
    assert torch.equal(got > -math.inf, want > -math.inf)
    torch.testing.assert_close(got.softmax(-1), want.softmax(-1))


def test_equals_transformers_processors():
    x, prompt, output = random_logits(1, 7), [3, 5, 5], [9, 1]
    r = row(SamplingParams(repetition_penalty=1.4), prompt, output)
    want = theirs([transformers.RepetitionPenaltyLogitsProcessor(1.4)], x, prompt + output)
    torch.testing.assert_close(apply_edits(x, [r]), want)
    r = row(SamplingParams(logit_bias={4: 2.5, 0: -7.0}))
    want = theirs([transformers.SequenceBiasLogitsProcessor({(4,): 2.5, (0,): -7.0})], x, [1])
    torch.testing.assert_close(apply_edits(x, [r]), want)
    words = [[2], [9, 1, 6], [9, 7], [1, 8]]
    r = row(prompt=[0], output=output, bad_word_ids=words)
    want = theirs([transformers.NoBadWordsLogitsProcessor(words, eos_token_id=None)], x, [0, *output])
    assert torch.equal(apply_edits(x, [r]), want)
    assert (want[0] == -math.inf).nonzero()[:, 0].tolist() == [2, 6, 8]


def test_bad_words_look_at_the_output_only():
    """Ending "foo b" with "ar" writes only "ar": the prompt is not the model's."""
    r = row(prompt=[9], output=[], bad_word_ids=[[9, 1]])
    assert apply_edits(random_logits(1, 0), [r]).isfinite().all()


@pytest.mark.parametrize("outputs", [0, 2, 3, 4])
def test_min_tokens_bans_stops_until_there_are_enough(outputs):
    r = row(SamplingParams(min_tokens=3), output=[1] * outputs, stop_ids=[0, 7])
    banned = (apply_edits(random_logits(1, 0), [r])[0] == -math.inf).nonzero()[:, 0].tolist()
    assert banned == ([0, 7] if outputs < 3 else [])


# Borders


def kept(x, **options):
    got = restrict(torch.tensor([x]), [row(SamplingParams(**options))])[0]
    return (got > -math.inf).nonzero()[:, 0].tolist()


def test_top_k_keeps_every_tie_with_the_kth():
    assert kept([1.0, 2.0, 2.0, 3.0, 2.0], top_k=2) == [1, 2, 3, 4]
    assert kept([1.0, 2.0, 2.0, 3.0, 2.0], top_k=1) == [3]


def test_top_p_is_the_smallest_set():
    quarters = [0.0] * 4
    assert kept(quarters, top_p=0.5) == [0, 1]  # exactly half is enough, and ties go to the lowest ids
    assert kept(quarters, top_p=0.500001) == [0, 1, 2]
    assert kept([0.0] * 10, top_p=0.3) == [0, 1, 2]
    assert kept([0.0, 5.0, 0.0], top_p=1e-9) == [1]
    assert kept([1.0, 3.0, 1.0, 3.0], top_p=0.9) == [0, 1, 3]


def test_top_p_counts_what_top_k_left():
    """After top_k=2 the two tokens have probability 1/2 each, whatever the tail was."""
    assert kept([4.0, 4.0, 3.9, 3.9, 3.9], top_k=2, top_p=0.5) == [0]


def test_min_p_one_keeps_the_best_only():
    assert kept([1.0, 3.0, 3.0, 2.9], min_p=1.0) == [1, 2]


@pytest.mark.parametrize("p", [0.3, 0.9, 0.99])
def test_wide_nuclei_need_the_full_sort(p):
    """Beyond TOP_P_CANDIDATES a row falls back; a narrow neighbour in the same batch does not."""
    vocab = 4 * logits_module.TOP_P_CANDIDATES
    x = torch.cat((random_logits(1, 1, 0.1, vocab), random_logits(1, 2, 6.0, vocab)))
    got = restrict(x, [row(SamplingParams(top_p=p))] * 2)
    sizes = (got > -math.inf).sum(-1).tolist()
    if p > 0.3:
        assert sizes[0] > logits_module.TOP_P_CANDIDATES > sizes[1]
    for got_r, x_r in zip(got, x):
        want, margin = judge_probabilities(x_r.tolist(), SamplingParams(top_p=p))
        assert margin > 1e-9
        assert ((got_r > -math.inf).numpy() == (want > 0)).all()


def test_tiny_temperature_keeps_precision():
    """Large equal logits a hair apart: dividing before subtracting would overflow float32's mantissa."""
    x = torch.tensor([[30_000.0, 30_000.0 - 2**-9, 0.0]])
    got = restrict(x, [row(SamplingParams(temperature=1e-3))])[0]
    assert got.tolist() == pytest.approx([0.0, -(2**-9) * 1e3, -3e7], rel=1e-6)
