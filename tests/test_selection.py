"""The cost model and the selector, against laws that are known because the test made them."""

import json
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinymoe.bench.results import write_results
from tinymoe.core.model_config import ConfigError
from tinymoe.experts.costs import (
    FEATURES,
    CostModel,
    Measurement,
    bucket_of,
    features,
    fit,
    held_out,
    load,
    rows_of,
)
from tinymoe.experts.selection import Selector

E, K = 16, 2
# One path reads experts quickly but takes long to start, one the other way round, one pays for the busiest.
LAW = {
    "few": (2.0, 9.0, 1.5, 0.0, 0.0),
    "grouped16": (20.0, 3.0, 0.4, 0.0, 0.0),
    "grouped64": (24.0, 2.0, 0.9, 0.01, 0.0),
    "dense16": (12.0, 3.0, 0.0, 0.2, 0.1),
}
TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def counts(tokens, skew, generator):
    """Visits of each expert when every token takes its K best of E, some experts better loved than others."""
    scores = generator.gumbel(size=(tokens, E)) - skew * np.log(np.arange(1, E + 1))
    return np.bincount(np.argsort(-scores, axis=1)[:, :K].ravel(), minlength=E)


def true_us(path, tokens, loads):
    return float(np.dot(LAW[path], features(loads, tokens, rows_of(path))))


def measured(seed=0, noise=0.0, law=None, skews=(0.0, 0.7, 1.5, 3.0)):
    generator = np.random.default_rng(seed)
    rows = []
    for tokens in TOKENS:
        for skew in skews:
            for _ in range(2):
                loads = counts(tokens, skew, generator)
                for path in LAW:
                    x = features(loads, tokens, rows_of(path))
                    us = law(path, x) if law else true_us(path, tokens, loads)
                    rows.append(Measurement(path, tokens, x, us * math.exp(noise * generator.normal())))
    return rows


# Features


def test_features_are_what_they_say():
    assert FEATURES == ("one", "distinct", "tiles", "tokens", "largest")
    assert features([0, 1, 16, 17], 17, 16) == (1, 3, 4, 17, 17)
    assert features([0, 1, 16, 17], 17, 1) == (1, 3, 34, 17, 17)
    assert features([0, 0], 0, 16) == (1, 0, 0, 0, 0)
    assert [rows_of(p) for p in ("few", "grouped16", "blocked128")] == [1, 16, 128]
    assert [bucket_of(t) for t in (1, 2, 3, 4, 5, 512, 513)] == [1, 2, 4, 4, 8, 512, 1024]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=64), st.sampled_from([1, 16, 64]))
def test_features_of_any_histogram(loads, rows):
    one, distinct, tiles, tokens, largest = features(loads, sum(loads), rows)
    assert one == 1
    assert distinct == sum(n > 0 for n in loads)
    assert tiles == sum(math.ceil(n / rows) for n in loads)
    assert (tokens, largest) == (sum(loads), max(loads))


# Fitting


def test_a_law_without_noise_is_recovered():
    model = fit(measured())
    assert model.law == "time"
    generator = np.random.default_rng(9)
    for tokens in TOKENS:
        for skew in (0.3, 1.0, 2.0):
            loads = counts(tokens, skew, generator)
            for path in LAW:
                wanted = true_us(path, tokens, loads)
                got = model.predict(path, tokens, features(loads, tokens, rows_of(path)))
                assert got == pytest.approx(wanted, rel=1e-6)


def test_coefficients_of_time_are_never_negative_and_noise_hurts_little():
    rows = measured(noise=0.03)
    model = fit(rows, "time")
    assert all(c >= 0 for values in model.coefficients.values() for c in values)
    assert held_out(rows, "time") < 0.06
    errors = [abs(model.predict(m.path, m.tokens, m.features) / m.us - 1) for m in measured(seed=5)]
    assert np.mean(errors) < 0.04


