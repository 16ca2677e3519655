"""Links of the notebooks to files of the package, as in `[scheduler.py](../tinymoe/engine/scheduler.py)`.

In JupyterLab and on a code host they open the file. In the book they open a page with its text, as it was when the book
was built. A link to a file that does not exist is a warning, which fails the build.
"""

import re
from collections.abc import Iterator
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

logger = logging.getLogger(__name__)
TARGET = re.compile(r"(?:\.\./)+(tinymoe/[\w/-]+\.(?:py|js|json))")
LANGUAGES = {".py": "python", ".js": "javascript", ".json": "json"}


def text_of(path: str) -> str | None:
    """Text of tinymoe/..., wherever the book itself lies; None if there is no such file."""
    spec = find_spec("tinymoe")
    if not spec or not spec.origin:
        raise RuntimeError("the book needs the package tinymoe: make book installs it")
    file = Path(spec.origin).parent.parent / path
    return file.read_text(encoding="utf-8") if file.is_file() else None


class LinkSources(SphinxTransform):
    """Turns such links into references to the pages that `pages` makes; before MyST looks for a document."""

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        for node in list(self.document.findall(addnodes.pending_xref)):
            found = TARGET.fullmatch(node.get("reftarget", ""))
            if not found:
                continue
            path, docname = found[1], self.env.docname
            if text_of(path) is None:
                logger.warning("link to a file that does not exist: %s", path, location=node)
            else:
                self.env.metadata[docname].setdefault("sources", []).append(path)
            uri = f"{'../' * docname.count('/')}sources/{path}.html"
            node.replace_self(nodes.reference("", "", *node.children, refuri=uri, internal=True))


def pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each file that is linked to."""
    linked = {path for data in app.env.metadata.values() for path in data.get("sources", [])}
    for path in sorted(linked):
        text = text_of(path) or ""
        code = app.builder.highlighter.highlight_block(text, LANGUAGES[Path(path).suffix], linenos="inline")  # type: ignore
        yield f"sources/{path}", {"title": path, "body": f"<h1>{escape(path)}</h1>{code}"}, "page.html"


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(LinkSources)
    app.connect("html-collect-pages", pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
