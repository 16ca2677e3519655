"""What the replays of the book run on: plotly's script and our own widget modules, copied when the book is built.

The modules go into one plain script, since a browser refuses to import modules from a file:// page, and the book must
open with a double click.
"""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

from sphinx.application import Sphinx


def package_folder(name: str) -> Path:
    spec = find_spec(name)
    if not spec or not spec.origin:
        raise RuntimeError(f"the book needs the package {name}: make book installs it")
    return Path(spec.origin).parent


def copy_scripts(app: Sphinx, error: Exception | None) -> None:
    if error or app.builder.format != "html":
        return
    static = Path(app.outdir) / "_static"
    plotly = package_folder("plotly") / "package_data" / "plotly.min.js"
    target = static / plotly.name
    if not target.exists() or target.stat().st_size != plotly.stat().st_size:
        shutil.copyfile(plotly, target)
    modules = {p.stem: p.read_text() for p in sorted((package_folder("tinymoe") / "lab").glob("**/*.js"))}
    (static / "widgets.js").write_text(f"window.tinymoeWidgets = {json.dumps(modules)};\n")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", copy_scripts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