def test_a_law_of_the_logarithm_is_told_from_one_of_time():
    log = lambda path, x: math.exp(np.dot((3.0, 0.1, 0.02, 0.001, 0.03), x))  # noqa: E731
    rows = measured(law=log, noise=0.01)
    model = fit(rows)
    assert model.law == "log"
    assert held_out(rows, "log") < held_out(rows, "time")
    errors = [abs(model.predict(m.path, m.tokens, m.features) / m.us - 1) for m in rows]
    assert np.mean(errors) < 0.05
    assert fit(measured(noise=0.01)).law == "time"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "a cost model needs measurements, got none"),
        ([Measurement("few", 1, (1, 1, 1, 1, 1), 0.0)], "positive microseconds"),
        ([Measurement("few", 1, (1, 1, 1, 1, 1), math.nan)], "positive microseconds"),
        ([Measurement("few", 1, (1, 1, 1, 1), 3.0)], "5 finite features"),
    ],
    ids=["none", "zero", "nan", "four features"],
)
def test_measurements_that_cannot_be_are_refused(rows, message):
    with pytest.raises(ConfigError, match=message):
        fit(rows)
    with pytest.raises(ConfigError, match=r"law must be one of \('time', 'log'\), got 'best'"):
        fit(measured(), "best")


# Files


def test_a_model_is_written_and_read_back(tmp_path):
    model = fit(measured())
    path = tmp_path / "m.json"
    write_results(path, command="x", rows=[{"kind": "regret"}, *model.to_rows("a"), *model.to_rows("b")])
    assert load(path, "b") == model


GOOD = {"kind": "model", "shape": "a", "law": "time", "path": "few", "bucket": 4, "coefficients": [1, 2, 3, 4, 5]}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "m.json is no JSON .*: measure again with tinymoe bench selection"),
        ("[1]", "m.json: an object with a list 'rows' wanted, got"),
        ({"rows": 3}, "an object with a list 'rows' wanted"),
        ({"rows": [GOOD | {"shape": "b"}]}, r"m.json has no cost model for 'a'; it has \['b'\]"),
        ({"rows": [GOOD | {"law": "cube"}]}, r"law must be one of \('time', 'log'\)"),
        ({"rows": [GOOD, GOOD | {"law": "log", "bucket": 8}]}, "the same in all rows of 'a'"),
        ({"rows": [GOOD | {"path": 3}]}, "path must be a name, .*, got 3"),
        ({"rows": [GOOD | {"bucket": 6}]}, "bucket must be a power of two up to 1048576, got 6 for 'few'"),
        ({"rows": [GOOD | {"bucket": True}]}, "bucket must be a power of two"),
        ({"rows": [GOOD | {"coefficients": [1, 2]}]}, "coefficients of 'few' at 4 must be 5 finite numbers"),
        ({"rows": [GOOD | {"coefficients": [1, 2, 3, 4, "5"]}]}, "must be 5 finite numbers"),
        ('{"rows": [' + json.dumps(GOOD).replace("5]", "NaN]") + "]}", "must be 5 finite numbers"),
        ({"rows": [GOOD, GOOD]}, "'few' at 4 is there twice"),
        ({"rows": [GOOD | {"law": ["time"]}]}, r"law must be one of .*, got \['time'\]"),
        ({"rows": [GOOD, GOOD | {"law": {}}]}, "law must be one of .*, got 'time' and {}"),
        ({"rows": [GOOD | {"coefficients": [1, 2, 3, 4, 10**400]}]}, "must be 5 finite numbers"),
        ("[" * 100_000, "m.json is no JSON"),
        ({"rows": [GOOD | {"path": "grouped0"}]}, "digits at its end at least 1 row, got 'grouped0'"),
        ({"rows": [GOOD | {"path": "p" + "9" * 9000}]}, "path must be a name"),
        ({"rows": [GOOD | {"bucket": 2**21}]}, "bucket must be a power of two up to 1048576, got 2097152"),
        ({"rows": [GOOD | {"bucket": [4]}]}, r"bucket must be a power of two up to 1048576, got \[4\]"),
    ],
    ids=lambda v: None,
)
def test_malformed_files_are_refused_by_name(tmp_path, text, message):
    path = tmp_path / "m.json"
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(ConfigError, match=message):
        load(path, "a")


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path):
    for path in (tmp_path / "none.json", tmp_path / "no" / "none.json", tmp_path):
        with pytest.raises(ConfigError, match=f"{path.name} cannot be read .*: measure again"):
            load(path, "a")


