"""Notebook 17: the bytes of a step against a count of a real model's tensors, the speed-up against a run of coins, the roofline
dot, and figure and table from rows of any kind, and from none."""

import json

import numpy as np
import pytest
from tiny_models import CONFIGS, model

from tinymoe.bench.gpu.e2e.models import MODELS
from tinymoe.bench.spec.synthetic import twin
from tinymoe.core.trace import resolve
from tinymoe.lab.exercises.speculating import _situations, best_depth
from tinymoe.lab.widgets.lessons.payoff import recorded
from tinymoe.lab.widgets.lessons.payoff.roofline import RooflineDot
from tinymoe.lab.widgets.lessons.payoff.step import Machine, StepCost, expected_tokens, independent
from tinymoe.model.families import model_config_from_hf

H200 = Machine(4e12, 800e12)


def cost(name, dense=False, **options):
    return StepCost(model_config_from_hf(twin(MODELS[name]) if dense else MODELS[name]), **options)


# The bytes of a step


@pytest.mark.parametrize(("experts", "top_k"), [(16, 2), (64, 8), (5, 5)])
@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_independent_choices(experts, top_k, tokens):
    draws = np.random.default_rng(1)
    chosen = draws.random((4000, tokens, experts)).argsort(-1)[..., :top_k]
    visited = [len(np.unique(one)) for one in chosen]
    assert independent(experts, top_k, tokens) == pytest.approx(np.mean(visited), rel=0.02)


@pytest.mark.parametrize("name", ["moe", "mixed", "dense"])
def test_a_step_reads_what_the_model_holds(name):
    """With all experts visited: every tensor but the input embedding, which is looked up, unless it is the output's, too."""
    config, one = CONFIGS[name], model(name)
    sizes = {n: p.numel() for n, p in one.named_parameters()} | {
        n: b.numel() for n, b in one.named_buffers() if "bias" in n
    }
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    same_width = len({layer.moe.num_experts for layer in config.layers if layer.moe}) <= 1
    step = StepCost(config, width=4, context=0, visits=lambda _: config.max_experts)
    if same_width:
        assert step.moved(1) == 4 * (sum(sizes.values()) - looked_up)
    else:  # layers differ: at least each token's own
        assert step.fixed == config.num_parameters(active=True) - sum(
            3 * config.hidden_size * layer.moe.intermediate_size * layer.moe.top_k
            for layer in config.layers
            if layer.moe
        )


def test_bytes_grow_by_experts_only():
    """U * 3 * d * f * b in each of the layers, and the cache once a sequence."""
    step = cost("olmoe-1b-7b", context=100)
    grown = step.weights(5) - step.weights(1)
    assert grown == pytest.approx((independent(64, 8, 5) - 8) * 3 * 2048 * 1024 * 16 * 2)
    assert step.moved(5, 3) - step.weights(5) == 3 * 100 * 2 * 16 * 16 * 128 * 2
    dense = cost("olmoe-1b-7b", dense=True)
    assert dense.weights(64) == dense.weights(1)
    assert dense.weights(1) == pytest.approx(step.weights(1), rel=0.01)


def test_a_measured_number_of_experts_counts():
    assert cost("olmoe-1b-7b", visits=lambda n: 8).weights(9) == cost("olmoe-1b-7b").weights(1)


@pytest.mark.parametrize(("rate", "depth"), [(0.0, 4), (0.6, 3), (0.9, 8), (1.0, 5)])
def test_expected_tokens_are_those_of_coins(rate, depth):
    kept = np.random.default_rng(3).random((200_000, depth)) < rate
    assert expected_tokens(rate, depth) == pytest.approx(1 + kept.cumprod(1).sum(1).mean(), rel=0.01)


def test_the_hump():
    """One request loses what a batch wins, and a very large batch loses it again; the twin only ever loses."""
    sizes = [2**i for i in range(13)]
    moe = [cost("qwen3-30b-a3b").speedup(n, 4, 0.6, H200) for n in sizes]
    dense = [cost("qwen3-30b-a3b", dense=True).speedup(n, 4, 0.6, H200) for n in sizes]
    assert moe[0] < 1 < max(moe)
    assert moe[-1] < 1
    assert 3 < int(np.argmax(moe)) < 10
    assert np.diff(dense).max() <= 1e-9
    assert dense[0] > 2


