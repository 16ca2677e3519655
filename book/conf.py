"""The book: the notebooks as they are stored, read offline. `make book` builds it; nothing is executed here."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_ext"))

project = "tinymoe"
author = "the tinymoe authors"
language = "en"
extensions = ["myst_nb", "formulas", "results", "players", "sources", "sources"]
exclude_patterns = ["_build", "_ext", "results", "notebooks/solutions"]

nb_execution_mode = "off"  # the stored outputs are what strict nbval compares; the book shows the same bytes
nb_ipywidgets_js = {}  # live widgets need a kernel; the book draws their replays
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "colon_fence", "attrs_inline"]
myst_heading_anchors = 3
html_math_renderer = "mathml"

html_theme = "sphinx_book_theme"
html_title = "tinymoe"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_js_files = ["player.js"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "use_download_button": False,
    "use_fullscreen_button": False,
    "home_page_in_toc": False,
    "show_toc_level": 2,
    "navbar_start": [],  # the sidebar has the search already
    "navbar_center": [],
    "navbar_end": [],
    "navbar_persistent": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}


def without_chapters(app, docname, source):
    """Sphinx warns of a pattern that matches nothing, but the book also builds before the first notebook is written."""
    if docname == "index" and not any((HERE / "notebooks").glob("*.ipynb")):
        source[0] = source[0].replace("notebooks/*\n", "")


def setup(app):
    app.connect("source-read", without_chapters)
