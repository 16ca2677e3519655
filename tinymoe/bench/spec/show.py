"""The table at the end of `tinymoe bench spec`."""

from typing import Any

from rich.console import Console
from rich.table import Table

from tinymoe.bench.spec.measure import best_fixed, group_of


def show(rows: list[dict[str, Any]], controls: list[dict[str, Any]]) -> None:
    """Speed-ups over plain decoding by depth, a line for each model, domain, number of requests and draft."""
    depths = sorted({row["depth"] for row in rows if row["depth"] is not None})
    free = any(row["adaptive"] for row in rows)
    table = Table(
        title="plain decoding in tokens/s; times plain (median of pairs); share of the bound and acceptance at the best fixed depth"
    )
    heads = [
        "model",
        "domain",
        "requests",
        "draft",
        "plain",
        *map(str, depths),
        *(["adaptive"] if free else []),
    ]
    for name in (*heads, "of bound", "accepted", "experts"):
        table.add_column(name, justify="right")
    for group in dict.fromkeys(map(group_of, rows)):
        mine = [row for row in rows if group_of(row) == group]
        cells = [
            _times(next((r for r in mine if r["depth"] == d and not r["adaptive"]), None)) for d in depths
        ]
        if free:
            cells.append(_times(next((r for r in mine if r["adaptive"]), None)))
        best = best_fixed(mine) or mine[0]
        accepted, experts = best["acceptance"], best["distinct_experts"]
        table.add_row(
            *map(str, group[:3]), draft_of(best), f"{best['plain_tok_s']:.0f}", *cells, f"{best['bound_share']['median']:.3f}",
            "" if accepted is None else f"{accepted:.2f}", "" if experts is None else f"{experts:.1f}",
        )  # fmt: skip
    console = Console(width=160)
    console.print(table)
    if controls:
        worst = min(controls, key=lambda control: control["ratio"])
        console.print(
            f"adaptive depth over the better of plain and the best fixed depth: at least {worst['ratio']:.3f} "
            f"({worst['model']}, {worst['domain']}, {worst['draft']}, {worst['requests']} requests)"
        )


def draft_of(row: dict[str, Any]) -> str:
    """Who drafts; for a coin, how often it accepts."""
    forced = row.get("forced_acceptance")
    return row["draft"] if forced is None else f"{row['draft']} {forced}"


def _times(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['speedup']['median']:.2f}"
