"""Router, dispatch and expert paths against loops over single tokens in float64."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tinymoe import ops
from tinymoe.core.model_config import MoEConfig
from tinymoe.experts import paths
from tinymoe.experts.dispatch import LocalDispatch
from tinymoe.experts.router import Router
from tinymoe.model.moe import MoE

NAN, INF, HUGE = math.nan, math.inf, torch.finfo(torch.float32).max


def normal(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


# Router


def route_one(
    logits, top_k, scoring="softmax", bias=None, n_group=1, topk_group=1, renormalize=True, scale=1.0
):
    """One token in Python floats: ids, weights, and every pair of scores that was compared."""
    x = [-HUGE if math.isnan(v) else max(-HUGE, min(HUGE, v)) for v in logits]
    E = len(x)
    if scoring == "softmax":
        weights = [math.exp(v - max(x)) for v in x]
        weights = [w / sum(weights) for w in weights]
        logs = x
        scores = list(x) if bias is None and n_group == 1 else list(weights)
    else:
        weights = [1 / (1 + math.exp(-v)) if v > -700 else 0.0 for v in x]
        logs = [-math.log1p(math.exp(-v)) if v > -700 else v for v in x]
        scores = list(weights)
    if bias is not None:
        scores = [s + b for s, b in zip(scores, bias)]
    size = E // n_group
    worth = [sum(sorted(scores[g * size : (g + 1) * size])[-2:]) for g in range(n_group)]
    groups = sorted(range(n_group), key=lambda g: (-worth[g], g))[:topk_group]
    allowed = [e for e in range(E) if e // size in groups]
    ids = sorted(allowed, key=lambda e: (-scores[e], e))[:top_k]
    chosen = [weights[e] for e in ids]
    if renormalize:
        # Proportions survive where every share underflows.
        chosen = [math.exp(logs[e] - max(logs[i] for i in ids)) for e in ids]
        chosen = [w / sum(chosen) for w in chosen]
    return ids, [w * scale for w in chosen], [scores, worth]


def close_calls(values):
    """Whether two unequal scores are so near that float32 may see a tie."""
    ordered = sorted(values)
    return any(0 < b - a < 1e-5 * max(1.0, abs(a)) for a, b in pairwise(ordered))


ODD = st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 3.3e38, -3.3e38])
PLAIN = st.floats(-8, 8, width=16)
FEW = st.integers(-2, 2).map(float)  # ties everywhere


@settings(max_examples=200)
@given(data=st.data(), values=st.sampled_from([PLAIN, FEW, st.one_of(FEW, ODD), ODD]))
def test_router_equals_a_loop_over_single_tokens(data, values):
    n_group = data.draw(st.sampled_from([1, 1, 2, 3]))
    E = n_group * data.draw(st.integers(1, 6))
    topk_group = data.draw(st.integers(1, n_group))
    options = {
        "top_k": data.draw(st.integers(1, E // n_group * topk_group)),
        "scoring": data.draw(st.sampled_from(["softmax", "sigmoid"])),
        "n_group": n_group,
        "topk_group": topk_group,
        "renormalize": data.draw(st.booleans()),
        "scale": data.draw(st.sampled_from([1.0, 2.5])),
    }
    bias = data.draw(
        st.one_of(st.none(), st.lists(st.integers(-3, 3).map(lambda i: i / 4), min_size=E, max_size=E))
    )
    rows = data.draw(st.lists(st.lists(values, min_size=E, max_size=E), min_size=1, max_size=4))
    rows = torch.tensor(rows)
    ids, weights = ops.topk_softmax(
        rows, selection_bias_E=None if bias is None else torch.tensor(bias), **options
    )
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
    for t, row in enumerate(rows.tolist()):
        wanted_ids, wanted, compared = route_one(row, bias=bias, **options)
        assert len(set(ids[t].tolist())) == options["top_k"]
        assert set(ids[t].tolist()) <= set(range(E))
        assert torch.isfinite(weights[t]).all()
        raw = (
            options["scoring"] == "softmax" and bias is None and n_group == 1
        )  # compared as they came, exactly
        if raw or not any(map(close_calls, compared)):
            assert ids[t].tolist() == wanted_ids
            assert weights[t].tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_equal_logits_go_to_the_lower_expert_best_first():
    ids, weights = ops.topk_softmax(torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]]), 4)
    assert ids.tolist() == [[1, 2, 4, 0]]
    assert weights[0, 0] == weights[0, 1] == weights[0, 2] > weights[0, 3]


def test_logits_that_share_a_float32_probability_are_told_apart():
    ids, _ = ops.topk_softmax(torch.tensor([[0.0, 200.0, 199.0, 100.0, 101.0]]), 4)
    assert ids.tolist() == [[1, 2, 4, 3]]  # exp(-99) and exp(-100) of 200 are tiny; both kept their order


def test_broken_logits_still_name_distinct_experts():
    rows = torch.tensor([[NAN] * 4, [-INF] * 4, [INF] * 4, [NAN, 1.0, NAN, 0.0], [-INF, NAN, INF, 2.0]])
    ids, weights = ops.topk_softmax(rows, 3)
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 3, 0], [2, 3, 0]]
    assert weights.sum(-1).tolist() == pytest.approx([1.0] * 5)


def test_a_bias_chooses_and_does_not_weigh():
    logits, bias = torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([-9.0, 0.0, 0.0])
    ids, weights = ops.topk_softmax(logits, 2, scoring="sigmoid", selection_bias_E=bias, renormalize=False)
    assert ids.tolist() == [[1, 2]]
    assert weights[0].tolist() == pytest.approx([1 / (1 + math.exp(-2)), 1 / (1 + math.exp(-1))])


def test_router_computes_in_float32_whatever_comes():
    config = MoEConfig(num_experts=6, top_k=2, intermediate_size=4)
    router = Router(config, 8)
    with torch.no_grad():
        router.weight.copy_(normal(6, 8))
    router = router.to(torch.bfloat16)
    x = normal(5, 8, seed=1).bfloat16()
    logits, ids, weights = router(x)
    wanted = x.double() @ router.weight.double().T
    assert logits.dtype == weights.dtype == torch.float32
    assert torch.allclose(logits.double(), wanted, atol=1e-5)
    assert torch.equal(ids, wanted.topk(2).indices)


# Dispatch


@given(T=st.integers(0, 12), E=st.integers(1, 7), data=st.data())
def test_dispatch_is_a_stable_bijection(T, E, data):
    K = data.draw(st.integers(1, E))
    ids = torch.tensor([data.draw(st.permutations(range(E)))[:K] for _ in range(T)], dtype=torch.int64).view(
        T, K
    )
    x = torch.arange(T, dtype=torch.float32)[:, None] * torch.ones(3)
    sent = LocalDispatch(E).dispatch(x, ids)
    order = sent.order_P.tolist()
    pairs = [(int(ids[p // K, p % K]), p) for p in order]
    assert sorted(order) == list(range(T * K))
    assert pairs == sorted(pairs)  # by expert, and inside an expert as they came
    assert sent.counts_E.tolist() == [int((ids == e).sum()) for e in range(E)]
    assert sent.rows_PD[:, 0].tolist() == [p // K for p in order]
    y = normal(T * K, 3)
    weights = normal(T, K, seed=1)
    out = LocalDispatch(E).combine(y, sent, weights)
    wanted = torch.zeros(T, 3, dtype=torch.float64)
    for row, p in enumerate(order):
        wanted[p // K] += y[row].double() * weights[p // K, p % K].double()
    assert out.shape == (T, 3)
    assert torch.allclose(out.double(), wanted, atol=1e-5)


def test_combine_keeps_the_type_of_the_rows_and_sums_in_float32():
    ids = torch.tensor([[0, 1, 2, 3]])
    sent = LocalDispatch(4).dispatch(torch.zeros(1, 2).bfloat16(), ids)
    y = torch.tensor([[256.0, 1.0], [1.0, 1.0], [1.0, 1.0], [-256.0, 1.0]]).bfloat16()
    out = LocalDispatch(4).combine(y, sent, torch.ones(1, 4))
    assert out.dtype == torch.bfloat16
    assert out.tolist() == [[2.0, 4.0]]  # in bfloat16, 256 + 1 would be 256


# Expert paths

ACTS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


def one_row(x, gate_up, down, act):
    gate, up = (gate_up.double() @ x.double()).chunk(2)
    return down.double() @ (act(gate) * up)


@pytest.mark.parametrize("path", paths.PATHS)
@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    D=st.integers(1, 9),
    width=st.integers(1, 9),
    act=st.sampled_from(list(ACTS)),
)
def test_every_path_equals_a_loop_over_single_rows(path, counts, D, width, act):
    if path == "grouped":
        D, width = 4 * D, 4 * width  # rows of 16 bytes
    E, P = len(counts), sum(counts)
    gate_up, down, rows = normal(E, 2 * width, D), normal(E, D, width, seed=1), normal(P, D, seed=2)
    out = paths.run(path, rows, torch.tensor(counts), gate_up, down, ACTS[act])
    assert out.shape == (P, D)
    assert out.dtype == torch.float32
    experts = [e for e, count in enumerate(counts) for _ in range(count)]
    for p, e in enumerate(experts):
        assert torch.allclose(
            out[p].double(), one_row(rows[p], gate_up[e], down[e], ACTS[act]), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("path", paths.PATHS)
def test_weights_of_experts_without_rows_are_never_read(path):
    counts = torch.tensor([0, 3, 0, 1, 0])
    gate_up, down, rows = normal(5, 16, 8), normal(5, 8, 8, seed=1), normal(4, 8, seed=2)
    wanted = paths.run(path, rows, counts, gate_up, down, F.silu)
    idle = counts == 0
    gate_up[idle], down[idle] = NAN, NAN
    assert torch.equal(paths.run(path, rows, counts, gate_up, down, F.silu), wanted)
    gate_up[1] = NAN
    out = paths.run(path, rows, counts, gate_up, down, F.silu)
    assert out[:3].isnan().all()
    assert torch.equal(out[3], wanted[3])


def test_an_unknown_path_is_named():
    known = r"\['adaptive', 'gather', 'grouped', 'loop', 'masked', 'padded'\]"
    with pytest.raises(ValueError, match=f"unknown expert path 'warp'; known: {known}"):
        paths.run(
            "warp", torch.zeros(1, 2), torch.tensor([1]), torch.zeros(1, 2, 2), torch.zeros(1, 2, 1), F.silu
        )


@pytest.mark.parametrize(
    ("sizes", "path"),
    [
        ([1, 0, 1], "loop"),
        ([4, 4, 4, 4], "padded"),
        ([4, 0, 8, 4], "padded"),
        ([0, 100, 1, 1], "loop"),
        ([100, 90, 80], "padded"),
        ([600, 600], "loop"),
    ],
)
def test_padding_is_chosen_where_it_wastes_little(sizes, path):
    assert paths.choose(sizes) == path


def test_the_layout_for_a_cpu_changes_no_number():
    moe, x = block(), normal(40, 8, seed=3)
    wanted, kept = moe(x), [moe.experts.gate_up.clone(), moe.experts.down.clone()]
    moe.experts.lay_out_for_cpu()
    assert torch.equal(moe.experts.gate_up, kept[0])
    assert torch.equal(moe.experts.down, kept[1])
    assert moe.experts.gate_up.stride(1) == moe.experts.down.stride(1) == 1
    assert torch.allclose(moe(x), wanted, atol=1e-6)


@given(T=st.integers(1, 7), K=st.integers(1, 4), E=st.integers(4, 9), seed=st.integers(0, 99))
def test_few_tokens_equal_a_loop_over_single_pairs(T, K, E, seed):
    ids = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(seed + t))[:K] for t in range(T)])  # fmt: skip
    weights, x = normal(T, K, seed=seed), normal(T, 6, seed=seed + 1)
    gate_up, down = normal(E, 10, 6), normal(E, 6, 5, seed=1)
    for e in set(range(E)) - set(ids.flatten().tolist()):
        gate_up[e], down[e] = NAN, NAN  # never read
    with torch.no_grad():
        out = paths.few(x, ids, weights, gate_up, down, F.gelu)
    assert out.dtype == torch.float32
    for t in range(T):
        pairs = zip(ids[t].tolist(), weights[t].double())
        wanted = sum(w * one_row(x[t], gate_up[e], down[e], F.gelu) for e, w in pairs)
        assert torch.allclose(out[t].double(), wanted, atol=1e-4, rtol=1e-4)


def test_few_tokens_take_their_own_way_unless_a_gradient_is_wanted(monkeypatch):
    taken, few = [], paths.few
    monkeypatch.setattr(paths, "few", lambda x, *more: taken.append(len(x)) or few(x, *more))
    moe = block()
    with torch.no_grad():
        for T in (1, 2, 7, 8):
            moe(normal(T, 8))
    assert taken == [2, 7]
    x = normal(3, 8).requires_grad_()
    moe(x).sum().backward()
    assert taken == [2, 7]
    assert x.grad is not None


# The whole block


def block(path="adaptive", act=F.silu, D=8, **options):
    config = MoEConfig(**{"num_experts": 5, "top_k": 2, "intermediate_size": 8, **options})
    moe = MoE(config, D, 0, act)
    with torch.no_grad():
        for seed, parameter in enumerate(moe.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed, scale=0.5))
    moe.path = path
    return moe.requires_grad_(False)


def block_in_float64(moe, x):
    c, out = moe.config, torch.zeros(x.shape, dtype=torch.float64)
    for t, row in enumerate(x):
        logits = (moe.router.weight.double() @ row.double()).tolist()
        bias = None if moe.router.selection_bias is None else moe.router.selection_bias.tolist()
        ids, weights, _ = route_one(
            logits,
            c.top_k,
            c.scoring,
            bias,
            c.n_group,
            c.topk_group,
            c.norm_topk_prob,
            c.routed_scaling_factor,
        )
        for e, weight in zip(ids, weights):
            out[t] += weight * one_row(row, moe.experts.gate_up[e], moe.experts.down[e], moe.act)
        if moe.shared is not None:
            shared = one_row(row, moe.shared.gate_up.weight, moe.shared.down.weight, moe.act)
            gate = (
                1.0
                if moe.shared_gate is None
                else float((moe.shared_gate.weight.double() @ row.double()).sigmoid())
            )
            out[t] += gate * shared
    return out


BLOCKS = {
    "qwen3": {},
    "top-1": {"top_k": 1},
    "all": {"top_k": 5},
    "raw": {"norm_topk_prob": False},
    "shared": {"shared_intermediate_size": 6},
    "qwen2": {"shared_intermediate_size": 6, "shared_gate": True, "norm_topk_prob": False},
    "deepseek": {"num_experts": 8, "top_k": 3, "scoring": "sigmoid", "selection_bias": True, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "shared_intermediate_size": 4},
}  # fmt: skip


@pytest.mark.parametrize("path", paths.PATHS)
@pytest.mark.parametrize("name", BLOCKS)
def test_the_block_equals_a_loop_over_single_tokens(name, path):
    moe = block(path, **BLOCKS[name])
    for T in (0, 1, 2, 17):
        x = normal(T, 8, seed=9)
        wanted = block_in_float64(moe, x)
        assert torch.allclose(moe(x).double(), wanted, atol=1e-5)
        with torch.inference_mode():
            assert torch.allclose(moe(x).double(), wanted, atol=1e-5)


def test_choosing_all_experts_is_the_dense_mixture():
    moe, x = block(top_k=5), normal(6, 8, seed=3)
    share = (x @ moe.router.weight.T).softmax(-1)
    every = torch.stack(
        [paths.expert_mlp(x, g, d, F.silu) for g, d in zip(moe.experts.gate_up, moe.experts.down)], dim=1
    )
    assert torch.allclose(moe(x), (share[..., None] * every).sum(1), atol=1e-6)


@pytest.mark.parametrize("path", ["loop", "gather", "padded", "adaptive"])
def test_the_block_reads_only_what_the_router_chose(path):
    """Proved by NaN in all the others."""
    moe, x = block(path, num_experts=9), normal(2, 8, seed=4)
    wanted, (_, ids, _) = moe(x), moe.router(x)
    idle = [e for e in range(9) if e not in ids]
    assert len(idle) >= 5
    moe.experts.gate_up[idle], moe.experts.down[idle] = NAN, NAN
    assert torch.equal(moe(x), wanted)


@pytest.mark.parametrize("path", paths.PATHS)
def test_a_token_with_nan_leaves_the_others_alone(path):
    moe, x = block(path), normal(7, 8, seed=5)
    wanted = moe(x)
    x[3] = NAN
    out = moe(x)
    assert out[3].isnan().all()
    others = [0, 1, 2, 4, 5, 6]
    assert torch.allclose(out[others], wanted[others], atol=1e-6)


def test_the_sink_is_told_the_routes():
    class Sink:
        def route(self, *args):
            self.args = args

    moe, x, sink = block(), normal(4, 8), Sink()
    moe(x, sink)
    layer, logits, ids, weights = sink.args
    assert layer == 0
    for got, wanted in zip((logits, ids, weights), moe.router(x)):
        assert torch.equal(got, wanted)


@given(seed=st.integers(0, 99))
def test_a_token_does_not_depend_on_who_shares_the_batch(seed):
    moe, x = block(), normal(9, 8, seed=seed)
    whole = moe(x)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    assert torch.allclose(moe(x[order]), whole[order], atol=1e-6)
    assert torch.allclose(moe(x[:1]), whole[:1], atol=1e-6)