# Choosing


def best_of(tokens, loads_LE):
    return min(LAW, key=lambda path: sum(true_us(path, tokens, loads) for loads in loads_LE))


def test_predictions_of_the_table_are_those_of_the_model():
    generator = np.random.default_rng(1)
    for law in ("time", "log"):
        model = fit(measured(), law)
        selector = Selector(model, E, K)
        for tokens in (1, 5, 64, 200):
            loads_LE = np.array([counts(tokens, s, generator) for s in (0.0, 1.0, 2.0)])
            assert set(selector.predict(tokens, loads_LE)) == set(selector.candidates(tokens))
            for path, us in selector.predict(tokens, loads_LE).items():
                wanted = [model.predict(path, tokens, features(n, tokens, rows_of(path))) for n in loads_LE]
                assert us == pytest.approx(sum(wanted), rel=1e-9)


def test_without_noise_and_with_steady_routes_there_is_no_regret():
    selector = Selector(fit(measured()), E, K, gain=0.0, patience=1, every=1)
    generator = np.random.default_rng(2)
    for tokens in (1, 4, 16, 33, 250):
        for skew in (0.0, 3.0):
            loads_LE = np.array([counts(tokens, skew, generator) for _ in range(4)])
            selector.observe(tokens, loads_LE)
            assert selector.choose(tokens) == best_of(tokens, loads_LE)


def test_before_any_step_the_routes_are_taken_as_even():
    selector = Selector(fit(measured()), E, K)
    generator = np.random.default_rng(3)
    for tokens in (1, 8, 256):
        loads_LE = np.array([counts(tokens, 0.0, generator) for _ in range(64)])
        assert selector.choose(tokens) == best_of(tokens, loads_LE)


def test_a_path_is_left_out_only_if_no_routes_want_it():
    """What is left out would have gained little on any routes; and one token has one kind of routes, hence one path."""
    model = fit(measured())
    selector = Selector(model, E, K)
    generator = np.random.default_rng(5)
    assert selector.candidates(1) == [best_of(1, [counts(1, 0, generator)])]
    fewer = 0
    for tokens in (1, 2, 4, 8, 16, 64, 256, 4096):
        kept = selector.candidates(tokens)
        fewer += len(kept) < len(model.candidates(tokens))
        assert selector.choose(tokens) in kept
        for skew in (0.0, 0.3, 1.5, 3.0, 6.0, 20.0):
            loads_E = counts(tokens, skew, generator)
            cost = {p: model.predict(p, tokens, features(loads_E, tokens, rows_of(p))) for p in LAW}
            assert min(cost[p] for p in kept) <= 1.06 * min(cost.values()), (tokens, skew)
    assert fewer >= 4


def drifting():
    """Two paths; with all visits on two experts the second is far better, spread evenly the first."""
    return CostModel("time", {("few", 16): (10.0, 1, 0, 0, 0), ("grouped16", 16): (2.0, 2.0, 0, 0, 0)})


EVEN, TWO = np.full((1, E), 2), np.array([[16, 16] + [0] * 14])


def test_a_path_changes_after_three_steps_running_and_not_before():
    selector = Selector(drifting(), E, K, every=1)
    assert selector.choose(16) == "few"  # 10 + 16 against 2 + 32
    for counts_LE in (TWO, TWO, EVEN, TWO, TWO):
        selector.observe(16, counts_LE)
        assert selector.choose(16) == "few"
    selector.observe(16, TWO)
    assert selector.choose(16) == "grouped16"
    assert selector.switches == 1
    for _ in range(3):  # and back when the routes drift back
        assert selector.choose(16) == "grouped16"
        selector.observe(16, EVEN)
    assert selector.choose(16) == "few"


