"""Rejection sampling keeps the model's distribution, whatever the draft is; the two classic mistakes do not, and are caught.

Judge: the joint distribution of two tokens in closed form, by chi-square.
"""

import math

import numpy as np
import pytest
import torch
from tiny_models import finish, tokens_of

from tinymoe.core.config import EngineConfig
from tinymoe.core.metrics import EngineMetrics
from tinymoe.core.model_config import LayerConfig, ModelConfig, MoEConfig
from tinymoe.core.params import SamplingParams
from tinymoe.engine.engine import Engine
from tinymoe.engine.spec import verify
from tinymoe.model.attention import CausalAttend
from tinymoe.model.decoder import Decoder
from tinymoe.ops.noise import DRAFT, gumbel

V, N = 8, 20_000


def random_distributions(seed, *shape, sharpness=1.5):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, V, generator=generator, dtype=torch.float64) * sharpness).softmax(-1)


def z_of(counts, wanted, n):
    """How far a chi-square statistic lies from its mean, in standard deviations."""
    seen = wanted > 0
    assert counts[~seen].sum() == 0
    chi = float(((counts - n * wanted)[seen] ** 2 / (n * wanted[seen])).sum())
    free = int(seen.sum()) - 1
    return (chi - free) / math.sqrt(2 * free)


def drafted(seeds, position, q_NV):
    noise = gumbel(seeds, torch.full_like(seeds, position), torch.arange(V), DRAFT)
    return (q_NV.log() + noise).argmax(-1)


def two_tokens(p1, p2, q1, q2, keep_later=False):
    """N sequences of two tokens, as the engine makes them: two drafts in one step, and after a rejection of the first
    another step. p2, q2 [V, V] are conditional on the first token."""
    seeds = torch.arange(N) * 7919
    d1 = drafted(seeds, 5, q1.expand(N, V))
    d2 = drafted(seeds, 6, q2[d1])
    p_RV = torch.stack([p1.expand(N, V), p2[d1], torch.full((N, V), 1 / V, dtype=torch.float64)], 1).flatten(
        0, 1
    )
    q_DV = torch.stack([q1.expand(N, V), q2[d1]], 1).flatten(0, 1)
    drafts = torch.stack([d1, d2], 1).flatten()
    accepted, last = map(
        torch.tensor, verify.rejection_sample(p_RV, q_DV, drafts, [2] * N, seeds.tolist(), [5] * N)
    )
    first = torch.where(accepted > 0, d1, last)
    d2_again = drafted(seeds, 6, q2[first])
    kept, other = map(
        torch.tensor,
        verify.rejection_sample(
            torch.stack([p2[first], p2[first]], 1).flatten(0, 1),
            q2[first],
            d2_again,
            [1] * N,
            seeds.tolist(),
            [6] * N,
        ),
    )
    next_step = torch.where(kept > 0, d2_again, other)
    if keep_later:
        next_step = d2
    second = torch.where(accepted > 1, d2, torch.where(accepted == 1, last, next_step))
    counts = torch.bincount(first * V + second, minlength=V * V).double()
    return z_of(counts, (p1[:, None] * p2).flatten(), N), accepted.float().mean()


P1, P2 = random_distributions(1), random_distributions(2, V)
DRAFTS = {
    "random": (random_distributions(3), random_distributions(4, V)),
    "near": (0.7 * P1 + 0.3 * random_distributions(3), 0.7 * P2 + 0.3 * random_distributions(4, V)),
    "itself": (P1, P2),
    "blind": (torch.full((V,), 1 / V, dtype=torch.float64), torch.full((V, V), 1 / V, dtype=torch.float64)),
}


@pytest.mark.parametrize("how", DRAFTS)
def test_two_tokens_have_the_models_joint_distribution(how):
    z, accepted = two_tokens(P1, P2, *DRAFTS[how])
    assert abs(z) < 4, how
    assert (accepted == 2) == (how == "itself")


def test_where_the_model_never_says_what_the_draft_says():
    """Tokens that one of the two excludes: cut by top_p here, or there."""
    p1, p2, (q1, q2) = P1.clone(), P2.clone(), DRAFTS["random"]
    p1[:4], p2[:, 2:5] = 0, 0
    q1, q2 = q1.clone(), q2.clone()
    q1[5:], q2[:, 6:] = 0, 0
    p1, p2, q1, q2 = (x / x.sum(-1, keepdim=True) for x in (p1, p2, q1, q2))
    assert abs(two_tokens(p1, p2, q1, q2)[0]) < 4


@pytest.mark.parametrize("how", ["random", "near", "blind"])
def test_resampling_from_p_is_caught(monkeypatch, how):
    monkeypatch.setattr(verify, "residual", lambda p_SV, q_SV: p_SV)
    assert two_tokens(P1, P2, *DRAFTS[how])[0] > 10


@pytest.mark.parametrize("how", ["random", "near", "blind"])
def test_keeping_tokens_behind_a_rejection_is_caught(how):
    assert two_tokens(P1, P2, *DRAFTS[how], keep_later=True)[0] > 10


def test_counting_kept_drafts_wherever_they_are_is_caught(monkeypatch):
    monkeypatch.setattr(verify, "leading", lambda kept_SK: kept_SK.long().sum(1))
    assert two_tokens(P1, P2, *DRAFTS["random"])[0] > 10


