"""Notebooks in JupyterLab, as a reader uses them: run all, drag, keys, step, play; no error, and no request leaves.

The real notebooks are driven, and a probe made here, which shows that the harness itself can pass and can fail.
"""

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
    p.name for number in ("00", "02", "09") for p in sorted((ROOT / "notebooks").glob(f"{number}_*.ipynb"))
]
TOKEN = "e2e"
START_S, RUN_MS, MOVE_MS = 90, 180_000, 20_000
FOLDERS = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")

PROBE = '''
import ipywidgets as W

class Probe(W.VBox):
    """Buttons, slider, picture and caption under the names that the real widgets use."""

    def __init__(self, frames):
        self.frames = frames
        last = len(frames) - 1
        self.slider = W.IntSlider(min=0, max=last, description="step")
        self.play = W.Play(min=0, max=last, value=0, interval=100)
        back = W.Button(description="step back")
        self.picture, self.caption = W.HTML(), W.HTML()
        W.jslink((self.play, "value"), (self.slider, "value"))
        back.on_click(lambda _: setattr(self.slider, "value", self.slider.value - 1))
        self.slider.observe(lambda change: self.show(change["new"]), names="value")
        self.picture.add_class("tinymoe-picture")
        super().__init__([W.HBox([back, self.play, self.slider]), self.picture, self.caption])
        self.add_class("tinymoe-widget")
        self.show(0)

    def show(self, i):
        self.picture.value = "<svg width='200' height='20'><rect height='20' width='%d'/></svg>" % self.frames[i]
        self.caption.value = f"<span role='status'>step {i}: {self.frames[i]}</span>"

widget = Probe([5, 50, 20, 120, 80, 60, 10, 150, 30, 90])
'''
DEAD = "widget.slider.unobserve_all()"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """(server, folder of the notebooks): JupyterLab on loopback with settings of its own, no news, a copy of the work."""
    root = tmp_path_factory.mktemp("lab")
    work = shutil.copytree(ROOT / "notebooks", root / "notebooks")
    for name, cells in {"probe": [PROBE, "widget"], "dead": [PROBE, DEAD, "widget"]}.items():
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
    news = root / "settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text('{"fetchNews": "false", "checkForUpdates": false}')
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
ERRORS = f"""() => {NOTEBOOK}.content.model.sharedModel.toJSON().cells.flatMap(cell =>
    (cell.outputs ?? []).filter(o => o.output_type === 'error' && !cell.metadata.tags?.includes('raises-exception'))
                        .map(o => o.ename + ': ' + o.evalue))"""


def run_all(page: Page, base: str, name: str) -> None:
    """Opens a notebook, runs every cell, and holds every cell to have ended without an error."""
    page.goto(f"{base}/lab/workspaces/{name.split('.')[0]}/tree/{name}?token={TOKEN}&reset")
    page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=RUN_MS)
    page.wait_for_function(IDLE, timeout=RUN_MS)
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
    page.wait_for_function(IDLE, timeout=RUN_MS)
    assert page.evaluate(ERRORS) == []
    page.wait_for_selector(".jp-OutputArea .tinymoe-widget", timeout=MOVE_MS)


def drive(page: Page, timeout: float = MOVE_MS) -> None:
    """Moves the first live widget in every way it can be moved; raises AssertionError where picture or caption stays."""
    widget = page.locator(".jp-OutputArea .tinymoe-widget").first
    widget.scroll_into_view_if_needed()
    slider, caption = widget.get_by_role("slider").first, widget.get_by_role("status").first
    picture = widget.locator(".tinymoe-picture").first
    last = slider.get_attribute("aria-valuemax") or slider.get_attribute("max")

    def content() -> str:
        return picture.evaluate(
            "p => [...p.querySelectorAll('.js-plotly-plot')].map(g => JSON.stringify(g.data)) + p.innerHTML"
        )

    def moved(act) -> None:
        before, drawn = caption.inner_text(), content()
        act()
        expect(caption).not_to_have_text(before, timeout=timeout)
        deadline = time.monotonic() + timeout / 1000
        while content() == drawn:
            assert time.monotonic() < deadline, (
                f"the caption says {caption.inner_text()!r}, but the picture stays"
            )
            page.wait_for_timeout(50)

    def drag() -> None:
        track = slider.locator(
            "xpath=ancestor-or-self::*[contains(@class, 'noUi-target') or self::input][1]"
        ).bounding_box()
        thumb = slider.bounding_box()
        middle = thumb["y"] + thumb["height"] / 2
        start = thumb["x"] + thumb["width"] / 2 if thumb["width"] < track["width"] / 2 else track["x"] + 8
        page.mouse.move(start, middle)
        page.mouse.down()
        page.mouse.move(track["x"] + track["width"] * 0.6, middle, steps=8)
        page.mouse.up()

    moved(drag)
    slider.focus()
    moved(lambda: page.keyboard.press("ArrowLeft"))
    moved(widget.get_by_role("button", name="step back").first.click)
    moved(widget.locator(".widget-play button, button[aria-label=play]").first.click)
    for name in ("aria-valuenow",):
        expect(slider).to_have_attribute(name, f"{float(last):.1f}", timeout=60_000)


@pytest.mark.parametrize("name", ["probe.ipynb", *REAL])
def test_run_drag_keys_play(lab, visit, name):
    base, _ = lab
    seen = visit(base)
    run_all(seen.page, base, name)
    drive(seen.page)
    assert seen.page.evaluate(ERRORS) == []
    assert seen.external == []


def test_a_dead_slider_is_noticed(lab, visit):
    """The negative control: a widget that no longer hears its slider must fail the same drive."""
    base, _ = lab
    page = visit(base).page
    run_all(page, base, "dead.ipynb")
    with pytest.raises(AssertionError):
        drive(page, timeout=4000)
