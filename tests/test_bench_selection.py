"""Routing traces, the grid of costs and the judging of choices, with times that a law of the test's own makes."""

from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tinymoe.__main__ import main
from tinymoe.bench.gpu.paths import blocks, costs, routes, selection
from tinymoe.bench.results import read_results, write_results
from tinymoe.core.model_config import ConfigError
from tinymoe.experts.costs import CostModel, features, load, rows_of
from tinymoe.experts.selection import Selector

E, K, L = 16, 2, 3
LAW = {"few": (3, 9, 1.5, 0, 0), "grouped16": (20, 3, 0.4, 0, 0), "dense16": (12, 0, 0, 2.8, 0)}
NAME = "trace16@qwen3"


def true_us(path, loads_E, tokens):
    return float(np.dot(LAW[path], features(loads_E, tokens, rows_of(path))))


def fake_timer(path, layer):
    return true_us(path, costs.loads_of(layer), layer.x.shape[0])


def candidates(tokens, experts, top_k):
    return [p for p in LAW if p != "few" or tokens <= 16]


WEIGHTS = (torch.zeros(1), torch.zeros(1))


@pytest.fixture(scope="module")
def grid():
    """Rows of the whole grid; the tokens are as wide as the real ones, the weights are not there."""
    return costs.measure(
        NAME, WEIGHTS, fake_timer, tokens=(1, 4, 6, 16, 24, 64), skews=costs.SKEWS, seed=0, paths=candidates
    )


def trace_rows(steps):
    generator = np.random.default_rng(0)
    rows = []
    for i, (tokens, skew) in enumerate(steps):
        layers = []
        for _ in range(L):
            scores = generator.gumbel(size=(tokens, E)) - skew * np.log(np.arange(1, E + 1))
            layers.append("".join(f"{e:x}" for e in np.argsort(-scores, axis=1)[:, :K].ravel()))
        rows.append({"model": "m", "experts": E, "top_k": K, "load": 1, "step": i, "tokens": tokens, "layers": layers})  # fmt: skip
    return rows


# Traces


def test_the_stored_trace_is_one_of_the_bundled_model():
    trace = routes.read(selection.TRACE)
    assert (trace.experts, trace.top_k, len(trace.steps)) == (16, 2, 60)
    assert selection.TRACE.stat().st_size < 200_000
    assert {step.ids_LTK.shape[0] for step in trace.steps} == {6}
    tokens = [step.tokens for step in trace.steps]
    assert (min(tokens), max(tokens)) == (1, 512)
    for step in trace.steps:
        ids = step.ids_LTK
        assert (ids[..., 0] != ids[..., 1]).all()  # a token's experts are distinct
        assert (step.loads(16).sum(axis=1) == 2 * step.tokens).all()


def test_a_trace_is_recorded_from_the_engine_and_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(routes, "LOADS", (1, 3))
    path = tmp_path / "t.json"
    assert main(["bench", "selection", "--record", "--out", str(path)]) == 0
    trace = routes.read(path)
    assert trace[:2] == (16, 2)
    assert {row["load"] for row in read_results(path)["rows"]} == {1, 3}
    assert [step.tokens for step in trace.steps][1:10] == [
        1
    ] * 9  # one request: its prompt, then a token a step
    assert max(step.tokens for step in trace.steps[10:]) > 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layers": ["0"]},
            r"rows\[1\] must have tokens and, for each layer, tokens \* 2 hexadecimal digits",
        ),
        ({"tokens": 0}, r"rows\[1\] must have tokens"),
        ({"layers": ["0z"] * L}, r"rows\[1\] names an expert outside 0\.\.15"),
        ({"experts": 8}, "every row has the same experts and top_k"),
    ],
    ids=["short", "no tokens", "no digit", "two kinds"],
)
def test_malformed_traces_are_refused_by_row(tmp_path, change, message):
    rows = trace_rows([(1, 0), (1, 0)])
    rows[1] |= change
    write_results(tmp_path / "t.json", command="x", rows=rows)
    with pytest.raises(ConfigError, match=message):
        routes.read(tmp_path / "t.json")


def test_replayed_logits_choose_the_recorded_experts():
    generator = torch.Generator().manual_seed(0)
    ids = np.array([[3, 15], [0, 1], [7, 2]])
    layer = selection.replayed(ids, NAME, WEIGHTS, generator)
    assert layer.logits.topk(2).indices.tolist() == ids.tolist()
    assert layer.x.shape == (3, 2048)
    again = selection.replayed(ids, NAME, WEIGHTS, generator)
    assert not torch.equal(layer.x, again.x)


# The grid


def test_the_grid_holds_every_path_on_fresh_routes(grid):
    assert len(grid) == 4 * (4 * 3 + 2 * 2)
    assert all(set(row) == {"kind", "shape", "path", "tokens", "skew", "features", "us"} for row in grid)
    distinct = {row["skew"]: row["features"][1] for row in grid if row["tokens"] == 64}
    assert distinct[0.0] > distinct[2.8]
    first = [row["features"] for row in grid if row["path"] == "few"]
    assert len({tuple(f) for f in first}) > 6


