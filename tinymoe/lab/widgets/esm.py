"""The ES modules of tinymoe/lab as anywidgets: the same files run in JupyterLab and, kernel-free, in the book."""

from importlib.resources import files
from typing import Any

import anywidget
import traitlets


def source(name: str) -> str:
    """Text of tinymoe/lab/<name>.js."""
    return files("tinymoe.lab").joinpath(f"{name}.js").read_text(encoding="utf-8")


class Deferred:
    """Mixin of a widget that reaches the browser only when `complete()` is called, in one message.

    JupyterLab asks the kernel for the state of all widgets when it connects, on a thread of its own. It would then see a
    widget that is still being made, and keep that state although newer messages came in between: a blank figure in half
    of the runs on a slow machine.
    """

    _complete = False

    def open(self) -> None:
        if self._complete:
            super().open()  # type: ignore[misc]

    def complete(self) -> None:
        self._complete = True
        self.open()


class Controls(Deferred, anywidget.AnyWidget):
    """scrubber.js. `at` is the moment shown, of `count`; `drawn` follows it when the kernel has drawn it.

    decisions: moments at which the engine decided something. why: [words, source line] pairs, and table: rows, are
    filled only while show_why and show_table are set.
    """

    _esm = source("scrubber")
    label = traitlets.Unicode().tag(sync=True)
    at = traitlets.Int(0).tag(sync=True)
    drawn = traitlets.Int(0).tag(sync=True)
    count = traitlets.Int(0).tag(sync=True)
    decisions = traitlets.List(traitlets.Int()).tag(sync=True)
    caption = traitlets.Unicode().tag(sync=True)
    live = traitlets.Bool(False).tag(sync=True)
    running = traitlets.Bool(False).tag(sync=True)
    show_why = traitlets.Bool(False).tag(sync=True)
    show_table = traitlets.Bool(False).tag(sync=True)
    why = traitlets.List().tag(sync=True)
    table = traitlets.List().tag(sync=True)

    @traitlets.validate("at")
    def _within(self, proposal: dict[str, Any]) -> int:
        """Beyond the ends it stops there, whoever sets it."""
        return max(0, min(self.count - 1, proposal["value"]))


class EsmPicture(anywidget.AnyWidget):
    """Draws `frame`; `selection` is what the reader clicked, for example "block 3" (see scrubber.clicked)."""

    frame = traitlets.Dict().tag(sync=True)
    selection = traitlets.Unicode().tag(sync=True)

    def draw(self, frame: dict[str, Any]) -> None:
        self.frame = frame


class PageTablePicture(EsmPicture):
    _esm = source("page_table")


class PrefixTreePicture(EsmPicture):
    _esm = source("prefix_tree")


class ScheduleChartPicture(EsmPicture):
    _esm = source("schedule_chart")


class DraftRibbonPicture(EsmPicture):
    _esm = source("draft_ribbon")