def test_the_best_depth_is_the_best():
    step = cost("qwen3-30b-a3b")
    for requests, rate in ((1, 0.5), (1, 0.8), (16, 0.8), (512, 0.6)):
        best = step.best_depth(requests, 8, rate, H200, 0.05)
        speeds = [step.speedup(requests, k, rate, H200, 0.05) for k in range(9)]
        assert speeds[best] == max(speeds) >= speeds[0] == 1
    assert step.best_depth(1, 8, 0.5, H200) == 0


# W11


def dot(tokens=(1, 2, 8, 64, 256, 1024)):
    return RooflineDot({"MoE": cost("olmoe-1b-7b"), "twin": cost("olmoe-1b-7b", dense=True)}, H200, tokens)


def test_the_dot_stays_below_the_roof_and_says_what_it_reads():
    w = dot()
    assert len(w.moments) == 6
    for place, n in enumerate((1, 2, 8, 64, 256, 1024)):
        w.seek(place)
        frame = w.frame
        assert frame["tokens"] == n
        for name, visited, experts, megabytes, us, reading, intensity, rate in frame["dots"]:
            step = cost("olmoe-1b-7b", dense=name == "twin")
            assert megabytes == pytest.approx(step.weights(n) / 1e6, abs=0.6)
            assert us == pytest.approx(step.seconds(n, H200) * 1e6, abs=0.6)
            roof = min(intensity / 100 * 4, 800)
            assert rate / 100 == pytest.approx(roof, rel=0.02)
            assert reading == (intensity / 100 < 200)
            assert (experts, visited) == (
                (64, round(10 * independent(64, 8, n))) if name == "MoE" else (0, -1)
            )
        assert [len(path) for path in frame["paths"]] == [place + 1] * 2
    assert "MoE: 64.0 of 64 experts, 13,632 MB of weights" in w.text
    w.seek(0)
    assert w.text.startswith("1 token. MoE: 8.0 of 64 experts, 2,358 MB of weights, reading takes")
    assert w.next_decision()
    assert w.frame["tokens"] == 256  # the twin begins to multiply longer than it reads


def test_the_dot_replays_without_a_kernel():
    w = dot()
    bundle = w._repr_mimebundle_()["application/vnd.plotly.v1+json"]
    assert len(json.dumps(bundle)) < 60_000
    last, first = bundle["frames"][-1]["data"], bundle["frames"][0]["data"]
    assert [trace["x"] for trace in last[1:]] != [trace["x"] for trace in first[1:]]
    assert all(len(f["data"]) == len(bundle["data"]) for f in bundle["frames"])
    assert resolve(w.why()[0].src).line


@pytest.mark.parametrize("tokens", [[], [2, 1], [0, 1], [1, 1]])
def test_dials_that_are_none(tokens):
    with pytest.raises(ValueError, match="tokens that ascend"):
        dot(tokens)


# Recorded rows


def row(target="moe", requests=1, depth=2, speedup=1.0, **more):
    model = "quintet-moe" if target == "moe" else "quintet-dense"
    base = {
        "target": target, "model": model, "domain": "english", "draft": "ngram", "requests": requests, "depth": depth,
        "adaptive": depth is None, "synthetic": False, "tok_s": 100.0 * speedup, "plain_tok_s": 100.0, "bound_tok_s": 150.0,
        "speedup": {"median": speedup, "p25": speedup - 0.1, "p75": speedup + 0.2, "n": 3}, "acceptance": 0.5 if depth else None,
        "mean_depth": float(depth or 0), "distinct_experts": 2.0 + (depth or 0) if target == "moe" else None, "verify_ms": 3.0,
        "plain_ms": 2.0, "draft_ms": 1.0, "device": "cpu",
    }  # fmt: skip
    return base | more


def rows():
    speeds = {(1, 2): 0.6, (1, 4): 0.8, (8, 2): 1.4, (8, 4): 1.2}
    found = [row("moe", n, k, s) for (n, k), s in speeds.items()] + [row("moe", n, 0) for n in (1, 8)]
    found += [row("moe", n, None, 2.0) for n in (1, 8)]
    return found + [row("dense", n, k, 3 - s) for (n, k), s in speeds.items()]


def test_the_figure_takes_the_best_fixed_depth_and_its_bound():
    figure = recorded.speedups(rows())
    lines = {trace.name: trace for trace in figure.data}
    assert list(lines["Mixture of Experts"].y) == [0.8, 1.4]  # never the adaptive arm's
    assert list(lines["Mixture of Experts"].x) == [1, 8]
    assert list(lines["dense twin"].y) == [2.4, 1.8]
    assert list(lines["Mixture of Experts: bound"].y) == [1.5, 1.5]
    assert list(lines["Mixture of Experts"].error_y.array) == pytest.approx([0.2, 0.2])
    assert list(lines["Mixture of Experts"].error_y.arrayminus) == pytest.approx([0.1, 0.1])
    only = recorded.speedups(rows(), depth=2)
    assert list(next(t for t in only.data if t.name == "Mixture of Experts").y) == [0.6, 1.4]
    assert recorded.speedups(rows(), depth=7) is None
    assert recorded.speedups([]) is None


