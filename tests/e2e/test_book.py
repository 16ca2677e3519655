"""The built book in a browser: offline, complete, and its replays move by mouse and by keyboard.

Beside the real notebooks the book is built with a probe, a small notebook that holds one of everything the book draws.
"""

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from nbformat import write
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from playwright.sync_api import Locator, Page, expect

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[2]
MAX_PAGE_KB = 400
PLOTLY, REPLAY = "application/vnd.plotly.v1+json", "application/vnd.tinymoe.replay+json"
PROBE_MODULE = """
export default { render({ model, el }) {
  const draw = () => { el.textContent = model.get("label") + ": " + model.get("frame").blocks.join(" "); };
  draw();
  model.on("change:frame", draw);
} };
"""
TEXT = r"""# Probe

Inline $\sum_i p_i = 1$, in [trace.py](../tinymoe/core/trace.py), and on its own line:

$$
\left\lceil \frac{kT}{P} \right\rceil \le \mathrm{pages}
$$
"""


def probe_outputs() -> list[dict]:
    steps = [[20 - i, 10 + i, 5] for i in range(11)]
    plotly = {
        "data": [{"type": "bar", "x": ["a", "b", "c"], "y": steps[0]}],
        "layout": {
            "title": {"text": "step 4"},
            "yaxis": {"range": [0, 25]},
            "height": 260,
            "sliders": [{"active": 4}],
        },
        "frames": [
            {"data": [{"y": y}], "layout": {"title": {"text": f"step {i}"}}} for i, y in enumerate(steps)
        ],
    }
    replay = {
        "schema": 1,
        "esm": "probe",
        "label": "probe blocks",
        "frames": [{"blocks": [i, i + 1]} for i in range(6)],
        "captions": [f"Blocks {i} and {i + 1}; </script> is text." for i in range(6)],
        "tables": [[["block", "owner"], [i, "A"], [i + 1, "B"]] for i in range(6)],
        "of": 40,
        "more": [
            {
                "esm": "probe",
                "label": "twin",
                "frames": [{"blocks": [-i]} for i in range(6)],
                "captions": list("abcdef"),
            }
        ],
    }
    curves = {
        "data": [{"x": [1, 2], "y": y, "name": n, "mode": "lines"} for n, y in (("a", [3, 4]), ("b", [5, 6]))]
    }
    live = {"model_id": "none", "version_major": 2, "version_minor": 0}
    return [
        {PLOTLY: plotly},
        {REPLAY: replay, "application/vnd.jupyter.widget-view+json": live},
        {PLOTLY: curves | {"layout": {"meta": {"label": "two curves"}}}},
    ]


@pytest.fixture(scope="session")
def book(tmp_path_factory) -> Path:
    """The folder of the built book; building it is a test of its own: a warning is an error."""
    root = tmp_path_factory.mktemp("repository")
    source, notebooks = root / "book", root / "notebooks"
    shutil.copytree(ROOT / "book", source, ignore=shutil.ignore_patterns("_build", "notebooks"))
    shutil.copytree(ROOT / "notebooks", notebooks)
    (source / "notebooks").symlink_to("../notebooks")
    for folder in ("tinymoe", "kernels"):  # notebooks link to them
        (root / folder).symlink_to(ROOT / folder)
    cells = [new_markdown_cell(TEXT)]
    for i, data in enumerate(probe_outputs(), 1):
        shown = new_output("display_data", data=data | {"text/plain": "a picture"})
        cells.append(new_code_cell("picture", execution_count=i, outputs=[shown]))
    metadata = {"language_info": {"name": "python", "pygments_lexer": "ipython3"}}
    write(new_notebook(cells=cells, metadata=metadata), notebooks / "99_probe.ipynb")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "-q",
        "-b",
        "html",
        str(source),
        str(source / "_build/html"),
    ]
    built = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert built.returncode == 0, built.stderr
    html = source / "_build/html"
    with open(html / "_static/widgets.js", "a") as script:
        script.write(f"window.tinymoeWidgets.probe = {json.dumps(PROBE_MODULE)};\n")
    return html


