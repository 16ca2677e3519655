"""What a stored notebook must look like, and that the tool which writes them (tinymoe.lab.sync) writes them so."""

import copy
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_output

from tinymoe.lab import sync
from tinymoe.lab.sync import WIDGET_VIEW, build, canonical, cell_id, faults

ROOT = Path(__file__).resolve().parent.parent
STORED = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", STORED, ids=lambda p: p.stem)
def test_stored_notebook(path):
    assert faults(nbformat.read(path, as_version=4), path.stem, path.stat().st_size) == []


def test_every_stored_notebook_is_seen():
    """No notebook hides in a sub-folder or under another name."""
    inside = [p for p in (ROOT / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts]
    assert sorted(inside) == STORED


def good():
    nb = build([("markdown", "# Nine"), ("code", "x = 1"), ("code", "print(x)")], "09_pages")
    for count, cell in enumerate(nb.cells[1:], 1):
        cell.execution_count = count
    nb.cells[2].outputs = [new_output("stream", name="stdout", text="1\n")]
    return nb


def test_a_good_notebook_passes():
    assert faults(good(), "09_pages", 4000) == []


def _error(nb):
    nb.cells[2].outputs = [new_output("error", ename="NameError", evalue="x", traceback=[])]


BROKEN = [
    (lambda nb: nb.cells[1].update(execution_count=7), "cell 2: execution count 7, not 1"),
    (lambda nb: nb.cells[2].update(execution_count=None), "cell 3: execution count None, not 2"),
    (_error, "cell 3: error output NameError"),
    (lambda nb: nb.cells[2].outputs[0].update(name="stderr"), "cell 3: stderr output"),
    (lambda nb: nb.metadata.update(widgets={"state": {}}), "metadata.widgets is stored"),
    (lambda nb: nb.cells[0].update(id="3f2a"), "cell 1: id '3f2a', not '09-pages-01'"),
    (
        lambda nb: nb.cells[2].update(
            outputs=[new_output("display_data", data={WIDGET_VIEW: {"model_id": "1"}})]
        ),
        "cell 3: the id of a live widget is stored",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), BROKEN, ids=[m for _, m in BROKEN])
def test_each_fault_is_found(spoil, message):
    nb = good()
    spoil(nb)
    assert [f for f in faults(nb, "09_pages", 4000) if message in f]


def test_size_and_name():
    assert faults(good(), "09_pages", 301 * 1024) == ["301 KB, at most 300"]
    assert faults(good(), "Untitled", 10)[0] == "the name 'Untitled' is not NN_slug"


def test_an_announced_exception_is_fine():
    nb = good()
    _error(nb)
    nb.cells[2].metadata["tags"] = ["raises-exception"]
    assert faults(nb, "09_pages", 4000) == []


def test_canonical_form_is_a_fixed_point_and_keeps_what_matters():
    nb = good()
    nb.cells[1].metadata.update(
        {"execution": {"x": 1}, "scrolled": True, "tags": ["exercise"], "exercise": "09.1"}
    )
    nb.cells[2].outputs = [
        new_output(
            "execute_result", data={WIDGET_VIEW: {"model_id": "1"}, "text/plain": "1"}, execution_count=2
        )
    ]
    nb.metadata.update(widgets={"state": {}}, language_info={"name": "python", "version": "3.11.2"})
    nb.cells[0].id = "zzz"
    text = canonical(copy.deepcopy(nb), "09_pages")
    again = nbformat.reads(text, as_version=4)
    assert canonical(again, "09_pages") == text
    assert faults(again, "09_pages", len(text)) == []
    assert again.cells[1].metadata == {"tags": ["exercise"], "exercise": "09.1"}
    assert again.cells[2].outputs[0].data == {"text/plain": "1"}
    assert "3.11" not in text
    assert cell_id("09_pages_and_more", 12) == "09-pages-and-more-12"


def test_sync_executes_strips_and_is_idempotent(tmp_path):
    """A real kernel: a widget's state is stripped, its caption kept; the second run changes nothing."""
    cells = [
        ("code", f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]"),
        (
            "code",
            "from lab_simulator import record\nfrom tinymoe.lab import PageTable\nw = PageTable(record(seed=1)[0])\nw",
        ),
        ("code", "w.seek(3)\nprint(w.text)"),
    ]
    path = tmp_path / "09_pages.ipynb"
    path.write_text(nbformat.writes(build(cells, "09_pages")))
    assert sync.sync(folder=tmp_path) == [path]
    nb = nbformat.read(path, as_version=4)
    shown = nb.cells[1].outputs[0].data
    assert set(shown) == {"text/plain", "application/vnd.tinymoe.replay+json"}
    assert nb.cells[2].outputs[0].text.startswith("Step 1: page ")
    assert path.stat().st_size < 100_000
    assert sync.sync([path]) == []


def test_sync_leaves_a_failing_notebook_alone(tmp_path):
    path = tmp_path / "09_pages.ipynb"
    path.write_text(nbformat.writes(build([("code", "1 / 0")], "09_pages")))
    before = path.read_text()
    with pytest.raises(CellExecutionError):
        sync.sync([path])
    assert path.read_text() == before