def test_one_step_is_a_function_of_seed_and_position_alone():
    """Whoever stands beside it, and however many drafts those have."""
    p, q = random_distributions(5, 9), random_distributions(6, 6)
    drafts = torch.tensor([1, 2, 3, 4, 5, 6])
    many = verify.rejection_sample(p, q, drafts, [2, 1, 3], [11, 12, 13], [4, 4, 9])
    alone = [
        verify.rejection_sample(p[0:3], q[0:2], drafts[0:2], [2], [11], [4]),
        verify.rejection_sample(p[3:5], q[2:3], drafts[2:3], [1], [12], [4]),
        verify.rejection_sample(p[5:9], q[3:6], drafts[3:6], [3], [13], [9]),
    ]
    assert many == ([a[0][0] for a in alone], [a[1][0] for a in alone])


def test_uniforms_are_uniform_and_of_their_own():
    u = verify.uniforms(torch.arange(50_000), torch.full((50_000,), 3))
    assert u.dtype == torch.float64
    assert 0 < u.min() < 1e-3
    assert 1 - 1e-3 < u.max() < 1
    assert z_of(torch.histc(u, 50, 0, 1), torch.full((50,), 1 / 50), len(u)) < 4
    other = verify.uniforms(torch.arange(50_000), torch.full((50_000,), 4))
    assert abs(float(torch.corrcoef(torch.stack([u, other]))[0, 1])) < 0.02
    noise = gumbel(torch.arange(50_000), torch.full((50_000,), 3), torch.arange(1), DRAFT)[:, 0].double()
    assert abs(float(torch.corrcoef(torch.stack([u, noise]))[0, 1])) < 0.02


def test_nothing_left_of_the_residual_means_p():
    p = random_distributions(7, 2)
    assert torch.equal(verify.residual(p, p.clone()), p)


# Through the engine


def tiny(seed, layer, **options):
    config = {"model_type": "random", "vocab_size": V, "hidden_size": 16, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
    return Decoder(ModelConfig(**config | options, layers=(layer,) * 2)).init_weights(0.5, seed=seed).eval()


@pytest.fixture(scope="module")
def pair():
    moe = LayerConfig(moe=MoEConfig(num_experts=4, top_k=2, intermediate_size=16))
    return tiny(1, moe), tiny(2, LayerConfig(intermediate_size=16))


PROMPT, PENALTY, HEAT = [1, 5, 2], 0.7, 0.8


@torch.inference_mode()
def options_of(model, ids):
    """float64 [V]: what comes after ids, with a presence penalty and a temperature, by the formula."""
    logits = model(torch.tensor(ids), torch.arange(len(ids)), CausalAttend(1, len(ids), model.config))[
        -1
    ].double()
    for token in set(ids[len(PROMPT) :]):
        logits[token] -= PENALTY
    return (logits / HEAT).softmax(-1)


@pytest.mark.parametrize("method", ["draft_model", "self", "ngram"])
def test_tokens_of_the_engine_have_the_plain_distribution(pair, method):
    """The second and the third token, of requests with a penalty, in batches of many."""
    model, draft = pair
    spec = {"method": method, "num_speculative_tokens": 2, "adaptive": False}
    spec |= {"draft_model": {"model": "the tiny one"}, "self": {}, "ngram": {"prompt_lookup_min": 1}}[method]
    config = EngineConfig(max_model_len=64, speculative_config=spec)
    one = Engine(model, config, draft=draft if method == "draft_model" else None)
    n = 3000
    for i in range(n):
        params = SamplingParams(temperature=HEAT, presence_penalty=PENALTY, seed=i, max_tokens=4)
        one.add_request(str(i), PROMPT, params)
    counts = torch.zeros(V, V, dtype=torch.float64)
    for output in finish(one).values():
        (tokens,) = tokens_of(output)
        counts[tokens[1], tokens[2]] += 1
    wanted = torch.zeros(V, V, dtype=torch.float64)
    for a, pa in enumerate(options_of(model, PROMPT).tolist()):
        for b, pb in enumerate(options_of(model, [*PROMPT, a]).tolist()):
            wanted[b] += pa * pb * options_of(model, [*PROMPT, a, b])
    assert abs(z_of(counts.flatten(), wanted.flatten(), n)) < 4
    m = one.get_metrics()
    assert 0 < m["accepted_tokens"] < m["draft_tokens"]


def test_leading_runs_are_counted_as_by_a_loop():
    generator = np.random.default_rng(4)
    for _ in range(200):
        counts = generator.integers(0, 6, generator.integers(1, 9)).tolist()
        kept = [generator.random(count) < 0.7 for count in counts]
        wanted = [next((i for i, one in enumerate(part) if not one), len(part)) for part in kept]
        assert verify.leading_runs(np.concatenate(kept), counts) == wanted
    assert verify.leading_runs(np.zeros(0, dtype=bool), []) == []


def test_verifications_are_counted_place_by_place():
    """By a loop over made-up verifications (drafted, accepted)."""
    generator, metrics, most = np.random.default_rng(6), EngineMetrics(), 5
    metrics.drafts_at, metrics.accepted_at = [0] * most, [0] * most
    drafts_at, accepted_at, drafted, accepted = [0] * most, [0] * most, 0, 0
    for _ in range(20):
        pairs = [(k, int(generator.integers(0, k + 1))) for k in generator.integers(1, most + 1, 7).tolist()]
        lengths = [[sum(pair[side] == k for pair in pairs) for k in range(most + 1)] for side in (0, 1)]
        metrics.count_drafts(*lengths)
        for k, kept in pairs:
            drafted, accepted = drafted + k, accepted + kept
            for i in range(k):
                drafts_at[i] += 1
                accepted_at[i] += i < kept
    assert (metrics.drafts_at, metrics.accepted_at) == (drafts_at, accepted_at)
    assert (metrics.draft_tokens, metrics.accepted_tokens) == (drafted, accepted)
    assert (metrics.verifications, metrics.verified_tokens) == (140, 140 + accepted)
