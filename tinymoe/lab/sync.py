"""Keep stored notebooks in one form: executed, without widget state, with stable cell ids, and small.

The .ipynb is the only source. `sync` executes it in place (nbclient; a Lesson fixes seeds and threads), then writes the
canonical form; `faults` says what a stored notebook must not contain. Strict nbval compares the outputs afterwards.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat.notebooknode import NotebookNode

WIDGET_VIEW = (
    "application/vnd.jupyter.widget-view+json"  # names a live model: useless in a file, and new in each run
)
NOISE = ("execution", "ExecuteTime", "collapsed", "scrolled", "trusted", "editable", "vscode")
NAME = re.compile(r"\d\d_[a-z0-9_]+")
MAX_KB = 300


def sync(
    paths: Sequence[Path | str] = (), *, folder: Path | str = "notebooks", timeout: int = 600
) -> list[Path]:
    """Execute and rewrite these notebooks (all of `folder` if none is given); returns those whose text changed.

    timeout: seconds a cell may run. Raises FileNotFoundError for a missing file, nbclient's CellExecutionError if a cell
    fails, and ValueError if the result has faults; then the file stays as it was.
    """
    changed = []
    for path in [Path(p) for p in paths] or sorted(Path(folder).glob("*.ipynb")):
        before = path.read_text(encoding="utf-8")
        notebook = execute(nbformat.reads(before, as_version=4), path.parent, timeout)
        text = canonical(notebook, path.stem)
        if found := faults(nbformat.reads(text, as_version=4), path.stem, len(text.encode())):
            raise ValueError(f"{path}: {'; '.join(found)}")
        if text != before:
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


def execute(notebook: NotebookNode, folder: Path | str, timeout: int = 600) -> NotebookNode:
    """Run all cells in a fresh kernel whose working folder is `folder`. Widget state is stripped later, not refused
    here: nbclient stumbles over Output widgets when it may not store any."""
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        coalesce_streams=True,
        record_timing=False,
    )
    return client.execute()


def canonical(notebook: NotebookNode, stem: str) -> str:
    """The text to store: ids `nn-slug-03`, only meaningful metadata, no widget state, no model ids."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells, 1):
        cell.id = cell_id(stem, number)
        cell.source = cell.source.rstrip()
        for key in NOISE:
            cell.metadata.pop(key, None)
        for output in cell.get("outputs", []):
            if "data" in output:
                output.data.pop(WIDGET_VIEW, None)
                output.metadata = nbformat.from_dict({})
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def cell_id(stem: str, number: int) -> str:
    """`09_pages`, 3 -> `09-pages-03`."""
    return f"{stem.replace('_', '-')[:58]}-{number:02d}"


def faults(notebook: NotebookNode, stem: str, size: int) -> list[str]:
    """What is wrong with a stored notebook of `size` bytes; empty if nothing."""
    found = []
    if not NAME.fullmatch(stem):
        found.append(f"the name {stem!r} is not NN_slug")
    if notebook.metadata.get("widgets"):
        found.append("metadata.widgets is stored (one FigureWidget is 5 MB)")
    if size > MAX_KB * 1024:
        found.append(f"{size // 1024} KB, at most {MAX_KB}")
    runs = 0
    for number, cell in enumerate(notebook.cells, 1):
        if cell.id != cell_id(stem, number):
            found.append(f"cell {number}: id {cell.id!r}, not {cell_id(stem, number)!r}")
        if cell.cell_type != "code":
            continue
        runs += 1
        if cell.execution_count != runs:
            found.append(f"cell {number}: execution count {cell.execution_count}, not {runs}")
        found += [f"cell {number}: {what}" for output in cell.outputs for what in _bad(output, cell)]
    return found


def _bad(output: NotebookNode, cell: NotebookNode) -> Iterable[str]:
    if output.output_type == "error" and "raises-exception" not in cell.metadata.get("tags", []):
        yield f"error output {output.ename}"
    if output.get("name") == "stderr":
        yield "stderr output"
    if WIDGET_VIEW in output.get("data", {}):
        yield "the id of a live widget is stored"


def build(cells: Iterable[tuple[str, str] | tuple[str, str, dict[str, Any]]], stem: str) -> NotebookNode:
    """A new notebook from ("markdown" or "code", source[, metadata]) triples, not executed yet; write it with canonical()."""
    make = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    notebook = nbformat.v4.new_notebook()
    for number, (kind, source, *metadata) in enumerate(cells, 1):
        cell = make[kind](source, metadata=metadata[0] if metadata else {})
        cell.id = cell_id(stem, number)
        notebook.cells.append(cell)
    return notebook