def test_twins_share_a_panel_and_rates_do_not():
    a = {"model": "olmoe-1b-7b", "domain": "random", "draft": "coin", "synthetic": True}
    made = [row("moe", 1, 2, 0.7, **a, forced_acceptance=r) for r in (0.5, 0.8)]
    made += [
        row("dense", 1, 2, 1.7, **(a | {"model": "olmoe-1b-7b dense twin"}), forced_acceptance=r)
        for r in (0.5, 0.8)
    ]
    for one in made:
        one |= {"draft_layers": 1}  # of all rows alike: said once
    figure = recorded.speedups(made)
    assert [note.text for note in figure.layout.annotations] == [
        "olmoe-1b-7b · 50 % accepted",
        "olmoe-1b-7b · 80 % accepted",
    ]
    assert len(figure.data) == 8
    kinds = ({}, {"draft_cost": 0.05}, {"draft_layers": 2, "draft_cost": 0.0})
    drafts = [recorded.draft_of(row("moe", **a, forced_acceptance=0.8, **kind)) for kind in kinds]
    assert drafts == ["80 % accepted", "80 % accepted, d = 0.05", "80 % accepted, draft of 2 layers"]


def test_where_not_to_and_why():
    head, *lost = recorded.reasons(rows())
    assert head[-1] == "speed-up"
    # 4 drafts, half of them kept: 3 tokens a step, which costs 1.5 plain ones and drafts that cost half of one
    assert lost == [
        ["quintet-moe", "english", "ngram", "1", "4", "3.00", "1.50", "0.50", "6.0 (2.0)", "0.80"]
    ]
    assert recorded.tally(rows()) == {"moe": (1, 2), "dense": (2, 2)}
    assert recorded.reasons([]) == [head]
    assert recorded.columns([["a", "bb"], ["ccc", ""]]) == "a    bb\nccc"


def test_a_file_that_nobody_recorded(tmp_path):
    assert recorded.results("spec_cpu", tmp_path) is None
    assert recorded.source("spec_cpu", None) == (
        "book/results/spec_cpu.json has not been recorded yet: nothing to show here."
    )
    body = {
        "machine": {"gpu": "NVIDIA H200", "cores": 2, "cpu": "x"},
        "date": "2026-12-01T00:00:00Z",
        "versions": {"torch": "2"},
    }
    (tmp_path / "spec_cpu.json").write_text(json.dumps(body | {"rows": rows()}))
    read = recorded.results("spec_cpu", tmp_path)
    assert recorded.source("spec_cpu", read) == (
        "spec_cpu: recorded 2026-12-01 on 2 cores (x), torch 2; the bundled models."
    )
    forced = body | {
        "rows": [row(device="cuda", synthetic=True, forced_acceptance=r, draft_layers=1) for r in (0.5, 0.9)]
    }
    assert (
        "on NVIDIA H200, torch 2; random weights, drafts accepted by a coin (synthetic), draft of 1 layer."
        in recorded.source("s", forced)
    )


# Exercise 17.1


def test_situations_have_every_kind_of_answer_and_no_near_tie():
    answers = set()
    for alpha, a, b, c, d, visits, most in _situations():
        assert visits[0] == 0
        assert len(visits) == most + 2
        kept = np.random.default_rng(5).random((20_000, most)) < alpha
        tokens = [1 + kept[:, :k].cumprod(1).sum(1).mean() for k in range(most + 1)]
        speed = [tokens[k] / (a + b * visits[k + 1] + c * (k + 1) + d * k) for k in range(most + 1)]
        answers.add(min(int(np.argmax(speed)), 3) if np.argmax(speed) < most else "most")
    assert answers == {0, 1, 2, 3, "most"}


def test_a_wrong_depth_is_told_by_how_much():
    said = best_depth(lambda *_: 0).message
    assert "it should be 3, got 0: depth 3 makes 0.2952 tokens a unit of time, depth 0 makes 0.1" in said
    assert best_depth(lambda *_: None).message.endswith(
        "got None: depth 3 makes 0.2952 tokens a unit of time"
    )
