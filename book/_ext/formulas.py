"""Formulas as MathML: drawn by the browser itself, read aloud by screen readers, no script and no network.

latex2mathml translates; STIX Two Math, the font that good spacing needs, comes with the package ziamath and is copied
into the built book.
"""

import re
import shutil
import unicodedata
from importlib.util import find_spec
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging

FONT = Path("fonts") / "STIXTwoMath-Regular.ttf"
VARIANT = re.compile(r'<(m[ino]|mtext) mathvariant="(bold|monospace|sans-serif)">([A-Za-z0-9])</\1>')
# What latex2mathml leaves when it does not know a command or an environment.
UNTRANSLATED = re.compile(r'\\|<mi>&(amp;)?</mi>|linebreak="newline"')
logger = logging.getLogger(__name__)


def styled(match: re.Match[str]) -> str:
    """Browsers ignore mathvariant="bold" and the like; Unicode has these letters as characters of their own."""
    tag, variant, letter = match.groups()
    kind = "DIGIT" if letter.isdigit() else "CAPITAL" if letter.isupper() else "SMALL"
    name = unicodedata.name(letter).split()[-1]
    return f"<{tag}>{unicodedata.lookup(f'MATHEMATICAL {variant.upper()} {kind} {name}')}</{tag}>"


def mathml(latex: str, *, block: bool, node: nodes.Node) -> str:
    """The <math> element. Warns, which fails the build, where something was left untranslated."""
    known = latex.replace("{aligned}", "{align*}")
    element = VARIANT.sub(styled, convert(known, display="block" if block else "inline"))
    if UNTRANSLATED.search(element):
        logger.warning("a part of this formula has no MathML form: %s", latex, location=node)
    return element


def visit_inline(self, node: nodes.math) -> None:
    self.body.append(mathml(node.astext(), block=False, node=node))
    raise nodes.SkipNode


def visit_block(self, node: nodes.math_block) -> None:
    self.body.append(self.starttag(node, "div", CLASS="formula"))
    self.body.append(mathml(node.astext(), block=True, node=node))
    if node.get("number"):
        self.body.append(f'<span class="eqno">({node["number"]})</span>')
    self.body.append("</div>\n")
    raise nodes.SkipNode


def copy_font(app: Sphinx, error: Exception | None) -> None:
    spec = find_spec("ziamath")
    if error or app.builder.format != "html" or not spec or not spec.origin:
        return
    target = Path(app.outdir) / "_static" / FONT.name
    if not target.exists():
        shutil.copyfile(Path(spec.origin).parent / FONT, target)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    app.connect("build-finished", copy_font)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
