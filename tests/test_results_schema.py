"""The one schema of results files: every stored file follows it, and each way of breaking it is refused by name."""

import copy
import json
import math
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinymoe.bench import results
from tinymoe.bench.results import ResultsError, read_results, timing, validate, write_results

ROOT = Path(__file__).resolve().parent.parent
STORED = sorted((ROOT / "book" / "results").glob("*.json"))
GOOD = {
    "schema": 1,
    "command": "tinymoe bench engine",
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "date": "2026-01-31T12:00:00Z",
    "machine": {"cpu": "x", "cores": 2, "memory_gb": 24.0, "gpu": None},
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "ceilings": {"memory_gb_s": 20.0},
    "rows": [{"requests": 1, "step_ms": {"median": 2.0, "p25": 1.0, "p75": 3.0, "n": 5}}],
    "controls": [],
}


@pytest.mark.parametrize("path", STORED, ids=lambda p: p.name)
def test_stored_results_follow_the_schema(path):
    read_results(path)


def test_a_good_file_is_accepted():
    validate(GOOD)


def breaks():
    yield "not an object", [], "an object with the keys"
    for key in GOOD:
        yield f"no {key}", {k: v for k, v in GOOD.items() if k != key}, "an object with the keys"
    yield "a key too many", GOOD | {"note": ""}, "an object with the keys"
    yield "schema 2", GOOD | {"schema": 2}, "schema: 1 wanted, got 2"
    yield "schema true", GOOD | {"schema": True}, "schema: int wanted"
    yield "empty command", GOOD | {"command": " "}, "command: the line that repeats"
    yield "short commit", GOOD | {"commit": "0123abc"}, "commit: 40 hex digits"
    yield "local date", GOOD | {"date": "2026-01-31 12:00"}, "date: UTC as"
    yield (
        "no gpu named",
        GOOD | {"machine": {"cpu": "x", "cores": 2, "memory_gb": 1}},
        "machine: ['gpu'] missing",
    )
    yield "no torch", GOOD | {"versions": {"python": "3.11"}}, "versions: ['torch'] missing"
    yield "no rows", GOOD | {"rows": []}, "rows: at least one"
    yield "rows of numbers", GOOD | {"rows": [1]}, "rows[0]: a non-empty object wanted"
    yield "empty control", GOOD | {"controls": [{}]}, "controls[0]: a non-empty object wanted"
    yield "nan", GOOD | {"rows": [{"a": [1.0, math.nan]}]}, "rows[0].a[1]: a finite number wanted"
    yield (
        "an array",
        GOOD | {"ceilings": {"a": np.float32(1)}},
        "ceilings.a: a plain JSON value wanted, got float32",
    )
    half = {"median": 1.0, "p25": 1.0}
    yield "half a timing", GOOD | {"rows": [{"t": half}]}, "rows[0].t: a timing has median"
    crossed = {"median": 1.0, "p25": 2.0, "p75": 3.0, "n": 3}
    yield "quartiles crossed", GOOD | {"rows": [{"t": crossed}]}, "p25 <= median <= p75"
    yield "text for a time", GOOD | {"rows": [{"t": crossed | {"p25": "1"}}]}, "are numbers"


@pytest.mark.parametrize(("body", "message"), [pytest.param(b, m, id=n) for n, b, m in breaks()])
def test_each_break_is_named(body, message):
    with pytest.raises(ResultsError) as error:
        validate(copy.deepcopy(body))
    assert message in str(error.value)


def test_written_results_are_read_back(tmp_path):
    rows = [{"requests": 8, "tok_s": 100.5, "step_ms": timing([3, 1, 2])}]
    controls = [{"what": "trace off", "tok_s": 101.0}]
    path = tmp_path / "new" / "engine.json"
    body = write_results(
        path, command="x", rows=rows, controls=controls, ceilings={"a": 1}, packages=["pytest"]
    )
    assert read_results(path) == body == json.loads(path.read_text())
    assert (body["rows"], body["controls"], body["ceilings"]) == (rows, controls, {"a": 1})
    assert body["versions"]["pytest"] == pytest.__version__
    assert body["machine"]["cores"] >= 1
    assert body["machine"]["cpu"]
    age = datetime.now(UTC) - datetime.strptime(body["date"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert abs(age.total_seconds()) < 60


def test_nothing_is_written_when_the_rows_are_bad(tmp_path):
    with pytest.raises(ResultsError, match="finite"):
        write_results(tmp_path / "a.json", command="x", rows=[{"t": math.inf}])
    assert not (tmp_path / "a.json").exists()


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ResultsError, match=r"bad\.json"):
        read_results(tmp_path / "bad.json")


def test_no_commit_outside_our_own_repository(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert results.commit() == "unknown"


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=40) | st.floats(0, 1).map(lambda x: [x] * 7))
def test_timing_agrees_with_numpy(samples):
    got = timing(samples)
    want = np.percentile(samples, [25, 50, 75])
    np.testing.assert_allclose([got["p25"], got["median"], got["p75"]], want, rtol=1e-9, atol=1e-6)
    assert got["n"] == len(samples)
    validate(GOOD | {"rows": [{"t": got}]})


@pytest.mark.parametrize("samples", [[], [math.nan], [1.0, math.inf]])
def test_timing_refuses(samples):
    with pytest.raises(ResultsError, match="at least one sample, all finite"):
        timing(samples)
