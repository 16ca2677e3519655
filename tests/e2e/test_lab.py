"""Notebooks in JupyterLab, as a reader uses them: run all, drag, keys, step, play; no error, and no request leaves.

The real notebooks are driven, and a probe made here, which shows that the harness itself can pass and can fail.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from nbformat import write
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[2]
REAL = [
    p.name
    for number in ("00", "01", "02", "09")
    for p in sorted((ROOT / "notebooks").glob(f"{number}_*.ipynb"))
]
TOKEN = "e2e"
START_S, RUN_MS, MOVE_MS = 120, 180_000, 45_000
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {
        "windowingMode": "none"
    },  # else cells out of sight have no elements to look at
}
FOLDERS = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")


# A recording made by hand and three widgets over it, of both renderers: our own modules, and plotly.
PROBE = """
from tinymoe.core.trace import Trace
from tinymoe.lab.widgets.gallery import DraftRibbon, ExpertLoad, PageTable

trace = Trace()
with trace.record() as events:
    trace.emit("arrive", "", request=0, seq=0, prompt_tokens=40, priority=0)
    for step in range(10):
        trace.step = step
        trace.emit("alloc", "", seq=0, index=step, block=step)
        at, stays = 8 + 2 * step, step % 2
        trace.emit("draft", "", seq=0, position=at, token=100 + step, q=400_000)
        trace.emit("verify", "", seq=0, position=at, token=100 + step, p=300_000, q=400_000, accepted=stays)
        for n in range(stays + 1):
            trace.emit("sample", "", request=0, seq=0, position=at + n, token=100 * (stays - n + 1) + step)
        for layer in range(2):
            trace.emit("route", "", layer=layer, seq=0, position=step, experts=(step % 4, 5), gates=(600, 400), margin=9000)
