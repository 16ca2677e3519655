"""The shell around every picture: replay a recording, or step and run the live engine, and say why.

Replay: `w.seek(i)` shows moment i, `w.text` is its caption, `w.next_decision()` jumps; the reader scrubs and plays.
Live: `w.step()` lets the engine run one step, `w.run()` keeps it running in an asyncio task until `w.pause()`. In
JupyterLab the buttons do the same.
"""

import asyncio
import operator
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import ipywidgets

from tinymoe.core.trace import Event, Recording
from tinymoe.lab.frames.view import Frame, View, last_by, last_change
from tinymoe.lab.frames.why import Reason, explain, source
from tinymoe.lab.widgets import replay
from tinymoe.lab.widgets.esm import Controls
from tinymoe.lab.widgets.live import Driver, Live, engine_of
from tinymoe.lab.widgets.plots import Drawing

MOST_REASONS = 8
CLICKS = ("block NUMBER", "seq NUMBER", "cell ROW EXPERT", "token STEP SEQ POSITION")


@dataclass
class Picture:
    """A view, its options, and the widget that draws its frames. `drawing` is set for plotly, `esm` for the others."""

    view: View
    label: str
    options: dict[str, Any] = field(default_factory=dict)
    make: Callable[[Frame], Any] = lambda frame: None
    esm: str = ""
    drawing: Drawing | None = None
    widget: Any = None

    def frame(self, events: Sequence[Event], i: int) -> Frame:
        return self.view.frame(events, i, **self.options)


def clicked(selection: str, *things: str) -> tuple[str, list[int]]:
    """ "cell 2 5" -> ("cell", [2, 5]). things: what may be clicked, with its numbers, as in "cell ROW EXPERT".

    Raises ValueError for anything else.
    """
    what, *numbers = selection.split()
    known = {thing.split()[0]: len(thing.split()) - 1 for thing in things}
    if known.get(what) != len(numbers) or not all(re.fullmatch(r"[0-9]+", n) for n in numbers):
        raise ValueError(f"selection must be one of {', '.join(things)}, got {selection!r}")
    return what, [int(n) for n in numbers]


def _idle(event: Event) -> bool:
    """A step of an engine that had nothing to do is no moment: a server may take thousands of them."""
    return event.kind == "step" and not (event.used or event.running or event.waiting)


