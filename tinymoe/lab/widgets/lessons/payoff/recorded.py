"""What `tinymoe bench spec` recorded, read for a figure and for a table: where speculation paid, and where not.

Rows are those of tinymoe.bench.spec.measure.summary, one for each model, text, number of requests, draft and depth. Any set
of them will do; a file that was never recorded is None.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tinymoe.lab.frames.view import count
from tinymoe.lab.widgets.plots import FONT, OKABE_ITO, base_layout

RESULTS = Path(__file__).resolve().parents[5] / "book" / "results"
TWIN = {"quintet-dense": "quintet-moe"}  # dense model -> the one whose twin it is
LOOKS = {"moe": (OKABE_ITO[0], "circle"), "dense": (OKABE_ITO[5], "square")}
Row = Mapping[str, Any]


def results(name: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """book/results/NAME.json, or None if nobody has recorded it."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def source(name: str, body: Mapping[str, Any] | None) -> str:
    """One sentence: on which machine it was recorded, and when; or that it was not."""
    if body is None:
        return f"book/results/{name}.json has not been recorded yet: nothing to show here."
    m, rows = body["machine"], body["rows"]
    where = m["gpu"] if any(r["device"] == "cuda" for r in rows) else f"{m['cores']} cores ({m['cpu']})"
    kind = (
        "random weights, drafts accepted by a coin (synthetic)"
        if any(r["synthetic"] for r in rows)
        else "the bundled models"
    )
    more = "".join(f", {part}" for part in _shared(rows))
    return (
        f"{name}: recorded {body['date'][:10]} on {where}, torch {body['versions']['torch']}; {kind}{more}."
    )


def _shared(rows: Iterable[Row]) -> list[str]:
    """What draft_of says of all rows alike, behind who drafts: it need not stand in every title."""
    said = {draft_of(row).partition(", ")[2] for row in rows}
    return [part for part in said if part] if len(said) == 1 else []


def family(row: Row) -> str:
    """The model of a row, or whose dense twin it is."""
    model: str = row["model"]
    return TWIN.get(model, model.removesuffix(" dense twin"))


def draft_of(row: Row) -> str:
    """Who drafts; for a coin, how often it accepts, and what drafts cost."""
    rate = row.get("forced_acceptance")
    if rate is None:
        return row["draft"]
    said = f"{100 * rate:.0f} % accepted"
    if row.get("draft_layers"):
        said += f", draft of {count(row['draft_layers'], 'layer')}"
    return said + (f", d = {row['draft_cost']:g}" if row.get("draft_cost") else "")


def situations(rows: Iterable[Row]) -> dict[tuple, list[Row]]:
    """Rows that differ in depth only: (family, text, draft, target, requests) -> rows, in the order of the file."""
    rows, found = list(rows), {}
    alike = [f", {part}" for part in _shared(rows)]
    for row in rows:
        draft = draft_of(row).removesuffix(*alike) if alike else draft_of(row)
        key = (family(row), row["domain"], draft, row["target"], row["requests"])
        found.setdefault(key, []).append(row)
    return found


def best(rows: Iterable[Row]) -> Row | None:
    """The fastest of the fixed depths above 0; None if none was measured."""
    return max((r for r in rows if r["depth"]), key=lambda r: r["speedup"]["median"], default=None)