def pages(book: Path) -> list[Path]:
    found = [path for path in sorted(book.rglob("*.html")) if "_static" not in path.relative_to(book).parts]
    assert len(found) >= 4, found
    return found


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="session")
def server(book):
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(book))) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def ready(page: Page) -> None:
    """Until every player of the page has drawn its first frame, or has said why it cannot."""
    page.wait_for_function(
        "() => [...document.querySelectorAll('.player')].every(p => p.hasAttribute('role'))"
    )


def state(page: Page, nth: int) -> tuple[str, str]:
    """(what the picture holds, caption) of the nth player: from the document, not from pixels."""
    player = page.locator(".player").nth(nth)
    pictures = player.locator(".player-picture").all()
    picture = " ".join(p.evaluate("p => p.data ? JSON.stringify(p.data) : p.innerHTML") for p in pictures)
    return picture, player.locator(".player-caption").inner_text()


def until(read: Callable[[], Any], good: Callable[[Any], bool], seconds: float = 3) -> Any:
    """What `read` says once it is good, or at last: a page answers some events (a fold's, for one) a moment later."""
    end = time.monotonic() + seconds
    while not good(value := read()) and time.monotonic() < end:
        time.sleep(0.02)
    return value


def shows(locator: Locator, texts: list[str]) -> None:
    """Asserts on the inner texts of all elements found."""
    assert until(locator.all_inner_texts, lambda now: now == texts) == texts


def drive(page: Page, nth: int) -> None:
    """Moves one replay by mouse and keyboard; raises AssertionError where the picture or the caption stays."""
    player = page.locator(".player").nth(nth)
    slider = player.get_by_role("slider")
    last = int(slider.get_attribute("max"))
    slider.press("Home")  # a replay may begin in the middle
    seen = [state(page, nth)]

    def moved(action: str, to: int) -> None:
        at = until(slider.input_value, lambda value: value == str(to))
        assert at == str(to), f"{action}: the slider is at {at}, not at {to}"
        seen.append(until(lambda: state(page, nth), lambda now: now != seen[-1]))
        assert seen[-1] != seen[-2], f"{action}: nothing changed"

    box = slider.bounding_box()
    slider.scroll_into_view_if_needed()
    box = slider.bounding_box()
    page.mouse.click(box["x"] + box["width"] - 8, box["y"] + box["height"] / 2)
    moved("click at the end of the slider", last)
    page.keyboard.press("Home")
    moved("Home", 0)
    assert seen[-1] == seen[0], "the first frame again, but another picture"
    page.keyboard.press("ArrowRight")
    moved("ArrowRight", 1)
    page.keyboard.press("ArrowLeft")
    moved("ArrowLeft", 0)
    page.keyboard.press("End")
    moved("End", last)
    player.get_by_role("button", name="step back").click()
    moved("step back", last - 1)
    slider.focus()
    page.keyboard.press(" ")
    page.wait_for_function("s => s.value === s.max", arg=slider.element_handle(), timeout=5000)
    moved("Space plays", last)
    # Playing has ended: the button says so.
    expect(player.get_by_role("button", name="play")).to_be_visible()


def test_every_page_is_whole_offline(book, server, visit):
    seen = visit(server)
    for path in pages(book):
        assert path.stat().st_size <= MAX_PAGE_KB * 1024, f"{path.name} has {path.stat().st_size // 1024} KB"
        seen.page.goto(f"{server}/{path.relative_to(book)}")
        ready(seen.page)
        assert seen.page.locator(".player-error").count() == 0, seen.page.locator(
            ".player-error"
        ).all_inner_texts()
    assert (seen.external, seen.failed, seen.errors) == ([], [], [])


def test_links_lead_somewhere(book):
    """Between pages, and to the sources, which are pages of the book, too."""
    broken = []
    for path in pages(book):
        for link in re.findall(r'href="([^"#?]+)', path.read_text()):
            if not re.match(r"[a-z]+:", link) and not (path.parent / unquote(link)).exists():
                broken.append(f"{path.relative_to(book)}: {link}")
    assert not broken
    assert "class Trace" in re.sub("<[^>]+>", "", (book / "source/tinymoe/core/trace.py.html").read_text())


