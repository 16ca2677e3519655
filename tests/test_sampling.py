"""The sampler: exact greedy, the drawn distribution, independence of the batch, logprobs, and rows that fail alone."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinymoe.core.params import SamplingParams
from tinymoe.engine.sampling import Row, Sampler, gather_logprobs, prompt_logprobs
from tinymoe.engine.sampling import sampler as sampler_module
from tinymoe.ops import noise

GREEDY = SamplingParams(temperature=0)
SAMPLER = Sampler()


def row(params=None, seed=1, position=0, prompt=(), output=(), **kw):
    return Row(params or SamplingParams(), seed, position, list(prompt), list(output), **kw)


def random_logits(r, v, seed=0, scale=2.0):
    return torch.randn(r, v, generator=torch.Generator().manual_seed(seed)) * scale


def tokens(x, rows, **kw):
    return [s.token for s in SAMPLER.sample(x, rows, **kw)]


# Greedy


def test_greedy_is_the_argmax_and_ties_go_to_the_lowest_id():
    x = random_logits(40, 1000)
    assert tokens(x, [row(GREEDY)] * 40) == [int(np.argmax(r)) for r in x.numpy()]
    x[:, [700, 123, 999]] = 50.0
    assert tokens(x, [row(GREEDY)] * 40) == [123] * 40
    assert tokens(torch.zeros(1, 4096), [row(SamplingParams(temperature=9e-6))]) == [0]


def test_greedy_ignores_seed_and_filters():
    x = random_logits(1, 50)
    params = SamplingParams(temperature=0, top_k=3, top_p=0.1, min_p=0.9)
    assert {tokens(x, [row(params, seed=s, position=s)])[0] for s in range(20)} == {int(x.argmax())}


# Distribution: 20,000 draws, chi-square


def p_value(statistic, freedom):
    return torch.special.gammaincc(
        torch.tensor(freedom / 2.0).double(), torch.tensor(statistic / 2.0).double()
    ).item()


def chi_square(drawn, probabilities):
    """p-value of drawn tokens [n] under probabilities [V]; a token of probability 0 must never be drawn."""
    counts = np.bincount(drawn, minlength=len(probabilities))
    alive = np.array(probabilities) > 0
    assert counts[~alive].sum() == 0
    expected = len(drawn) * np.array(probabilities)[alive]
    return p_value(((counts[alive] - expected) ** 2 / expected).sum(), alive.sum() - 1)


N = 20_000
X = [1.0, 0.0, -1.0, 2.0, 0.5, -3.0, 0.1, 1.9]


def draw_many(params=None, key="position"):
    """20,000 draws from X at consecutive positions (or seeds)."""
    rows = [row(params, **{"seed": 5, "position": 3, key: i}) for i in range(N)]
    return np.array(tokens(torch.tensor([X]).expand(N, -1), rows))


def softmax(x):
    weights = np.exp(np.array(x, dtype=np.float64) - max(x))
    return weights / weights.sum()


@pytest.mark.parametrize("key", ["position", "seed"])
def test_drawn_distribution(key):
    assert chi_square(draw_many(key=key), softmax(X)) > 1e-3


def test_drawn_distribution_with_options():
    params = SamplingParams(temperature=1.5, top_k=5, top_p=0.8, logit_bias={3: -1.0})
    x = np.array(X) + np.array([0, 0, 0, -1.0, 0, 0, 0, 0])
    p = softmax(x / 1.5)
    p[np.argsort(-p)[5:]] = 0
    before, total = 0.0, p.sum()
    for i in np.argsort(-p):
        weight = p[i]
        p[i] = weight if before < 0.8 * total else 0
        before += weight
    assert (p > 0).sum() == 4
    assert chi_square(draw_many(params), p / p.sum()) > 1e-3


def test_neighbouring_draws_are_independent():
    """Pairs (token at i, token at i+1): 64 cells."""
    drawn = draw_many()
    for lag in (1, 2):
        pairs = drawn[:-lag:2] * 8 + drawn[lag::2][: len(drawn[:-lag:2])]
        assert chi_square(pairs, np.outer(softmax(X), softmax(X)).flatten()) > 1e-3


@pytest.mark.parametrize("mutant", ["normal noise", "stuck position", "one noise for all tokens"])
def test_the_chi_square_finds_mutants(monkeypatch, mutant):
    def wrong(seeds, positions, ids, stream):
        if mutant == "stuck position":
            return noise.gumbel(seeds, positions // 2, ids, stream)
        if mutant == "one noise for all tokens":
            return noise.gumbel(seeds, positions, ids * 0, stream)
        return torch.erfinv(noise.uniform(seeds, positions, ids, stream) * 2 - 1) * math.sqrt(2)

    monkeypatch.setattr(sampler_module, "gumbel", wrong)
    if mutant == "stuck position":  # each token comes twice: only the pairs show it
        drawn = draw_many()
        assert chi_square(drawn[::2] * 8 + drawn[1::2], np.outer(softmax(X), softmax(X)).flatten()) < 1e-9
    else:
        assert chi_square(draw_many(), softmax(X)) < 1e-9


def test_draw_is_the_gumbel_argmax_in_float64():
    """Token by token, from the integer hash up."""
    x, rows = random_logits(200, 300), [row(seed=i * 12_345, position=i) for i in range(200)]
    seeds, positions = (torch.tensor([getattr(r, n) for r in rows]) for n in ("seed", "position"))
    bits = noise.hash_bits(seeds, positions, torch.arange(300)).numpy().view(np.uint64) >> np.uint64(11)
    u = (bits.astype(np.float64) + 0.5) * 2.0**-53
    scores = x.double().numpy() - np.log(-np.log1p(-u))
    assert tokens(x, rows) == scores.argmax(-1).tolist()


# Keys


def test_seed_position_and_stream_matter_and_nothing_else_does():
    x = torch.zeros(1, 5000)
    base = tokens(x, [row(seed=3, position=9)])
    assert base == tokens(x, [row(seed=3, position=9, prompt=[1, 2], output=[4])])
    assert len({*base, *tokens(x, [row(seed=4, position=9)]), *tokens(x, [row(seed=3, position=10)])}) == 3
    assert base != tokens(x, [row(seed=3, position=9)], stream=noise.DRAFT)
    assert tokens(x, [row(seed=2**63 - 1, position=2**31)])[0] in range(5000)


V = 40
MIXED = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.7]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 1.0]),
    logprobs=st.sampled_from([None, 0, 3]),
    logit_bias=st.sampled_from([None, {1: 3.0}]),
    allowed_token_ids=st.sampled_from([None, (1, 2, 3, 30)]),
    min_tokens=st.sampled_from([0, 2]),
)


@given(st.lists(MIXED, min_size=2, max_size=8), st.integers(0, 10**6), st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_a_row_does_not_notice_its_neighbours(params, seed, random):
    """Alone = in a batch = permuted, and a broken neighbour changes nothing."""
    n = len(params)
    x = random_logits(n, V, seed)
    rows = [
        row(p, seed + i, i * 7, [1, 2], [3, i], stop_ids=[0], bad_word_ids=[[4], [i, 5]])
        for i, p in enumerate(params)
    ]
    batch = SAMPLER.sample(x, rows)
    order = random.sample(range(n), n)
    permuted = SAMPLER.sample(x[order], [rows[i] for i in order])
    broken = x.clone()
    broken[order[0], 11] = math.nan
    isolated = SAMPLER.sample(broken, rows)
    for i in range(n):
        others = [SAMPLER.sample(x[i : i + 1], rows[i : i + 1])[0], permuted[order.index(i)]]
        for other in [*others, *([isolated[i]] if i != order[0] else [])]:
            assert (other.token, other.error) == (batch[i].token, None)
            assert (other.logprobs or {}).keys() == (batch[i].logprobs or {}).keys()
            assert other.logprob == pytest.approx(batch[i].logprob, abs=1e-6)
    assert isolated[order[0]].token == -1


def test_rows_in_several_blocks_agree_with_rows_alone():
    """A vocabulary so large that the draw works block by block."""
    x, rows = random_logits(5, 60_000), [row(seed=i, position=i) for i in range(5)]
    assert tokens(x, rows) == [tokens(x[i : i + 1], rows[i : i + 1])[0] for i in range(5)]


def test_input_is_left_alone():
    x = random_logits(2, V)
    before = x.clone()
    SAMPLER.sample(
        x,
        [row(SamplingParams(logit_bias={1: 9.0}, top_p=0.5, frequency_penalty=1.0), output=[1]), row(GREEDY)],
    )
    assert torch.equal(x, before)


# Options end to end (the arithmetic is in test_logits.py)


def test_options_decide_the_token():
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]])

    def choose(prompt=(), output=(), stop_ids=(), bad_word_ids=(), **options):
        r = row(SamplingParams(temperature=0, **options), prompt=prompt, output=output, stop_ids=stop_ids, bad_word_ids=bad_word_ids)  # fmt: skip
        return tokens(x, [r])[0]

    assert choose() == 4
    assert choose(allowed_token_ids=[0, 2]) == 2
    assert choose(logit_bias={1: 9.0}) == 1
    assert choose(stop_ids=[4], min_tokens=1) == 3
    assert choose(stop_ids=[4], min_tokens=1, output=[0]) == 4
    assert choose(bad_word_ids=[[4]]) == 3
    assert choose(bad_word_ids=[[2, 4]], output=[2]) == 3
    assert choose(bad_word_ids=[[2, 4]], output=[2, 0]) == 4
    assert choose(repetition_penalty=2.0, prompt=[4]) == 3
    assert choose(presence_penalty=1.5, prompt=[4]) == 4
    assert choose(presence_penalty=1.5, output=[4]) == 3
    assert choose(frequency_penalty=0.6, output=[4]) == 4
    assert choose(frequency_penalty=0.6, output=[4, 4]) == 3


# Logprobs


def test_logprobs_are_the_models_own():
    x = random_logits(3, 100)
    want = torch.log_softmax(x.double(), -1).numpy()
    params = [SamplingParams(temperature=0, logprobs=3, logit_bias={7: 50.0}), SamplingParams(temperature=3.0, top_k=2, logprobs=0),
              SamplingParams(temperature=0, logprobs=5)]  # fmt: skip
    out = SAMPLER.sample(x, [row(p, i, 4) for i, p in enumerate(params)])
    assert out[0].token == 7  # forced, yet reported with the model's own probability
    for r, (sampled, p) in enumerate(zip(out, params)):
        order = np.argsort(-want[r], kind="stable").tolist()
        assert list(sampled.logprobs) == list(dict.fromkeys([sampled.token, *order[: p.logprobs]]))
        for token, report in sampled.logprobs.items():
            assert report.logprob == pytest.approx(want[r][token], abs=1e-5)
            assert report.rank == order.index(token) + 1
        assert sampled.logprob == sampled.logprobs[sampled.token].logprob
    assert SAMPLER.sample(x[:1], [row(GREEDY)])[0].logprobs is None


def test_equal_logits_rank_by_id():
    x = torch.tensor([[1.0, 5.0, -0.0, 5.0, 0.0, 5.0, -2.0]])
    report = gather_logprobs(x, [5], [2])[0]
    assert {i: r.rank for i, r in report.items()} == {5: 3, 1: 1, 3: 2}
    assert {i: r.rank for i, r in gather_logprobs(x, [4], [7])[0].items()} == {
        4: 6,
        1: 1,
        3: 2,
        5: 3,
        0: 4,
        2: 5,
        6: 7,
    }


def test_prompt_logprobs_score_the_next_token():
    x, targets = random_logits(6, 30), [3, 3, 29, 0, 11, 7]
    want = torch.log_softmax(x.double(), -1)
    got = prompt_logprobs(x, targets, 2)
    assert len(got) == 6
    for t, (target, report) in enumerate(zip(targets, got)):
        best = want[t].argsort(descending=True).tolist()
        assert set(report) == {target, *best[:2]}
        assert report[target].logprob == pytest.approx(want[t, target].item(), abs=1e-5)
        assert report[target].rank == best.index(target) + 1


# Rows that fail


def failing(x, r):
    """The error of row 1 between two sound neighbours, which must not notice."""
    sound = random_logits(1, len(x))
    rows = [row(GREEDY), r, row(SamplingParams(top_p=0.9, min_p=0.01, top_k=3), seed=5)]
    out = SAMPLER.sample(torch.cat((sound, torch.tensor([x]), sound)), rows)
    assert [out[0], out[2]] == [SAMPLER.sample(sound, [r])[0] for r in (rows[0], rows[2])]
    assert out[0].error is out[2].error is None
    assert out[1][:3] == (-1, None, None)
    return out[1].error


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(top_p=0.9, top_k=2, min_p=0.1),
        SamplingParams(logprobs=2, allowed_token_ids=[0]),
    ],
)
@pytest.mark.parametrize(("x", "said"), [
    ([0.0, math.nan, 1.0, math.nan], "logits contain NaN at position 17 (2 of 4 values, the first at token id 1)"),
    ([0.0, math.inf, 1.0, 2.0], "logits contain +inf at position 17 (1 of 4 values)"),
    ([-math.inf] * 4, "all 4 logits are -inf at position 17"),
])  # fmt: skip
def test_broken_logits_fail_alone(params, x, said):
    error = failing(x, row(params, position=17))
    assert error.startswith(said)
    assert error.endswith(
        "the model's weights or activations are broken, or its dtype is too narrow; try dtype='float32'"
    )


def test_banning_everything_fails_alone_and_names_the_options():
    x = [0.0, 1.0, 2.0, 3.0]
    r = row(
        SamplingParams(allowed_token_ids=[2, 3], min_tokens=5, max_tokens=None),
        position=8,
        stop_ids=[3],
        bad_word_ids=[[2]],
    )
    assert failing(x, r) == (
        "every token is banned at position 8 by allowed_token_ids (2 ids) and bad_words and "
        "min_tokens (0 of 5 so far: eos and stop ids are banned): loosen one of them"
    )
    error = failing([-math.inf, 1.0, -math.inf, -math.inf], row(bad_word_ids=[[1]]))
    assert (
        error
        == "every token is banned at position 0 by bad_words and logits of -inf from the model: loosen one of them"
    )


# Arguments


def test_shapes_and_dtypes_are_checked():
    with pytest.raises(
        ValueError, match=r"float32 \[R, V\] with a row for each of the 1 sequences, got float32 \[2, 4\]"
    ):
        SAMPLER.sample(torch.zeros(2, 4), [row()])
    with pytest.raises(ValueError, match="got bfloat16"):
        SAMPLER.sample(torch.zeros(1, 4, dtype=torch.bfloat16), [row()])
    assert SAMPLER.sample(torch.zeros(0, 4), []) == []