def speedups(rows: Iterable[Row], depth: int | None = None) -> go.Figure | None:
    """Speed-up over the number of requests, a panel for each model, text and draft, a line for the MoE and for its dense twin;
    thin and dotted the bound of each. depth: None takes the best of every dot. None if no row has that depth."""
    lines: dict[tuple, dict[str, list[Row]]] = {}
    for (name, text, draft, target, _), mine in situations(rows).items():
        chosen = best(mine) if depth is None else next((r for r in mine if r["depth"] == depth), None)
        if chosen is not None:
            lines.setdefault((name, text, draft), {}).setdefault(target, []).append(chosen)
    if not lines:
        return None
    columns = min(3, len(lines))
    titles = [" · ".join(dict.fromkeys((n, d) if t == "random" else (n, t, d))) for n, t, d in lines]
    titles = [t.replace("quintet-moe · ", "") for t in titles]
    grid = -(-len(lines) // columns)
    figure = make_subplots(grid, columns, subplot_titles=titles, shared_yaxes=True, horizontal_spacing=0.04, vertical_spacing=0.3 / grid)  # fmt: skip
    highest, shown = 1.2, set()
    for at, group in enumerate(lines.values()):
        where = {"row": at // columns + 1, "col": at % columns + 1}
        for target, mine in group.items():
            mine.sort(key=lambda r: r["requests"])
            colour, symbol = LOOKS[target]
            label = "Mixture of Experts" if target == "moe" else "dense twin"
            x, y = [r["requests"] for r in mine], [round(r["speedup"]["median"], 3) for r in mine]
            bound = [round(r["bound_tok_s"] / r["plain_tok_s"], 3) for r in mine]
            off = [
                [round(abs(r["speedup"][q] - r["speedup"]["median"]), 3) for r in mine]
                for q in ("p75", "p25")
            ]
            bars = {"type": "data", "array": off[0], "arrayminus": off[1], "thickness": 1, "width": 3}
            text = [_hover(label, r) for r in mine]
            look = {"x": x, "legendgroup": target, **where}
            figure.add_scatter(y=y, mode="lines+markers", name=label, showlegend=target not in shown, error_y=bars, text=text, hovertemplate="%{text}<extra></extra>", line={"color": colour, "width": 3}, marker={"symbol": symbol, "size": 8}, **look)  # fmt: skip
            figure.add_scatter(y=bound, mode="lines", name=f"{label}: bound", showlegend=target not in shown, line={"color": colour, "width": 1, "dash": "dot"}, hoverinfo="skip", **look)  # fmt: skip
            highest, shown = max(highest, *(r["speedup"]["p75"] for r in mine), *bound), shown | {target}
    figure.add_hline(y=1, line={"color": "#777777", "width": 1}, row="all", col="all")  # type: ignore[arg-type]
    counts = sorted({r["requests"] for g in lines.values() for mine in g.values() for r in mine})
    figure.update_layout(base_layout("speed-up of speculation over requests at once", 760, 110 + 210 * grid))
    figure.update_layout(margin={"l": 55, "r": 15, "t": 35, "b": 85}, legend={"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"})  # fmt: skip
    figure.update_annotations(font={**FONT, "size": 11})
    figure.update_xaxes(type="log", tickvals=counts, ticktext=[str(n) for n in counts])
    for column in range(1, columns + 1):
        figure.update_xaxes(title="requests at once", row=grid, col=column)
    figure.update_yaxes(range=[0, round(1.08 * highest, 2)])
    figure.update_yaxes(title="times plain decoding", col=1)
    return figure


def _hover(label: str, row: Row) -> str:
    return f"{label}, {row['requests']} at once, depth {row['depth']}: {row['speedup']['median']:.2f} times plain decoding"


def reasons(rows: Iterable[Row]) -> list[list[str]]:
    """The situations in which no fixed depth was faster than plain decoding, the worst first, under a header; each with the
    depth that lost least. tokens: of a sequence and step, plain decoding's being 1; step and drafts: what they cost in plain
    steps; experts: distinct ones of a layer and step, and those of plain decoding."""
    table = [
        ["model", "text", "draft", "requests", "depth", "tokens", "step", "drafts", "experts", "speed-up"]
    ]
    lost = []
    for (name, text, draft, target, requests), mine in situations(rows).items():
        row, plain = best(mine), next((r for r in mine if r["depth"] == 0), None)
        if row is None or row["speedup"]["median"] >= 1:
            continue
        tokens = 1 + (row["acceptance"] or 0) * row["mean_depth"]
        visited = row["distinct_experts"]
        before = plain["distinct_experts"] if plain is not None else None
        experts = (
            "-" if visited is None else f"{visited:.1f}" + ("" if before is None else f" ({before:.1f})")
        )
        model = name if target == "moe" else f"{name}'s twin"
        lost.append((row["speedup"]["median"], [
            model, text, draft, str(requests), str(row["depth"]), f"{tokens:.2f}", f"{row['verify_ms'] / row['plain_ms']:.2f}",
            f"{row['draft_ms'] / row['plain_ms']:.2f}", experts, f"{row['speedup']['median']:.2f}",
        ]))  # fmt: skip
    return table + [cells for _, cells in sorted(lost, key=lambda pair: pair[0])]


def tally(rows: Iterable[Row]) -> dict[str, tuple[int, int]]:
    """target -> (situations in which some fixed depth was faster than plain decoding, situations)."""
    found: dict[str, tuple[int, int]] = {}
    for (_, _, _, target, _), mine in situations(rows).items():
        row = best(mine)
        won, all_of = found.get(target, (0, 0))
        found[target] = (won + (row is not None and row["speedup"]["median"] > 1), all_of + 1)
    return found


def columns(table: list[list[str]]) -> str:
    """A table as text, every column as wide as it must be."""
    widths = [max(map(len, column)) for column in zip(*table)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in table)