def test_a_fitted_grid_predicts_and_tells_its_error(grid):
    model, told = costs.fitted(grid, NAME)
    assert model.law == "time"
    assert told["held_out_error_time"] < 0.02
    assert told["measurements"] == len(grid)
    row = grid[-1]
    assert model.predict(row["path"], row["tokens"], row["features"]) == pytest.approx(row["us"], rel=1e-3)


# Judging


def steps_and_times(steps):
    rows = trace_rows(steps)
    tokens = [row["tokens"] for row in rows]
    loads = [
        np.stack([np.bincount([int(c, 16) for c in s], minlength=E) for s in row["layers"]]) for row in rows
    ]
    times = [
        {p: sum(true_us(p, n, t) for n in layers) for p in candidates(t, E, K)}
        for t, layers in zip(tokens, loads)
    ]
    return tokens, loads, times


def test_regret_by_hand():
    model = CostModel("time", {("few", 4): (10.0, 0, 0, 0, 0), ("grouped16", 4): (12.0, 0, 0, 0, 0)})
    loads = [np.array([[4, 4] + [0] * 14])] * 2
    times = [{"few": 10.0, "grouped16": 20.0}, {"few": 30.0, "grouped16": 20.0}]
    rows = selection.evaluate(model, {4: "grouped16"}, [4, 4], loads, times, K, 1.0, planned_S=[10.0, 30.0])
    found = {row["policy"]: row for row in rows}
    assert found["selector"]["mean_regret"] == pytest.approx((11 / 10 - 1 + 31 / 20 - 1) / 2)
    assert found["selector"]["worst_regret"] == pytest.approx(31 / 20 - 1)
    assert found["selector"]["against_best_single"] == pytest.approx(
        42 / 40 - 1
    )  # few and grouped16: 40 each
    assert found["selector, told the routes"]["mean_regret"] == pytest.approx(0.25)
    assert found["by tokens only"]["mean_regret"] == pytest.approx(0.5)
    assert found["at random"]["mean_regret"] == pytest.approx((0.5 + 0.25) / 2)
    assert found["planned tiles"]["mean_regret"] == pytest.approx(0.25)
    assert found["always few"]["against_best_single"] == found["always grouped16"]["against_best_single"] == 0
    assert (found["selector"]["selection_us"], found["selector"]["steps"]) == (1.0, 2)


def test_without_noise_the_selector_comes_close_to_the_oracle_where_tokens_alone_do_not(grid):
    """Steps of 16 tokens whose routes are far from even for long stretches: there the number of tokens misleads."""
    steps = [(16, 0)] * 60 + [(16, 9.0)] * 60
    tokens, loads, times = steps_and_times(steps)
    model, _ = costs.fitted(grid, NAME)
    found = selection.evaluate(model, selection.by_tokens(grid, NAME), tokens, loads, times, K, 0.0)
    regret = {row["policy"]: row["mean_regret"] for row in found}
    assert regret["selector, told the routes"] < 0.005
    assert regret["selector"] < 0.2  # up to ten steps late, at twice the time
    assert regret["selector"] < min(regret["by tokens only"], regret["at random"])
    assert found[0]["against_best_single"] < 0
    assert found[0]["switches"] >= 1


