"""The tables of the README, written from recorded results between their marks, so that no figure is typed by hand."""

import argparse
import inspect
import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from tinymoe.bench.results import read_results
from tinymoe.bench.spec.measure import best_fixed, group_of
from tinymoe.bench.spec.show import draft_of
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
    check_marks(old)
    new = fill(old)
    require(not arguments.check or old == new, "README.md is out of date: run tinymoe bench tables")
    readme.write_text(new, encoding="utf-8")
    return 0


def check_marks(text: str) -> None:
    """Raise ConfigError unless every table that can be written stands in README.md once, between both of its marks.

    A table whose results file was never recorded may be absent.
    """
    marks = re.findall(r"<!--\s*(begin|end)\s+([^\s>]+)\s*-->", text)
    named = {name for _, name in marks}
    unknown = sorted(named - set(TABLES))
    require(
        not unknown, f"README.md marks a table {', '.join(map(repr, unknown))}; there are {sorted(TABLES)}"
    )
    for name in TABLES:
        recorded = name in UNRECORDED or (RESULTS / f"{name}.json").exists()
        mine = [kind for kind, other in marks if other == name]
        ok = mine == ["begin", "end"] or (not mine and not recorded)
        told = " ".join(mine) or "no mark"
        require(
            ok,
            f"README.md must hold <!-- begin {name} --> and <!-- end {name} --> once, in this order; it has {told}",
        )
        found = re.search(rf"<!-- begin {name} -->(.*?)<!-- end {name} -->", text, re.S)
        require(
            not mine or found is not None, f"the marks of {name} must read <!-- begin {name} --> and so on"
        )
        inside = re.search(r"<!--\s*(?:begin|end)\s+(\w+)", found[1]) if found else None
        require(inside is None, f"README.md: a mark of {inside and inside[1]} stands inside the table {name}")


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


def gpu_note(name: str) -> str:
    body = read_results(RESULTS / f"{name}.json")
    limits, versions = body["ceilings"], body["versions"]
    can = ""
    if limits:
        copy, rate = limits["copy_bytes_per_s"] / 1e12, limits["bf16_flops"] / 1e12
        can = f" (copy {copy:.2f} TB/s, bfloat16 {rate:.0f} TFLOP/s in the same run)"
    return (
        f"Recorded {body['date'][:10]} on one {body['machine']['gpu']}{can}, torch {versions['torch']}, triton {versions['triton']}"
        + (f", vLLM {versions['vllm']}" if "vllm" in versions else "")
        + f", by `{body['command']}`. Every figure: [{name}.json](book/results/{name}.json)."
    )


def moe_h200() -> str:
    """One MoE layer: microseconds, times faster than vLLM's kernels and torch's grouped products, share of the roofline."""
    rows = read_results(RESULTS / "moe_h200.json")["rows"]
    cells = {}
    for r in rows:
        us = r["us"]["median"]
        vllm, grouped = (r["peers"][peer]["median"] / us for peer in ("vllm_triton", "torch_grouped"))
        cells[r["shape"], r["tokens"]] = (
            f"{us:,.0f} ({vllm:.2f}×, {grouped:.1f}×, {r['roofline_us'] / us:.0%})"
        )
    shapes, tokens = list(dict.fromkeys(s for s, _ in cells)), sorted({t for _, t in cells})
    table = markdown(["tokens", *shapes], [[f"{t:,}", *(cells[s, t] for s in shapes)] for t in tokens])
    return f"{table}\n\n{gpu_note('moe_h200')}"


def attention_h200() -> str:
    """Attention with 32 query and 8 key/value heads: microseconds, and FlashAttention-3's over the same pages."""
    body = read_results(RESULTS / "attention_h200.json")
    rows = [
        [
            f"{r['kind']}, {r['batch']} × {r['context']:,}",
            f"{r['us']['median']:,.0f}",
            f"{r['peers']['fa3']['median']:,.0f}",
            f"{r['peers']['torch_sdpa_contiguous']['median']:,.0f}",
            f"{r['bound_us'] / r['us']['median']:.0%}",
        ]
        for r in body["rows"]
        if (r["heads"], r["kv_heads"]) == (32, 8)
    ]
    head = [
        "batch × context",
        "tinymoe, paged, µs",
        "FlashAttention-3, paged, µs",
        "torch, contiguous, µs",
        "of the bound",
    ]
    return f"{markdown(head, rows)}\n\n{gpu_note('attention_h200')}"


def e2e_h200() -> str:
    """The whole engine: output tokens a second beside vLLM's, by model and workload, and the modes that cost some."""
    rows = read_results(RESULTS / "e2e_h200.json")["rows"]
    modes = {(r["model"], r["requests"], r["in"], r["mode"]): r["tok_s"] for r in rows}
    shown = []
    for r in rows:
        if r["mode"] == "default":
            key, peer = (r["model"], r["requests"], r["in"]), r["peers"]["vllm"]
            others = [modes.get((*key, mode)) for mode in ("sync", "invariant")]
            shown.append(
                [
                    f"{r['model']}, {r['requests']:,} × ({r['in']:,} + {r['out']})",
                    f"{r['tok_s']:,.0f}",
                    f"{peer:,.0f}",
                    f"{r['tok_s'] / peer:.2f}",
                    *("" if other is None else f"{other:,.0f}" for other in others),
                    f"{r['distinct_experts']:.0f}",
                ]
            )
    head = [
        "model, requests × (in + out)",
        "tinymoe",
        "vLLM",
        "ratio",
        "step by step",
        "batch_invariant",
        "experts",
    ]
    return f"{markdown(head, shown)}\n\n{gpu_note('e2e_h200')}"


