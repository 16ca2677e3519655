"""The README's tables are those of the recorded results, and cannot go stale unnoticed."""

import argparse
import json
from pathlib import Path

import pytest

from tinymoe.bench import tables
from tinymoe.core.model_config import ConfigError

ROOT = Path(__file__).resolve().parent.parent


def test_the_readme_is_up_to_date():
    text = (ROOT / "README.md").read_text()
    tables.check_marks(text)
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


CARD = "<!-- begin card -->x<!-- end card -->"
LOOP = "<!-- begin core_loop -->x<!-- end core_loop -->"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CARD, "<!-- begin core_loop --> and <!-- end core_loop --> once, in this order; it has no mark"),
        (CARD + LOOP + CARD, "begin card .* it has begin end begin end"),
        (CARD + LOOP.replace("<!-- end core_loop -->", ""), "core_loop .* it has begin$"),
        (CARD + "<!-- end core_loop -->", "core_loop .* it has end$"),
        ("<!-- end card --><!-- begin card -->" + LOOP, "card .* it has end begin"),
        (CARD + LOOP + "<!-- begin nope -->", r"marks a table 'nope'; there are \["),
        (CARD + LOOP + "<!-- end nope-1 -->", "marks a table 'nope-1'"),
        (CARD.replace("begin card", "begin  card") + LOOP, "the marks of card must read"),
        (CARD + LOOP + "<!-- begin engine_cpu -->", "engine_cpu .* it has begin$"),
        (LOOP.replace("x", CARD), "a mark of card stands inside the table core_loop"),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_a_table_whose_marks_are_not_there_once_is_an_error(monkeypatch, tmp_path, check, text, message):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)  # no file is recorded
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(ConfigError, match=message):
        tables.run(argparse.Namespace(check=check))
    assert (tmp_path / "README.md").read_text() == text


def test_only_a_table_that_was_recorded_must_be_there(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    tables.check_marks(CARD + LOOP)
    (tmp_path / "spec_cpu.json").touch()
    with pytest.raises(ConfigError, match=r"spec_cpu .* it has no mark"):
        tables.check_marks(CARD + LOOP)


def test_an_unknown_mark_is_an_error():
    with pytest.raises(ConfigError, match="marks a table 'nope'"):
        tables.fill("<!-- begin nope --><!-- end nope -->")