"""
SHOW = [
    "pages = PageTable(events, num_blocks=12)\npages",
    "load = ExpertLoad(events, experts=8)\nload",
    "ribbon = DraftRibbon(events)\nribbon",
]
DEAD = "load.controls.unobserve_all()"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """(server, folder of the notebooks): JupyterLab on loopback with settings of its own, no news, a copy of the work."""
    root = tmp_path_factory.mktemp("lab")
    work = shutil.copytree(ROOT / "notebooks", root / "notebooks")
    for name, cells in {"probe": [PROBE, *SHOW], "dead": [PROBE, *SHOW, DEAD]}.items():
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        write(new_notebook(cells=[new_code_cell(c) for c in cells], metadata=kernel), work / f"{name}.ipynb")
    env = os.environ | {f"JUPYTER_{f}": str(root / f) for f in FOLDERS}
    env |= {
        "JUPYTERLAB_SETTINGS_DIR": str(root / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(root / "workspaces"),
    }
    env |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")])),
    }
    for name, settings in SETTINGS.items():
        path = root / "settings/@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(settings))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        f"--port={port}",
    ]
    command += [
        f"--IdentityProvider.token={TOKEN}",
        f"--ServerApp.root_dir={work}",
        "--LabApp.expose_app_in_browser=True",
    ]
    with open(root / "lab.log", "w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for(f"{base}/api/status?token={TOKEN}", root / "lab.log")
        yield base, work
    finally:
        server.terminate()
        server.wait(30)


def wait_for(url: str, log: Path) -> None:
    for _ in range(2 * START_S):
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"JupyterLab did not start in {START_S} s:\n{log.read_text()[-3000:]}")


NOTEBOOK = "window.jupyterapp?.shell?.currentWidget"
IDLE = f"() => {NOTEBOOK}?.sessionContext?.session?.kernel?.status === 'idle'"
# JupyterLab asks a fresh kernel for its widgets; one that is made meanwhile can end up with two models, of which the
# kernel moves the one that is not shown. A reader is slower than that, so the test is, too.
RESTORED = f"""async () => {{
    const renderer = {NOTEBOOK}.content.rendermime.createRenderer('application/vnd.jupyter.widget-view+json');
    const manager = await renderer._manager?.promise;
    renderer.dispose();
    return manager ? manager.restoredStatus : true; }}"""
ERRORS = f"""() => {NOTEBOOK}.content.model.sharedModel.toJSON().cells.flatMap(cell =>
    (cell.outputs ?? []).filter(o => o.output_type === 'error' && !cell.metadata.tags?.includes('raises-exception'))
                        .map(o => o.ename + ': ' + o.evalue))"""


def run_all(page: Page, base: str, name: str) -> None:
    """Opens a notebook, runs every cell, and holds every cell to have ended without an error."""
    page.goto(f"{base}/lab/workspaces/{name.split('.')[0]}/tree/{name}?token={TOKEN}&reset")
    page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=RUN_MS)
    page.wait_for_function(IDLE, timeout=RUN_MS)
    deadline = time.monotonic() + START_S
    while not page.evaluate(RESTORED) and time.monotonic() < deadline:
        page.wait_for_timeout(200)
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
    page.wait_for_function(IDLE, timeout=RUN_MS)
    assert page.evaluate(ERRORS) == []
    page.wait_for_selector(CONTROLS, timeout=MOVE_MS)
    page.wait_for_function(DRAWN, timeout=MOVE_MS)


CONTROLS = ".jp-OutputArea-output .tm-scrub"
DRAWN = "() => [...document.querySelectorAll('.js-plotly-plot')].every(g => g.querySelector('.main-svg'))"
# The picture is what the output holds beside the controls; a plotly figure is read as data, not as pixels.
PICTURE = """controls => {
    const whole = controls.closest('.jp-OutputArea-output');
    const plots = [...whole.querySelectorAll('.js-plotly-plot')].map(g => JSON.stringify(g.data));
    const copy = whole.cloneNode(true);
    copy.querySelectorAll('.tm-scrub, .js-plotly-plot, style').forEach(node => node.remove());
    return plots + copy.innerHTML;
}"""


def drive(page: Page, nth: int, timeout: float = MOVE_MS) -> None:
    """Moves the nth live widget in every way a reader can; raises AssertionError where picture or caption stays."""
    controls = page.locator(CONTROLS).nth(nth)
    controls.scroll_into_view_if_needed()
    slider, caption = controls.get_by_role("slider"), controls.get_by_role("status")
    last = int(slider.get_attribute("max"))

    def moved(what: str, act, *, picture: bool) -> None:
        """After `act` the caption differs, and where neighbours cannot look alike the picture does, too."""
        before, drawn = caption.inner_text(), controls.evaluate(PICTURE)
        act()
        expect(caption, f"{what}: the caption stays").not_to_have_text(before, timeout=timeout)
        deadline = time.monotonic() + timeout / 1000
        while picture and controls.evaluate(PICTURE) == drawn:
            assert time.monotonic() < deadline, (
                f"{what}: the caption says {caption.inner_text()!r}, the picture stays"
            )
            page.wait_for_timeout(50)

    def drag() -> None:
        box = slider.bounding_box()
        middle, left = (
            box["y"] + box["height"] / 2,
            box["x"] + 8 + (box["width"] - 16) * int(slider.input_value()) / last,
        )
        page.mouse.move(left, middle)
        page.mouse.down()
        to = 0.25 if int(slider.input_value()) > last / 2 else 0.75
        page.mouse.move(box["x"] + box["width"] * to, middle, steps=8)
        page.mouse.up()

    moved("drag", drag, picture=True)
    slider.focus()
    moved("Home", lambda: page.keyboard.press("Home"), picture=True)
    moved("End", lambda: page.keyboard.press("End"), picture=True)
    moved("ArrowLeft", lambda: page.keyboard.press("ArrowLeft"), picture=False)
    moved("step back", controls.get_by_role("button", name="step back").click, picture=False)
    moved("play", controls.get_by_role("button", name="play", exact=True).click, picture=False)
    expect(slider).to_have_value(str(last), timeout=timeout)
    expect(controls.get_by_role("button", name="play", exact=True)).to_be_visible(timeout=timeout)


@pytest.mark.parametrize("name", ["probe.ipynb", *REAL])
def test_run_drag_keys_play(lab, visit, name):
    base, _ = lab
    seen = visit(base)
    run_all(seen.page, base, name)
    count = seen.page.locator(CONTROLS).count()
    for nth in range(count):
        drive(seen.page, nth)
    assert seen.page.evaluate(ERRORS) == []
    assert seen.external == []


def test_a_dead_slider_is_noticed(lab, visit):
    """The negative control: a widget that no longer hears its slider must fail the same drive."""
    base, _ = lab
    page = visit(base).page
    run_all(page, base, "dead.ipynb")
    with pytest.raises(AssertionError, match="drag: the caption stays"):
        drive(page, 1, timeout=4000)
    drive(page, 0)  # the other widget is alive: only the cut one was refused
