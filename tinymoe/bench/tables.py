"""The tables of the README, written from recorded results between their marks, so that no figure is typed by hand."""

import argparse
import inspect
import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tinymoe.bench.results import read_results
from tinymoe.core.model_config import require
from tinymoe.engine.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "book" / "results"
ZOO = ROOT / "tinymoe" / "zoo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if README.md is out of date"
    )


def run(arguments: argparse.Namespace) -> int:
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = fill(old)
    require(not arguments.check or old == new, "README.md is out of date: run tinymoe bench tables")
    readme.write_text(new, encoding="utf-8")
    return 0


def fill(text: str) -> str:
    """`text` with every <!-- begin NAME --> ... <!-- end NAME --> filled from its results file."""

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        require(name in TABLES, f"README.md marks a table {name!r}; there are {sorted(TABLES)}")
        return f"<!-- begin {name} -->\n{TABLES[name]()}\n<!-- end {name} -->"

    return re.sub(r"<!-- begin (\w+) -->.*?<!-- end \1 -->", replace, text, flags=re.S)


def markdown(head: list[str], rows: list[list[Any]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "| --- " + "| ---: " * (len(head) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def engine_cpu() -> str:
    """Tokens per second against transformers, and where the step's time goes."""
    body = read_results(RESULTS / "engine_cpu.json")
    rows = [
        [
            r["requests"],
            f"{r['tok_s']['median']:,.0f}",
            f"{r['peers']['transformers']['median']:,.0f}",
            f"{r['ratio']['median']:.1f} ({r['ratio']['p25']:.1f} to {r['ratio']['p75']:.1f})",
        ]
        for r in body["rows"]
    ]
    head = ["requests", "tinymoe, tokens/s", "transformers generate, tokens/s", "ratio (quartiles)"]
    machine, versions = body["machine"], body["versions"]
    note = (
        f"Recorded {body['date'][:10]} on {machine['cores']} cores ({machine['cpu']}), torch {versions['torch']}, transformers "
        f"{versions['transformers']}, float32, greedy, {body['rows'][0]['out']} tokens out, by `{body['command']}`. "
        f"Every figure: [engine_cpu.json](book/results/engine_cpu.json)."
    )
    return f"{markdown(head, rows)}\n\n{note}"


def card() -> str:
    """Bits per byte of the three bundled models, from their cards."""
    cards = {
        n: json.loads((ZOO / f"quintet-{n}" / "card.json").read_text()) for n in ("moe", "dense", "draft")
    }
    domains = ("english", "german", "python", "verse")
    rows = []
    for name, body in cards.items():
        parameters, evaluation = body["parameters"], body["evaluation"]
        bits = evaluation["bits_per_byte"]
        rows.append(
            [
                f"[quintet-{name}](tinymoe/zoo/quintet-{name}/MODEL_CARD.md)",
                f"{parameters['total'] / 1e6:.1f} M",
                f"{parameters['active'] / 1e6:.1f} M",
                *(f"{bits[d]:.4f}" for d in domains),
                f"{100 * evaluation['sums']['exact']:.2f} %",
            ]
        )
    return markdown(["model", "parameters", "active", *domains, "sums exact"], rows)


def core_loop() -> str:
    """The source of Engine.step."""
    return f"```python\n{textwrap.dedent(inspect.getsource(Engine.step)).strip()}\n```"


TABLES: dict[str, Callable[[], str]] = {"engine_cpu": engine_cpu, "card": card, "core_loop": core_loop}