def test_while_nothing_gains_one_step_in_eight_is_looked_at():
    """Then each of the next: a drift is followed at most seven steps late."""
    selector = Selector(drifting(), E, K)
    for counts_LE in [EVEN] + [TWO] * 9:  # the first look; seven steps at rest; two of three that count
        selector.observe(16, counts_LE)
        assert selector.choose(16) == "few"
    selector.observe(16, TWO)
    assert selector.choose(16) == "grouped16"
    for _ in range(9):
        selector.observe(16, EVEN)
    assert selector.choose(16) == "grouped16"
    selector.observe(16, EVEN)
    assert selector.choose(16) == "few"


def test_a_gain_of_five_percent_or_less_is_not_worth_it():
    model = CostModel("time", {("few", 16): (100.0, 0, 0, 0, 0), ("grouped16", 16): (95.0, 0.5, 0, 0, 0)})
    selector = Selector(model, E, K)  # 103 when spread evenly, 96 on two experts
    assert selector.choose(16) == "few"
    for _ in range(10):
        selector.observe(16, TWO)
    assert selector.choose(16) == "few"
    eager = Selector(model, E, K, gain=0.03)
    for _ in range(3):
        eager.observe(16, TWO)
    assert eager.choose(16) == "grouped16"


def test_a_small_gain_does_not_count_where_other_routes_gain_much():
    model = CostModel("time", {("few", 16): (100.0, 0, 0, 0, 0), ("grouped16", 16): (73.0, 2.0, 0, 0, 0)})
    selector = Selector(
        model, E, K, every=1
    )  # 101 to 105 when spread evenly, 97 on twelve experts, 77 on two
    assert selector.candidates(16) == ["few", "grouped16"]
    twelve = np.array([[3, 3, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2, 0, 0, 0, 0]])
    for counts_LE in [TWO, TWO, twelve] * 4 + [twelve] * 9:
        selector.observe(16, counts_LE)
    assert selector.choose(16) == "few"
    for _ in range(3):
        selector.observe(16, TWO)
    assert selector.choose(16) == "grouped16"


def test_buckets_have_their_own_paths_and_other_tokens_take_the_nearest():
    model = CostModel("time", {("few", 4): (1.0, 0, 0, 0, 0), ("grouped16", 64): (1.0, 0, 0, 0, 0)})
    selector = Selector(model, E, K)
    chosen = {tokens: selector.choose(tokens) for tokens in (1, 3, 8, 16, 17, 33, 64, 5000)}
    assert chosen == {1: "few", 3: "few", 8: "few", 16: "few", 17: "grouped16", 33: "grouped16", 64: "grouped16", 5000: "grouped16"}  # fmt: skip
    assert (model.nearest(16), model.nearest(32), model.nearest(1 << 20)) == (4, 64, 64)


def test_invariant_mode_is_a_constant():
    selector = Selector(drifting(), E, K, constant="grouped16")
    for _ in range(9):
        assert selector.choose(16) == "grouped16"
        selector.observe(16, EVEN)
    assert selector.switches == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 1}, r"top_k must lie in 1\.\.1, got 2"),
        ({"gain": 1.0}, "gain must be a fraction"),
        ({"patience": 0}, "patience must be at least one step, got 0"),
        ({"every": 0}, "every must be at least one step, got 0"),
        ({"constant": "x"}, r"the constant path must be one of \['few', 'grouped16'\], got 'x'"),
        ({"model": CostModel("time", {})}, "needs a cost model with measured paths"),
        ({"num_experts": "8"}, "num_experts must be an integer, got '8'"),
        ({"top_k": 2.0}, r"top_k must be an integer, got 2\.0"),
        ({"gain": "x"}, "gain must be a fraction .*, got 'x'"),
        ({"gain": math.nan}, "gain must be a fraction .*, got nan"),
        ({"patience": None}, "patience must be an integer, got None"),
        ({"every": True}, "every must be an integer, got True"),
    ],
)
def test_selectors_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Selector(**({"model": drifting(), "num_experts": E, "top_k": K} | options))