def selection_h200() -> str:
    """Mean regret of ways to choose an expert path, against the best path of every step."""
    body = read_results(RESULTS / "selection_h200.json")
    rows = [
        [
            r["policy"],
            *(f"{100 * r[key]:.1f} %" for key in ("mean_regret", "p95_regret", "worst_regret")),
            f"{100 * r['against_best_single']:+.1f} %",
        ]
        for r in (*body["rows"], *body["controls"])
        if r["kind"] == "regret"
    ]
    head = ["policy", "mean regret", "95th percentile", "worst", "time against the best single path"]
    return f"{markdown(head, rows)}\n\n{gpu_note('selection_h200')}"


def spec_rows(rows: list[dict[str, Any]]) -> str:
    """Speed-up over plain decoding: best fixed depth and adaptive, a line for each target, domain and draft."""
    groups = {key: [r for r in rows if group_of(r) == key] for key in dict.fromkeys(map(group_of, rows))}
    counts, lines = sorted({r["requests"] for r in rows}), {}
    for mine in groups.values():
        best, free = best_fixed(mine), [r for r in mine if r["adaptive"]]
        first = best or mine[0]
        cell = "" if best is None else f"{best['speedup']['median']:.2f} (depth {best['depth']})"
        cell += f", {free[0]['speedup']['median']:.2f}" if free else ""
        name = f"{first['model']}, {first['domain']}, {draft_of(first)}"
        lines.setdefault(name, {})[first["requests"]] = cell
    head = ["target, text, draft", *(f"{n} request{'s' * (n > 1)}" for n in counts)]
    return markdown(head, [[name, *(cells.get(n, "") for n in counts)] for name, cells in lines.items()])


def spec_controls(controls: list[dict[str, Any]]) -> str:
    """What adaptive depth reaches, and the best fixed one of its bound."""
    ratios, shares = (sorted(c[key] for c in controls) for key in ("ratio", "best_of_its_bound"))
    return (
        f" Adaptive depth reaches {median(ratios):.2f} of the better of plain decoding and the best fixed depth (median; {ratios[0]:.2f} to "
        f"{ratios[-1]:.2f}), the best fixed depth {median(shares):.2f} of the bound that its own drafts and verifications set "
        f"({shares[0]:.2f} to {shares[-1]:.2f})."
        if controls
        else ""
    )


def spec_cpu() -> str:
    """Speculation of the bundled pair: times plain decoding at the best fixed depth, and at adaptive depth."""
    body = read_results(RESULTS / "spec_cpu.json")
    machine, versions = body["machine"], body["versions"]
    note = (
        f"Times plain decoding: best fixed depth, then adaptive depth.{spec_controls(body['controls'])} Recorded {body['date'][:10]} on {machine['cores']} cores "
        f"({machine['cpu']}), torch {versions['torch']}, float32, greedy, by `{body['command']}`. Bounds and every figure: "
        "[spec_cpu.json](book/results/spec_cpu.json)."
    )
    return f"{spec_rows(body['rows'])}\n\n{note}"


def spec_h200() -> str:
    """The same on published shapes, where a coin accepts the drafts."""
    body = read_results(RESULTS / "spec_h200.json")
    note = f"Times plain decoding: best fixed depth, then adaptive depth.{spec_controls(body['controls'])} {gpu_note('spec_h200')}"
    return f"{spec_rows(body['rows'])}\n\n{note}"


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
    taken, named = (cards["draft"]["evaluation"][key] for key in ("acceptance", "agreement"))
    note = (
        f"Of quintet-draft's tokens quintet-moe would accept {taken['english']:.0%} on English and {taken['python']:.0%} on Python at "
        f"temperature 1; of what it writes greedily itself, the draft names {named['english']:.0%} and {named['python']:.0%}."
    )
    return f"{markdown(['model', 'parameters', 'active', *domains, 'sums exact'], rows)}\n\n{note}"


def core_loop() -> str:
    """The source of Engine.step."""
    return f"```python\n{textwrap.dedent(inspect.getsource(Engine.step)).strip()}\n```"


TABLES: dict[str, Callable[[], str]] = {
    "engine_cpu": engine_cpu,
    "moe_h200": moe_h200,
    "attention_h200": attention_h200,
    "e2e_h200": e2e_h200,
    "selection_h200": selection_h200,
    "spec_cpu": spec_cpu,
    "spec_h200": spec_h200,
    "card": card,
    "core_loop": core_loop,
}
UNRECORDED = ("card", "core_loop")  # their sources are no results files, and always there
