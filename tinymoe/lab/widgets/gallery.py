"""The widgets by name. Each takes a recording, or live=engine; the rest of the keywords are the options of its view."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from tinymoe.core.trace import Event
from tinymoe.lab.frames import flow, load, pages, prefix
from tinymoe.lab.frames.steps import drafts, schedule
from tinymoe.lab.widgets.esm import (
    DraftRibbonPicture,
    PageTablePicture,
    PrefixTreePicture,
    ScheduleChartPicture,
)
from tinymoe.lab.widgets.live import engine_of
from tinymoe.lab.widgets.plots import Drawing, FlowRibbons, LoadMap, PlotPicture
from tinymoe.lab.widgets.scrubber import Live, Picture, Scrubber

Events = Sequence[Event] | None
Lock = AbstractContextManager | None


def _plot(view: Any, drawing: Drawing, options: dict[str, Any]) -> Picture:
    return Picture(view, drawing.label, options, make=lambda f: PlotPicture(drawing, f), drawing=drawing)


def _load(live: Any, per: str, experts: int | None) -> Picture:
    known = experts or _of(live, "routes", "load", "shape", default=(0, None))[1]
    return _plot(load, LoadMap(), {"per": per, "experts": known})


def _pages(live: Any, num_blocks: int | None, block_size: int | None, every: str) -> Picture:
    options = {
        "num_blocks": num_blocks or _of(live, "blocks", "pool", "num_blocks"),
        "block_size": block_size or _of(live, "blocks", "block_size"),
        "every": every,
    }
    return Picture(pages, "page table", options, make=lambda f: PageTablePicture(frame=f), esm="page_table")


def _prefix(every: str) -> Picture:
    return Picture(
        prefix, "prefix tree", {"every": every}, make=lambda f: PrefixTreePicture(frame=f), esm="prefix_tree"
    )


def _schedule(window: int) -> Picture:
    make = ScheduleChartPicture
    return Picture(
        schedule, "schedule", {"window": window}, make=lambda f: make(frame=f), esm="schedule_chart"
    )


def _drafts(window: int, words: Callable[[int], str] | None) -> Picture:
    options = {"window": window, "words": words}
    make = DraftRibbonPicture
    return Picture(drafts, "draft ribbon", options, make=lambda f: make(frame=f), esm="draft_ribbon")


def _of(live: Any, *names: str, default: Any = None) -> Any:
    """engine.a.b.c, or the default where an attribute is missing: engines differ, options can be given by hand."""
    thing = None if live is None else engine_of(live)
    for name in names:
        thing = getattr(thing, name, None)
        if thing is None:
            return default
    return thing


class ExpertLoad(Scrubber):
    """W1, layer × expert heat map, one moment a step. per: "run" (so far) or "step"; experts: how many there are."""

    def __init__(
        self,
        events: Events = None,
        *,
        live: Live | None = None,
        lock: Lock = None,
        per: str = "run",
        experts: int | None = None,
    ):
        super().__init__([_load(live, per, experts)], events, live=live, lock=lock)


class TokenFlow(Scrubber):
    """W2, tokens to experts, one moment for each step and layer (or for each step of one `layer`).

    limit: tokens drawn at most. words: text of token (seq, position).
    """

    def __init__(
        self,
        events: Events = None,
        *,
        live: Live | None = None,
        lock: Lock = None,
        layer: int | None = None,
        limit: int = flow.MOST_TOKENS,
        words: Mapping[tuple[int, int], str] | None = None,
    ):
        options = {"layer": layer, "limit": limit, "words": words}
        super().__init__([_plot(flow, FlowRibbons(), options)], events, live=live, lock=lock)


class PageTable(Scrubber):
    """W3, all blocks with owners and each sequence's table; one moment for every="event" or every="step".

    num_blocks and block_size: those of the engine; a recording does not hold them (a live engine is asked).
    """

    def __init__(
        self,
        events: Events = None,
        *,
        live: Live | None = None,
        lock: Lock = None,
        num_blocks: int | None = None,
        block_size: int | None = None,
        every: str = "event",
    ):
        super().__init__([_pages(live, num_blocks, block_size, every)], events, live=live, lock=lock)


class PrefixTree(Scrubber):
    """W5, the prefix index; one moment for every="event" or every="step"."""

    def __init__(
        self, events: Events = None, *, live: Live | None = None, lock: Lock = None, every: str = "event"
    ):
        super().__init__([_prefix(every)], events, live=live, lock=lock)


class ScheduleChart(Scrubber):
    """W6, sequences × steps, the last `window` steps; one moment a step."""

    def __init__(
        self, events: Events = None, *, live: Live | None = None, lock: Lock = None, window: int = 32
    ):
        super().__init__([_schedule(window)], events, live=live, lock=lock)


class DraftRibbon(Scrubber):
    """W8, what was drafted in each step, what stayed and what was redrawn, the last `window` rows; one moment a step.

    words: text of a token; without it the tokens' numbers are shown.
    """

    def __init__(
        self,
        events: Events = None,
        *,
        live: Live | None = None,
        lock: Lock = None,
        window: int = drafts.WINDOW,
        words: Callable[[int], str] | None = None,
    ):
        super().__init__([_drafts(window, words)], events, live=live, lock=lock)


class Strip(Scrubber):
    """Several pictures under one set of controls, one moment a step.

    show: of "schedule", "pages", "prefix", "load", "drafts". words: text of a token, for the drafts.
    """

    def __init__(
        self,
        events: Events = None,
        *,
        live: Live | None = None,
        lock: Lock = None,
        show: Sequence[str] = ("schedule", "pages"),
        num_blocks: int | None = None,
        block_size: int | None = None,
        experts: int | None = None,
        words: Callable[[int], str] | None = None,
    ):
        makers = {
            "schedule": lambda: _schedule(32),
            "pages": lambda: _pages(live, num_blocks, block_size, "step"),
            "prefix": lambda: _prefix("step"),
            "load": lambda: _load(live, "run", experts),
            "drafts": lambda: _drafts(drafts.WINDOW, words),
        }
        unknown = [name for name in show if name not in makers]
        if unknown or not show:
            raise ValueError(f"show must name pictures of {tuple(makers)}, got {tuple(show)}")
        super().__init__([makers[name]() for name in show], events, live=live, lock=lock, label="engine")
