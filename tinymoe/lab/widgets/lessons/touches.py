"""Touch map: which elements of its tensors each program of a kernel loads and stores.

Nothing is worked out here: every box that changes is an access that `watched` saw while Triton's interpreter ran the
kernel. Cells are drawn by cell_map.js.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from tinymoe.core.trace import Event, Recording
from tinymoe.lab.frames.view import Events, Frame, count, last_by, listed
from tinymoe.lab.frames.why import Reason
from tinymoe.lab.widgets.lessons.grouping import CellPicture
from tinymoe.lab.widgets.lessons.watch import Touch, program_name
from tinymoe.lab.widgets.scrubber import Picture, Scrubber

KINDS = frozenset({"touch", "program"})
SRC = "tinymoe.lab.widgets.lessons.watch:watched#note"
WIDE, HIGH, LETTER, LABEL = 24, 22, 8, 26  # pixels: a box, a letter more in it, and beside a row
VERBS = {"load": "loads", "store": "stores", "atomic": "changes"}


def extent(elements: Sequence[int], shape: Sequence[int]) -> str:
    """ "3", "0 to 7", "row 2, columns 0 to 3"; what has no such form is counted."""
    found = sorted(set(elements))
    if not found:
        return "nothing"
    axes = [sorted(set(axis.tolist())) for axis in np.unravel_index(found, shape)]
    if any(axis != list(range(axis[0], axis[-1] + 1)) for axis in axes) or np.prod(
        [len(a) for a in axes]
    ) != len(found):
        return count(len(found), "element")
    spans = [str(a[0]) if len(a) == 1 else f"{a[0]} to {a[-1]}" for a in axes]
    if len(spans) != 2:
        return ", ".join(spans)
    words = [("row", axes[0]), ("column", axes[1])]
    return ", ".join(
        f"{word}{'' if len(axis) == 1 else 's'} {span}" for (word, axis), span in zip(words, spans)
    )


class TouchView:
    """The view of `events()`. shapes: of each tensor by name, one or two axes. A frame is what cell_map.js draws; a box says
    how often an element has been loaded, or which program stored it."""

    KINDS = KINDS
    CHANGES = frozenset({"touch"})
    DECISIONS = frozenset({"program"})

    def __init__(self, touches: Sequence[Touch], shapes: Mapping[str, Sequence[int]], every: str):
        self.touches, self.shapes, self.every = list(touches), {k: list(v) for k, v in shapes.items()}, every
        self.programs = list(dict.fromkeys((t.launch, t.program) for t in touches))
        widest = max(
            len(self._short(t.program)) for t in touches if t.kind != "load" or len(self.programs) == 1
        )
        self.size = [WIDE + LETTER * max(0, widest - 2), HIGH]

    def events(self) -> Recording:
        """ "program" before the first access of each, then a "touch" for each access; step: which program it is."""
        found, before = Recording(), None
        for n, touch in enumerate(self.touches):
            step = self.programs.index((touch.launch, touch.program))
            if step != before:
                found.append(Event(len(found), step, "program", SRC, {}))
            found.append(Event(len(found), step, "touch", SRC, {"n": n}))
            before = step
        return found

    def moments(self, events: Events, **_) -> list[int]:
        return last_by(events, self.CHANGES, lambda e: e.step if self.every == "program" else e.index)

    def frame(self, events: Events, i: int, **_) -> Frame:
        shown = [e for e in events[: i + 1] if e.kind == "touch"]
        last = shown[-1]
        first = next(e.n for e in shown if e.step == last.step) if self.every == "program" else last.n
        past, now = self.touches[: last.n + 1], self.touches[first : last.n + 1]
        return {
            "event": last.index,
            "step": last.step,
            "now": [first, last.n],
            "label": f"program {program_name(now[-1].program)}",
            "size": self.size,
            "panels": [self._panel(name, shape, past, now) for name, shape in self.shapes.items()],
            "key": [
                ["n", "loaded now"],
                ["s", "stored now"],
                ["d", "touched before"],
                ["r", "masked off"],
                ["!", "stored by two programs"],
            ],
        }

    def _panel(self, name: str, shape: list[int], past: list[Touch], now: list[Touch]) -> dict:
        size = int(np.prod(shape))
        loads, owners, kinds = [0] * size, [[] for _ in range(size)], ["."] * size
        for touch in (t for t in past if t.name == name):
            for n in touch.elements:
                kinds[n] = "d"
                if touch.kind == "load":
                    loads[n] += 1
                elif (touch.launch, touch.program) not in owners[n]:
                    owners[n].append((touch.launch, touch.program))
        for touch in (t for t in now if t.name == name):
            for n in touch.elements:
                kinds[n] = "n" if touch.kind == "load" else "s"
        cells = [
            f"{'!' if len(owner) > 1 else kind}{self._short(owner[-1][1]) if owner else times or ''}"
            for kind, owner, times in zip(kinds, owners, loads)
        ]
        wide = shape[-1]
        rows = [
            ["" if len(shape) == 1 else str(r), cells[r * wide : (r + 1) * wide]] for r in range(size // wide)
        ]
        if len(shape) == 1:
            off = {n for t in past if t.name == name for n in t.off if n >= size}
            rows[0][1] = rows[0][1] + ["r"] * (max(off, default=size - 1) + 1 - size)
        return {"title": f"{name} {shape}", "label": 0 if len(shape) == 1 else LABEL, "rows": rows}

    @staticmethod
    def _short(program: Sequence[int]) -> str:
        return ",".join(map(str, program))

    def caption(self, frame: Frame) -> str:
        first, last = frame["now"]
        now, past = self.touches[first : last + 1], self.touches[: last + 1]
        parts = []
        for kind in ("load", "store", "atomic"):
            mine: dict[str, list[int]] = {}
            for t in (t for t in now if t.kind == kind):
                mine.setdefault(t.name, []).extend(t.elements)
            if mine:
                sep = " " if all(len(self.shapes[n]) == 1 for n in mine) else ", "
                parts.append(
                    f"{VERBS[kind]} {listed([n + sep + extent(e, self.shapes[n]) for n, e in mine.items()])}"
                )
        said = f"Program {program_name(now[-1].program)} {', '.join(parts)}."
        off = {(len(t.off), len(t.off) + len(t.elements)) for t in now if t.off}
        if len(off) == 1:
            [(idle, lanes)] = off
            said += f" {idle} of {lanes} lanes are masked off{' each time' if len(now) > 1 else ''}."
        elif off:
            said += " Some lanes are masked off."
        loaded, stored = (
            sum(len(t.elements) for t in past if (t.kind == "load") == load) for load in (True, False)
        )
        return f"{said} So far {loaded} loaded, {stored} stored."

    def table(self, frame: Frame) -> list[list]:
        """The accesses of this moment."""
        first, last = frame["now"]
        rows: list[list] = [["program", "access", "tensor", "elements", "lanes masked off"]]
        for t in self.touches[first : last + 1]:
            rows.append(
                [program_name(t.program), t.kind, t.name, extent(t.elements, self.shapes[t.name]), len(t.off)]
            )
        return rows


class TouchMap(Scrubber):
    """touches: what `watched` saw. shapes: of the tensors to draw, by name. every: a moment is a "program" or an "access".

    Raises ValueError if nothing was seen, or a tensor that was touched has no shape.
    """

    def __init__(
        self, touches: Sequence[Touch], shapes: Mapping[str, Sequence[int]], *, every: str = "program"
    ):
        if every not in ("program", "access"):
            raise ValueError(f'every must be "program" or "access", got {every!r}')
        if not touches:
            raise ValueError("no access was seen: run the kernel while it is being watched")
        if unknown := {t.name for t in touches} - set(shapes):
            raise ValueError(f"give the shape of {', '.join(sorted(unknown))}, too")
        view = TouchView(touches, shapes, every)
        picture = Picture(view, "touch map", make=lambda f: CellPicture(frame=f), esm="cell_map")
        super().__init__([picture], view.events())

    def _reasons(self, seq: int | None = None, block: int | None = None) -> list[Reason]:
        first, last = self.frame["now"]
        said = {
            "load": "The program computed these addresses from its number, and no mask holds them back.",
            "store": "What a program stores, only it may store: programs run in any order, and at the same time.",
            "atomic": "An atomic operation may meet those of other programs, in any order.",
        }
        kinds = dict.fromkeys(t.kind for t in self._touches(first, last))
        return [Reason(said[kind], SRC) for kind in kinds]

    def _touches(self, first: int, last: int) -> list[Touch]:
        view = self._pictures[0].view
        assert isinstance(view, TouchView)
        return view.touches[first : last + 1]
