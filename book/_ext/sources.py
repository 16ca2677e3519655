"""Links of a notebook to files of the repository become pages of the book: the source, highlighted, as it is today.

The notebooks lie outside the book and are linked into it, so Sphinx sees their neighbours under a path of their own:
links from notebook to notebook are brought home here, too.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

LEXERS = {".py": "python", ".js": "javascript", ".toml": "toml", ".json": "json"}
FOLDER = "source"


def repository() -> Path:
    spec = find_spec("tinymoe")
    if not spec or not spec.origin:
        raise RuntimeError("the book shows files of tinymoe, which is not installed: make book installs it")
    return Path(spec.origin).resolve().parents[1]


def rewrite(app: Sphinx, tree: nodes.document) -> None:
    """Runs before Sphinx collects downloads and resolves references."""
    env = app.env
    here, root, notebooks = env.docname, repository(), (Path(app.srcdir) / "notebooks").resolve()
    pages = env.metadata[here].setdefault("source_pages", "")
    for link in list(tree.findall(addnodes.download_reference)):
        path = Path(env.relfn2path(link["reftarget"], here)[1]).resolve()
        if path.suffix in LEXERS and path.is_relative_to(root):
            name = path.relative_to(root).as_posix()
            pages += f"{name}\n"
            env.note_dependency(str(path))  # its page must be made again when it changes
            uri = app.builder.get_relative_uri(here, f"{FOLDER}/{name}")
            link.replace_self(nodes.reference("", "", *link.children, refuri=uri, internal=True))
    env.metadata[here]["source_pages"] = pages
    for link in tree.findall(addnodes.pending_xref):
        target = Path(link.get("reftarget") or "")
        if link.get("refdomain") == "doc" and target.is_absolute() and target.is_relative_to(notebooks):
            link["reftarget"] = f"notebooks/{target.relative_to(notebooks).as_posix()}"


def collect(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """One page for each file that is linked from anywhere."""
    names = {name for data in app.env.metadata.values() for name in data.get("source_pages", "").splitlines()}
    for name in sorted(names):
        text = (repository() / name).read_text()
        lexer = LEXERS[Path(name).suffix]
        code = app.builder.highlighter.highlight_block(text, lexer, linenos="inline")  # type: ignore[attr-defined]
        body = f'<div class="source-page"><h1>{name}</h1>\n{code}</div>'
        yield f"{FOLDER}/{name}", {"title": name, "body": body, "parents": []}, "page.html"


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", rewrite, priority=100)
    app.connect("html-collect-pages", collect)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
