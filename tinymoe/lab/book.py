"""The book's side of a live widget: MyST-NB renders its replay, so that the picture moves without a kernel.

A widget leaves a bundle (tinymoe.lab.widgets.replay says what is in it) that names one of the ES modules of tinymoe/lab,
the same one that draws the picture in JupyterLab. The module exports `default {render({model, el})}`, draws
`model.get("frame")`, and draws again on "change:frame". The book gives it a model that holds one frame after the other,
and puts controls, caption and table around it (book/_static/player.js).
"""

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from docutils import nodes

from tinymoe.lab.widgets.replay import PLOTLY, REPLAY

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