def test_by_tokens_takes_the_fastest_with_even_routes(grid):
    tuned = selection.by_tokens(grid, NAME)
    assert set(tuned) == {1, 4, 8, 16, 32, 64}
    for bucket, path in tuned.items():
        even = [r for r in grid if r["skew"] == 0 and r["tokens"] in (bucket, bucket * 3 // 4)]  # fmt: skip
        mean = {p: np.mean([r["us"] for r in even if r["path"] == p]) for p in {r["path"] for r in even}}
        assert path == min(mean, key=mean.get)


def test_following_never_looks_ahead():
    seen = []

    class Watched(Selector):
        def choose(self, tokens):
            seen.append("choose")
            return super().choose(tokens)

        def observe(self, tokens, counts_LE):
            seen.append("observe")
            super().observe(tokens, counts_LE)

    tokens, loads, times = steps_and_times([(4, 0)] * 5)
    model = CostModel("time", {("few", 4): (1.0, 0, 0, 0, 0), ("grouped16", 4): (2.0, 0, 0, 0, 0)})
    assert selection.follow(Watched(model, E, K), tokens, loads, times) == ["few"] * 5
    assert seen == ["choose", "observe"] * 5


# The command


def test_the_whole_command_with_times_made_up(tmp_path, monkeypatch, capsys):
    """Everything but the GPU: grid, fit, trace, table, file."""
    write_results(tmp_path / "t.json", command="x", rows=trace_rows([(1, 0), (16, 0), (16, 5), (64, 0)] * 2))
    monkeypatch.setattr(selection, "draw", lambda *_: WEIGHTS)
    fake = SimpleNamespace(AVAILABLE=True, moe=SimpleNamespace(fused_moe=lambda *_: None))
    monkeypatch.setattr(selection, "gpu", fake)
    monkeypatch.setattr(selection, "replay", lambda run, repeats: [100.0])
    monkeypatch.setattr(costs, "timed", lambda repeats: fake_timer)
    monkeypatch.setattr(costs, "paths_for", candidates)
    measure = costs.measure
    monkeypatch.setattr(costs, "measure", lambda *a, **o: measure(*a, **o, paths=candidates))
    monkeypatch.setattr(costs, "DENSE_GRID", (1, 4, 16, 64))
    out = tmp_path / "s.json"
    assert main(["bench", "selection", "--trace", str(tmp_path / "t.json"), "--out", str(out), "--repeats", "3"]) == 0  # fmt: skip
    body = read_results(out)
    kinds = [row["kind"] for row in body["rows"]]
    assert kinds.count("regret") == 2
    assert body["rows"][0]["policy"] == "selector"
    assert body["rows"][1]["mean_regret"] < 0.01  # told the routes, by a model without noise
    assert {row["kind"] for row in body["controls"]} == {"regret", "fit", "cost", "step"}
    steps = [row for row in body["controls"] if row["kind"] == "step"]
    assert [row["tokens"] for row in steps] == [1, 16, 16, 64] * 2
    assert steps[0]["planned_us"] == 100.0 * L
    assert set(load(out, NAME).paths) == set(LAW)
    shown = capsys.readouterr().out
    assert all(policy in shown for policy in ("selector", "by tokens only", "always grouped16"))


def test_kernels_fit_writes_rows_and_models(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "draw", lambda *_: WEIGHTS)
    monkeypatch.setattr(costs, "gpu", SimpleNamespace(AVAILABLE=True))
    monkeypatch.setattr(costs, "timed", lambda repeats: fake_timer)
    measure = costs.measure
    monkeypatch.setattr(costs, "measure", lambda *a, **o: measure(*a, **o, paths=candidates))
    monkeypatch.setattr(costs, "GRID", (1, 16))
    out = tmp_path / "k.json"
    arguments = [
        "bench",
        "kernels",
        "--fit",
        "--shapes",
        "mixtral-8x7b",
        "--out",
        str(out),
        "--skews",
        "0",
        "2",
    ]
    assert main(arguments) == 0
    body = read_results(out)
    rows = [row for row in body["rows"] if row["kind"] == "cost"]
    assert {(row["tokens"], row["skew"]) for row in rows} == {(1, 0.0), (1, 2.0), (16, 0.0), (16, 2.0)}
    assert load(out, "mixtral-8x7b").buckets == [1, 16]
    assert Namespace(**body["controls"][0]).measurements == len(rows)


def test_blocks_by_hand():
    loads = np.array([1, 0, 16, 17])
    assert blocks.padding(loads, 16) == pytest.approx(64 / 34)
    assert blocks.padding(loads, 1) == 1
    assert blocks.padding(np.zeros(3, dtype=int), 16) == 0


def test_blocks_writes_padding_and_rates(tmp_path, monkeypatch):
    real = costs.EVERY["trace16@qwen3"]._replace(hidden=8, width=4)
    monkeypatch.setattr(blocks, "EVERY", {"qwen3-30b-a3b": real})
    monkeypatch.setattr(costs, "EVERY", {"qwen3-30b-a3b": real})
    monkeypatch.setattr(blocks, "draw", lambda *_: WEIGHTS)
    monkeypatch.setattr(blocks.torch, "Generator", lambda device: torch._C.Generator("cpu"))
    kernels = SimpleNamespace(blocked_sparse=None, fused_moe=None)
    blocked = SimpleNamespace(blocked_sparse=lambda *_, block: block)
    monkeypatch.setattr(blocks, "gpu", SimpleNamespace(AVAILABLE=True, moe=kernels, blocked=blocked))
    monkeypatch.setattr(blocks, "replay", lambda run, repeats: [run() if run.keywords else 50.0] * repeats)
    kernels.fused_moe = lambda *_: None
    out = tmp_path / "b.json"
    assert main(["bench", "kernels", "--blocks", "--shapes", "qwen3-30b-a3b", "--out", str(out)]) == 0
    rows = read_results(out)["rows"]
    assert [(row["tokens"], row["block"]) for row in rows] == [(t, b) for t in blocks.TOKENS for b in blocks.BLOCKS]  # fmt: skip
    row = rows[1]
    assert row["us"]["median"] == 32
    assert row["tflops"] == pytest.approx(6 * 64 * 2 * 8 * 4 / 32 / 1e6)
    assert 1 <= row["padding"] <= rows[3]["padding"]
    assert row["sorted_with_router_us"]["median"] == 50