def test_integers_of_numpy_are_integers():
    plain = Selector(drifting(), E, K)
    selector = Selector(drifting(), np.int64(E), np.int32(K), gain=np.float32(0.05), patience=np.int64(3))
    for tokens in (1, 16):
        assert selector.choose(np.int64(tokens)) == plain.choose(tokens)
    selector.observe(np.int32(16), EVEN.astype(np.uint16))


@pytest.mark.parametrize("tokens", [0, -1, 2**20 + 1, 10**4000, 1.5, "4", None, True])
def test_steps_that_cannot_be_are_refused(tokens):
    selector = Selector(drifting(), E, K)
    for ask in (selector.choose, selector.candidates, lambda n: selector.observe(n, EVEN)):
        with pytest.raises(ConfigError, match=r"tokens must (lie in 1\.\.1048576|be an integer), got"):
            ask(tokens)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (EVEN[0], r"counts must be an array of integers \[layers, 16\], got int64 \[16\]"),
        (EVEN[:, :8], r"got int64 \[\d+, 8\]"),
        (EVEN[:0], r"got int64 \[0, 16\]"),
        (EVEN.astype(float), "got float64"),
        (EVEN.tolist(), r"got \[\["),
        (-EVEN - 1, "counts must not be negative, got -"),
    ],
    ids=["flat", "narrow", "none", "float", "list", "negative"],
)
def test_counts_that_cannot_be_are_refused(counts, message):
    with pytest.raises(ConfigError, match=message):
        Selector(drifting(), E, K).observe(16, counts)


FITTED = fit(measured())


@settings(max_examples=60)
@given(st.data())
def test_any_sequence_of_steps_obeys_the_rule(data):
    """Against the rule told plainly: a counter a bucket, costs from the features of each layer."""
    model, gain, patience = FITTED, 0.05, data.draw(st.integers(1, 3))
    selector = Selector(model, E, K, patience=patience, every=1)
    state = {}
    for _ in range(data.draw(st.integers(1, 12))):
        tokens = data.draw(st.sampled_from([1, 3, 16, 100, 700]))
        skews = data.draw(st.lists(st.sampled_from([0.0, 1.0, 4.0]), min_size=1, max_size=3))
        generator = np.random.default_rng(data.draw(st.integers(0, 99)))
        layers = [counts(tokens, skew, generator) for skew in skews]
        path, running = state.get(bucket_of(tokens), (selector.choose(tokens), 0))
        assert selector.choose(tokens) == path
        assert path in selector.candidates(tokens)
        cost = {
            p: sum(model.predict(p, tokens, features(n, tokens, rows_of(p))) for n in layers)
            for p in selector.candidates(tokens)
        }
        best = min(cost, key=cost.__getitem__)
        near = abs(cost[best] - (1 - gain) * cost[path]) < 1e-6 * cost[path]
        running = running + 1 if cost[best] < (1 - gain) * cost[path] else 0
        if near:
            return  # rounding decides
        if running >= patience:
            path, running = best, 0
        selector.observe(tokens, np.array(layers))
        if selector.choose(tokens) != path:  # only among equals
            assert cost[selector.choose(tokens)] == pytest.approx(cost[path])
            return
        state[bucket_of(tokens)] = (path, running)


def test_a_choice_costs_microseconds_not_milliseconds():
    """No bound that a busy machine could miss: two hundred times what it takes."""
    selector = Selector(fit(measured()), E, K)
    loads_LE = np.array([counts(64, 1.0, np.random.default_rng(0)) for _ in range(4)])
    selector.choose(64)
    start = time.perf_counter()
    for _ in range(200):
        selector.choose(64)
        selector.observe(64, loads_LE)
    assert (time.perf_counter() - start) / 200 < 2e-3
