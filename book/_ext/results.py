"""The directive {results}: tables made from book/results/*.json when the book is built, so that no number is typed.

```{results} engine_cpu      one file; without an argument all of them
```
"""

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from tinymoe.bench.results import ResultsError, read_results

MISSING = "–"
MOST_ROWS, MOST_NUMBERS = 40, 16  # what a reader looks at; the file has the rest


def number(value: Any) -> str:
    """Three significant digits are what a measurement on a shared machine is worth; integers stay whole."""
    if value is None:
        return MISSING
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, list):
        return ", ".join(map(number, value)) if len(value) <= MOST_NUMBERS else f"{len(value)} numbers"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def flat(row: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """A row as columns: {"peers": {"x": 1}} becomes the column "peers: x"; a timing stays one cell, median (p25–p75)."""
    cells: dict[str, str] = {}
    for key, value in row.items():
        name = f"{prefix}: {key}" if prefix else key
        if isinstance(value, dict) and "median" in value:
            cells[name] = f"{number(value['median'])} ({number(value['p25'])}–{number(value['p75'])})"
        elif isinstance(value, dict):
            cells |= flat(value, name)
        else:
            cells[name] = number(value)
    return cells


def heading(column: str) -> str:
    """tok_s is read tok/s, step_ms is read step ms."""
    return re.sub(r"_s$", "/s", column).replace("_", " ")


def table(rows: list[dict[str, Any]]) -> nodes.table:
    """A column for every name that occurs, in order of first appearance."""
    cells = [flat(row) for row in rows]
    columns = list(dict.fromkeys(name for row in cells for name in row))
    group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in columns), cols=len(columns))
    group += nodes.thead("", line([heading(c) for c in columns]))
    group += nodes.tbody("", *(line([row.get(c, MISSING) for c in columns]) for row in cells))
    return nodes.table("", group, classes=["results"])


def line(texts: list[str]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph(text=text)) for text in texts))


def section(path: Path, body: dict[str, Any]) -> nodes.section:
    made = nodes.section("", nodes.title(text=path.stem.replace("_", " ")), ids=[nodes.make_id(path.stem)])
    machine, versions = body["machine"], body["versions"]
    where = f"{machine['cpu']}, {machine['cores']} cores" + (f", {machine['gpu']}" if machine["gpu"] else "")
    with_what = ", ".join(f"{name} {value}" for name, value in versions.items())
    made += nodes.paragraph(
        "",
        "",
        nodes.literal(text=body["command"]),
        nodes.Text(f" on {body['date'][:10]}: {where}; {with_what}."),
    )
    made += shown(path, body["rows"])
    for name, rows in (
        ("Controls", body["controls"]),
        ("Ceilings of the machine", [body["ceilings"]] if body["ceilings"] else []),
    ):
        if rows:
            made += nodes.paragraph("", "", nodes.strong(text=name))
            made += shown(path, rows)
    return made


def shown(path: Path, rows: list[dict[str, Any]]) -> list[nodes.Node]:
    """A table of the first rows, and how many more there are."""
    found: list[nodes.Node] = [scrolling(table(rows[:MOST_ROWS]))]
    if len(rows) > MOST_ROWS:
        more = f"{len(rows) - MOST_ROWS} more rows are in {path.name}."
        found.append(nodes.paragraph(text=more))
    return found


def scrolling(inner: nodes.Node) -> nodes.container:
    return nodes.container("", inner, classes=["scrolling"])


class Results(SphinxDirective):
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        folder = Path(self.env.srcdir) / "results"
        paths = [folder / f"{self.arguments[0]}.json"] if self.arguments else sorted(folder.glob("*.json"))
        found: list[nodes.Node] = []
        for path in paths:
            self.env.note_dependency(str(path))
            try:
                found.append(section(path, read_results(path)))
            except (OSError, ResultsError) as error:
                raise self.error(str(error)) from error
        return found or [nodes.paragraph(text="Nothing has been measured yet.")]


def outdated(app: Sphinx, env, *_) -> list[str]:
    """A new results file changes a page that does not know it yet."""
    return [name for name in env.found_docs if name == "measured"]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("results", Results)
    app.connect("env-get-outdated", outdated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
