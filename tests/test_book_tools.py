"""What the book's own Sphinx extensions make of formulas, results and notebook outputs (the built book: tests/e2e)."""

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from docutils import nodes

from tinymoe.lab.book import PLOTLY, REPLAY, Replays

ROOT = Path(__file__).resolve().parent.parent


def extension(name: str):
    spec = importlib.util.spec_from_file_location(f"book_{name}", ROOT / "book" / "_ext" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


formulas, results = extension("formulas"), extension("results")


@pytest.fixture
def warnings(monkeypatch):
    """Every formula that was complained about."""
    seen: list[str] = []
    monkeypatch.setattr(formulas.logger, "warning", lambda text, *args, **_: seen.append(args[0]))
    return seen


def text_of(latex: str, *, block: bool = False) -> str:
    return "".join(ElementTree.fromstring(formulas.mathml(latex, block=block, node=nodes.math())).itertext())


@pytest.mark.parametrize(
    ("latex", "text"),
    [
        (r"\frac{kT}{P}", "kTP"),
        (r"a \le b < c", "a≤b<c"),
        (r"\mathbf{1}[x]", "𝟏[x]"),
        (r"\mathbf{W}", "𝐖"),
        (r"\mathtt{kv}", "𝚔𝚟"),
        (r"\operatorname{softmax}(s)", "softmax(s)"),
        (r"\begin{aligned} a &= b \\ c &= d \end{aligned}", "a=bc=d"),
    ],
)
def test_formulas_become_mathml(latex, text, warnings):
    assert text_of(latex) == text
    assert warnings == []


def test_an_aligned_formula_is_a_table_of_two_rows():
    element = formulas.mathml(
        r"\begin{aligned} a &= b \\ c &= d \end{aligned}", block=True, node=nodes.math()
    )
    assert len(re.findall("<mtr>", element)) == 2
    assert 'display="block"' in element


@pytest.mark.parametrize("latex", [r"\unheardof{x}", r"a & b", r"a \\ b"])
def test_what_is_left_untranslated_fails_the_build(latex, warnings):
    formulas.mathml(latex, block=False, node=nodes.math())
    assert warnings == [latex]


def test_rows_become_columns():
    row = {
        "requests": 32,
        "tok_s": 2300.4,
        "peers": {"transformers": 688.0, "vllm": None},
        "step_ms": {"median": 2.0, "p25": 1.954, "p75": 2.31, "n": 5},
        "ids": [1, 2],
        "exact": True,
    }
    assert results.flat(row) == {
        "requests": "32",
        "tok_s": "2,300",
        "peers: transformers": "688",
        "peers: vllm": "–",
        "step_ms": "2 (1.95–2.31)",
        "ids": "1, 2",
        "exact": "True",
    }
    assert [results.heading(c) for c in ("tok_s", "step_ms", "memory_gb_s")] == [
        "tok/s",
        "step ms",
        "memory gb/s",
    ]


def test_a_table_has_every_column_and_gaps_are_shown():
    made = results.table([{"a": 1}, {"b": 0.12345}])
    cells = [[entry.astext() for entry in row.findall(nodes.entry)] for row in made.findall(nodes.row)]
    assert cells == [["a", "b"], ["1", "–"], ["–", "0.123"]]


def test_outputs_are_rendered_as_players():
    """Text in a replay cannot end the script element that carries it, and comes back unchanged."""
    content = {"esm": "x", "captions": ["</script><b>&"]}
    for mime, kind in ((REPLAY, "replay"), (PLOTLY, "plotly")):
        (node,) = Replays.handle_mime(None, SimpleNamespace(mime_type=mime, content=content), False) or []
        html = node.astext()
        assert f'class="player player-{kind}"' in html
        assert html.count("</script>") == 1
        assert json.loads(html.split('json">')[1].split("</script>")[0]) == content


def test_other_outputs_are_left_to_mystnb():
    assert Replays.handle_mime(None, SimpleNamespace(mime_type="text/plain", content="x"), False) is None
    assert Replays.handle_mime(None, SimpleNamespace(mime_type=REPLAY, content={}), True) is None


def test_every_package_is_listed_for_installation():
    """An editable install hides a package that the wheel would lack."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    here = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "tinymoe").glob("**/__init__.py")}
    assert set(listed) - {"tinymoe.kernels"} == here


def test_long_tables_end_and_say_so():
    rows = [{"i": i, "loads": list(range(20))} for i in range(results.MOST_ROWS + 3)]
    made, more = results.shown(Path("routes.json"), rows)
    text = made.astext()
    assert "20 numbers" in text
    assert str(results.MOST_ROWS - 1) in text.split()
    assert str(results.MOST_ROWS) not in text.split()
    assert more.astext() == "3 more rows are in routes.json."
    assert len(results.shown(Path("routes.json"), rows[:3])) == 1