def test_replays_move_by_mouse_and_keyboard(book, server, visit):
    """Every replay of every notebook; the probe holds one of plotly and one of our own modules."""
    driven = 0
    for path in sorted((book / "notebooks").glob("*.html")):
        page = visit(server).page
        page.goto(f"{server}/notebooks/{path.name}")
        ready(page)
        for nth in range(page.locator(".player").count()):
            if page.locator(".player").nth(nth).get_by_role("slider").count():
                drive(page, nth)
                driven += 1
    assert driven >= 2


def test_a_dead_slider_is_noticed(server, visit):
    """The negative control: without the slider's listener the same drive must fail."""
    page = visit(server).page
    page.add_init_script("""
        const listen = EventTarget.prototype.addEventListener;
        EventTarget.prototype.addEventListener = function (kind, ...rest) {
            if (!(kind === "input" && this.type === "range")) listen.call(this, kind, ...rest);
        };""")
    page.goto(f"{server}/notebooks/99_probe.html")
    ready(page)
    with pytest.raises(AssertionError, match="click at the end of the slider: nothing changed"):
        drive(page, 0)


def test_names_roles_and_the_table(server, visit):
    page = visit(server).page
    page.goto(f"{server}/notebooks/99_probe.html")
    ready(page)
    player = page.get_by_role("group", name="probe blocks and twin, replay of 6 steps")
    slider = player.get_by_role("slider", name="probe blocks and twin: step")
    slider.press("ArrowRight")
    expect(slider).to_have_attribute("aria-valuetext", "2 of 6")
    shows(player.get_by_role("status").locator("p"), ["Blocks 1 and 2; </script> is text.", "b"])
    shows(player.locator(".player-picture"), ["probe blocks: 1 2", "twin: -1"])
    expect(player.get_by_text("6 of the recording's 40 moments are shown here.")).to_be_visible()
    player.get_by_text("View as table").click()
    shows(player.get_by_role("row"), ["block\towner", "1\tA", "2\tB"])
    slider.press("ArrowRight")
    shows(player.get_by_role("row"), ["block\towner", "2\tA", "3\tB"])
    figure = page.get_by_role("figure", name="two curves", exact=True)
    assert figure.get_by_role("slider").count() == 0
    figure.get_by_text("View as table").click()
    shows(figure.get_by_role("row"), ["\ta\tb", "1\t3\t5", "2\t4\t6"])
    assert page.locator("math").count() == 2
    drawn = page.evaluate(
        "document.fonts.ready.then(() => document.fonts.check('16px \"STIX Two Math Book\"'))"
    )
    assert drawn, "the font of the formulas is not there"


CONTRAST = """
() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => { for (; node; node = node.parentElement) {
    const color = rgb(getComputedStyle(node).backgroundColor); if (color.length === 3 || color[3] === 1) return color; }
    return [255, 255, 255]; };
  return [...document.querySelectorAll(".player button:enabled, .player-caption, .player output, .player summary")].map((node) => {
    const [a, b] = [light(rgb(getComputedStyle(node).color)), light(behind(node))];
    return [node.textContent, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]; });
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_by_day_and_by_night(server, visit, scheme):
    page = visit(server, color_scheme=scheme).page
    page.goto(f"{server}/notebooks/99_probe.html")
    ready(page)
    assert page.locator("html").get_attribute("data-theme") == scheme
    measured = page.evaluate(CONTRAST)
    assert len(measured) >= 8
    assert not [m for m in measured if m[1] < 4.5]


def test_the_book_opens_without_a_server(book, visit):
    seen = visit("file://")
    seen.page.goto((book / "notebooks/99_probe.html").as_uri())
    ready(seen.page)
    drive(seen.page, 1)
    assert (seen.external, seen.errors) == ([], [])