class Scrubber(ipywidgets.VBox):
    """events: a recording to replay. live: an engine to step, or an LLM for its engine; its trace is recorded from now on, so make the widget
    before the first request. lock: shared by all who step this engine (default: the engine's own, or a new one).

    With several pictures there is one moment a step, else the moments of the picture's view.
    """

    def __init__(
        self,
        pictures: list[Picture],
        events: Sequence[Event] | None = None,
        *,
        live: Live | None = None,
        lock: AbstractContextManager | None = None,
        label: str | None = None,
    ):
        if (events is None) == (live is None):
            raise ValueError("give a recording to replay, or live=engine to step, and not both")
        if not isinstance(events, Sequence | None) or isinstance(events, str):
            raise TypeError(
                f"events must be a recording (a list of events), got {type(events).__name__}; an engine goes into live="
            )
        live = None if live is None else engine_of(live)
        self._pictures = pictures
        self._kinds = frozenset().union(*(p.view.KINDS for p in pictures))
        self._changes = frozenset().union(*(p.view.CHANGES for p in pictures))
        self._decisive = frozenset().union(*(p.view.DECISIONS for p in pictures))
        self._source: Sequence[Event] = live.trace.start() if live is not None else events or Recording()
        self._taken, self._events, self._moments = 0, [], []
        self._subject: tuple[str, list[int]] | None = None  # what the reader clicked
        self.controls = Controls(label=label or pictures[0].label, live=live is not None)
        self._take()
        for picture in pictures:
            picture.widget = picture.make(picture.frame(self._events, self._index))
            picture.widget.observe(self._clicked, "selection")
        self._driver = Driver(live, lock, self.controls, after=lambda: self.seek(-1))
        self.controls.caption = self.text
        self.controls.complete()
        self.controls.observe(lambda _: self._draw(), "at")
        self.controls.observe(lambda _: self._answer(), ["show_why", "show_table"])
        super().__init__([self.controls, *(p.widget for p in pictures)])

    # What is shown

    @property
    def moments(self) -> list[Event]:
        """The event that each moment shows; its `index` is the place in the recording."""
        return [self._shown(i) for i in self._moments]

    @property
    def frame(self) -> Frame:
        """The frame on show (of the first picture)."""
        return self._pictures[0].frame(self._events, self._index)

    @property
    def text(self) -> str:
        """The caption: the whole message of the picture in words."""
        return self._caption(self._index)

    @property
    def table(self) -> list[list]:
        """The same in rows; the first is the header."""
        return self._pictures[0].view.table(self.frame)

    def seek(self, i: int) -> None:
        """Show moment i; negative ones count from the end, as in a list. Beyond the ends it stops there.

        Raises TypeError if i is no integer.
        """
        try:
            i = operator.index(i)
        except TypeError:
            raise TypeError(f"seek takes the number of a moment (an int), got {i!r}") from None
        new, at = self._take(), self.controls.at
        self.controls.at = i + len(self._moments) if i < 0 else i
        if new and self.controls.at == at:  # no change is announced, yet this moment may be new or have grown
            self._draw()

    def next_decision(self) -> bool:
        """Go to the next moment at which the engine decided something; False if there is none."""
        ahead = [d for d in self.controls.decisions if d > self.controls.at]
        if ahead:
            self.seek(ahead[0])
        return bool(ahead)

    def why(self, *, seq: int | None = None, block: int | None = None) -> list[Reason]:
        """The rules behind this moment's events; with seq or block, behind the last events that name it."""
        return self._reasons(seq, block)

    # The engine

    def step(self) -> None:
        """Let the engine run one step, and show it. Raises RuntimeError in a replay."""
        self._driver.step()

    def run(self) -> asyncio.Task:
        """Step until all requests are finished, at most 8 steps a second, in a task of the running event loop."""
        return self._driver.run()

    def pause(self) -> None:
        """Let a running engine stop after the step it is in."""
        self.controls.running = False

    def _clicked(self, change: dict) -> None:
        if change["new"]:
            change["owner"].selection = ""  # so that the same cell can be asked again
            self._subject = clicked(change["new"], *CLICKS)
            self.controls.show_why = True
            self._answer()

    # Drawing

    @property
    def _index(self) -> int:
        return self._moments[self.controls.at] if self._moments else -1

    def _take(self) -> bool:
        """Read what the source has recorded since, and find the moments. Whether there was anything."""
        if self._taken == len(self._source) and self._taken:
            return False
        new = self._source[self._taken :]
        self._taken += len(new)
        self._events += [e for e in new if e.kind in self._kinds and not _idle(e)]
        first = self._pictures[0]
        if len(self._pictures) > 1:
            self._moments = last_by(self._events, self._kinds - {"arrive"}, lambda e: e.step)
        else:
            self._moments = first.view.moments(self._events, **first.options)
        self.controls.count = len(self._moments)
        self.controls.decisions = [
            n for n in range(len(self._moments)) if any(e.kind in self._decisive for e in self._during(n))
        ]
        return bool(new)

    def _shown(self, i: int) -> Event:
        return last_change(self._events, i, self._changes) or self._events[i]

    def _during(self, moment: int) -> list[Event]:
        """The events that led from the moment before to this one."""
        start = self._moments[moment - 1] + 1 if moment else 0
        return self._events[start : self._moments[moment] + 1]

    def _draw(self) -> None:
        self._subject = None
        for picture in self._pictures:
            picture.widget.draw(picture.frame(self._events, self._index))
        self.controls.caption = self.text
        self._answer()
        self.controls.drawn = self.controls.at

    def _caption(self, i: int) -> str:
        return " ".join(p.view.caption(p.frame(self._events, i)) for p in self._pictures)

    def _answer(self) -> None:
        """Fill what the reader has opened."""
        if self.controls.show_table:
            self.controls.table = self.table
        if self.controls.show_why:
            what, numbers = self._subject or ("", [])
            if what == "cell":
                reasons = self._reasons_of_cell(*numbers)
            elif what == "token":
                reasons = self._reasons_of_token(*numbers)
            else:
                reasons = self._reasons(**({what: numbers[0]} if what else {}))
            self.controls.why = [[r.words, source(r.src)] for r in reasons]

    def _reasons(self, seq: int | None = None, block: int | None = None) -> list[Reason]:
        if not self._moments:
            return []
        during = self._during(self.controls.at)
        if seq is None and block is None:
            decisive = [e for e in during if e.kind in self._decisive]
            changed = [e for e in during if e.kind in self._changes]
            return explain((decisive or changed or [self._shown(self._index)])[-MOST_REASONS:])
        found = explain(during, seq=seq, block=block)
        return (found or explain(self._events[: self._index + 1], seq=seq, block=block))[-MOST_REASONS:]

    def _reasons_of_cell(self, row: int, expert: int) -> list[Reason]:
        rows = self.frame["rows"]
        if row >= len(rows):
            return []
        layer = int(rows[row].removeprefix("layer "))
        seen = self._events[: self._index + 1]
        return explain(
            [e for e in seen if e.kind == "route" and e.layer == layer and expert in e.experts][
                -MOST_REASONS:
            ]
        )

    def _reasons_of_token(self, step: int, seq: int, position: int) -> list[Reason]:
        seen = [e for e in self._events[: self._index + 1] if e.step == step]
        return explain([e for e in seen if e.data.get("position") == position], seq=seq)

    # Without a kernel

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The live view, a replay that needs no kernel, and the caption as text."""
        shown: Any = super()._repr_mimebundle_(**kwargs)  # anywidget adds metadata, ipywidgets does not
        bundle: dict[str, Any] = dict(shown[0] if isinstance(shown, tuple) else shown or {})
        if self._take():
            self._draw()
        bundle["text/plain"] = self.text
        indices = self._moments or [-1]
        parts = []
        for picture in self._pictures:
            frames = [picture.frame(self._events, i) for i in indices]
            captions = [picture.view.caption(f) for f in frames]
            if picture.drawing is not None:
                bundle[replay.PLOTLY] = replay.plotly_bundle(
                    picture.drawing, frames, captions, self.controls.at
                )
            else:
                tables = [picture.view.table(f) for f in frames]
                parts.append(
                    {
                        "esm": picture.esm,
                        "label": picture.label,
                        "frames": frames,
                        "captions": captions,
                        "tables": tables,
                    }
                )
        if parts:
            bundle[replay.REPLAY] = replay.packed(replay.esm_bundle(parts, self.controls.at))
        return bundle
