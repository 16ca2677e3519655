"""The README's tables are those of the recorded results, and cannot go stale unnoticed."""

import json
from pathlib import Path

import pytest

from tinymoe.bench import tables
from tinymoe.core.model_config import ConfigError

ROOT = Path(__file__).resolve().parent.parent


def test_the_readme_is_up_to_date():
    text = (ROOT / "README.md").read_text()
    assert tables.fill(text) == text, "run: tinymoe bench tables"


def test_figures_come_from_the_results(monkeypatch, tmp_path):
    timing = {"median": 10.0, "p25": 9.0, "p75": 11.0, "n": 5}
    row = {
        "requests": 1,
        "out": 64,
        "tok_s": timing,
        "peers": {"transformers": {**timing, "median": 9.5}},
        "ratio": timing,
    }
    body = {
        "schema": 1,
        "command": "tinymoe bench engine",
        "commit": "0" * 40,
        "date": "2026-11-29T00:00:00Z",
        "machine": {"cpu": "x", "cores": 2, "memory_gb": 24.0, "gpu": None, "gpus": 0},
        "versions": {"python": "3.11", "torch": "2", "transformers": "5"},
        "ceilings": {},
        "rows": [row],
        "controls": [],
    }
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / "engine_cpu.json").write_text(json.dumps(body))
    filled = tables.fill("a\n<!-- begin engine_cpu -->\nstale 99\n<!-- end engine_cpu -->\nb")
    assert "stale" not in filled
    assert "| 1 | 10 | 10 | 10.0 (9.0 to 11.0) |" in filled
    assert filled.startswith("a\n<!-- begin")
    assert filled.endswith("-->\nb")


def test_an_unknown_mark_is_an_error():
    with pytest.raises(ConfigError, match="marks a table 'nope'"):
        tables.fill("<!-- begin nope --><!-- end nope -->")
