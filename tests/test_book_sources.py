"""Links from the book to files of the package: a page with the file's text, or a warning that fails the build."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CONF = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "book/_ext")!r}]
extensions = ["myst_parser", "sources"]
exclude_patterns = ["tinymoe"]
"""


def build(folder: Path, text: str) -> subprocess.CompletedProcess:
    (folder / "chapters").mkdir(exist_ok=True)
    if not (folder / "tinymoe").exists():  # as the real notebooks have it beside them
        (folder / "tinymoe").symlink_to(ROOT / "tinymoe")
    (folder / "conf.py").write_text(CONF)
    (folder / "index.md").write_text("# Book\n\n```{toctree}\nchapters/one\n```\n")
    (folder / "chapters/one.md").write_text(f"# One\n\n{text}\n")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(folder), str(folder / "out")]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=120)


def test_a_link_opens_the_text_of_the_file_also_when_nothing_is_read_anew(tmp_path):
    link = "Read [the `trace`](../tinymoe/core/trace.py)."
    for _ in range(2):
        done = build(tmp_path, link)
        assert done.returncode == 0, done.stderr
        html = (tmp_path / "out/chapters/one.html").read_text()
        assert 'href="../source/tinymoe/core/trace.py.html"' in html
        page = tmp_path / "out/source/tinymoe/core/trace.py.html"
        assert "class" in page.read_text()
        assert "SourceLine" in page.read_text()
        page.unlink()  # the second build reads no chapter again, and must still write it


@pytest.mark.parametrize("target", ["../tinymoe/core/gone.py", "../elsewhere/trace.py"])
def test_a_dead_link_fails_the_build(tmp_path, target):
    done = build(tmp_path, f"Read [it]({target}).")
    assert done.returncode != 0
    assert Path(target).name in done.stderr
