"""The book's side of a live widget: MyST-NB renders its replay, so that the picture moves without a kernel.

A widget's output carries, beside its live view, a bundle of type REPLAY:

    {"schema": 1,
     "esm": "page_table",        the module tinymoe/lab/page_table.js, the same one that draws it in JupyterLab
     "label": "page table",      what the picture is, for its accessible name
     "frames": [...],            what the picture shows at each moment, as tinymoe.lab.frames makes them
     "captions": ["...", ...],   the same in words, one for each frame
     "tables": [[[...]]],        optional: the same in rows, the first row is the header
     "traits": {...}}            optional: further traits that the module reads

The module exports `default {render({model, el})}`, draws `model.get("frame")`, and draws again on "change:frame". The
book gives it a model that holds the traits and that frame, and puts its own controls, caption and table around it.
"""

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from docutils import nodes

REPLAY = "application/vnd.tinymoe.replay+json"
PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"


class Replays:
    """A mime renderer of MyST-NB (entry point `myst_nb.mime_renderers`): replays first, no live widgets."""

    mime_priority_overrides: ClassVar[Sequence[tuple[str, str, int | None]]] = (
        ("html", REPLAY, 1),
        ("html", PLOTLY, 2),
        ("html", WIDGET, None),
    )

    @staticmethod
    def handle_mime(renderer: Any, data: Any, inline: bool) -> list[nodes.Element] | None:
        """The nodes of a replay or a plotly figure; None for what MyST-NB renders itself."""
        if inline or data.mime_type not in (REPLAY, PLOTLY):
            return None
        content = json.loads(data.content) if isinstance(data.content, str) else data.content
        kind = "replay" if data.mime_type == REPLAY else "plotly"
        return [nodes.raw("", player_html(kind, content), format="html")]


def player_html(kind: str, content: dict[str, Any]) -> str:
    """A div that book/_static/player.js brings to life; `<` is escaped so that no text can end the script element."""
    body = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    return f'<div class="player player-{kind}"><script type="application/json">{body}</script></div>'
