"""W11, roofline dot: a whole step of a model and of its dense twin, on the roofline of a machine, as the tokens grow."""

from collections.abc import Mapping, Sequence
from typing import Any

from tinymoe.core.trace import Event, Recording
from tinymoe.lab.frames.view import Events, Frame, count
from tinymoe.lab.frames.why import Reason
from tinymoe.lab.widgets.lessons.payoff.step import Machine, StepCost
from tinymoe.lab.widgets.plots import OKABE_ITO, PlotPicture, base_layout
from tinymoe.lab.widgets.scrubber import Picture, Scrubber

KINDS = frozenset({"tokens", "limit"})
SRC = "tinymoe.lab.widgets.lessons.payoff.step:StepCost.seconds#longer-of-two"
SYMBOLS = ("circle", "square-open", "diamond-open", "cross-open")  # models may lie on one another


class RooflineView:
    """A moment is a number of tokens in the step. A frame: tokens; dots, one a model: [name, experts visited in a layer (in
    tenths, -1 without experts), experts there are, MB of weights, microseconds, whether memory decides, intensity, TFLOP/s
    (both in hundredths)]; paths: for each model the [intensity, TFLOP/s] of every moment so far; roof: [[intensity, TFLOP/s], ...]
    """

    KINDS = KINDS
    CHANGES = frozenset({"tokens"})
    DECISIONS = frozenset({"limit"})

    def __init__(self, models: Mapping[str, StepCost], machine: Machine, tokens: Sequence[int]):
        self.models, self.machine, self.tokens = dict(models), machine, list(tokens)
        self._dots = [[self._dot(name, n) for name in self.models] for n in self.tokens]
        ridge, peak = machine.peak / machine.bandwidth, _hundredths(machine.peak / 1e12)
        self.roof = [[50, _hundredths(machine.bandwidth / 2e12)], [_hundredths(ridge), peak], [300_000, peak]]

    def _dot(self, name: str, n: int) -> list:
        cost = self.models[name]
        moved, operations, seconds = cost.moved(n), cost.operations(n), cost.seconds(n, self.machine)
        visited = round(10 * cost.visits(n)) if cost.experts else -1
        reading = int(moved / self.machine.bandwidth >= operations / self.machine.peak)
        at = [_hundredths(operations / moved), _hundredths(operations / seconds / 1e12)]
        return [name, visited, cost.experts, round(cost.weights(n) / 1e6), round(seconds * 1e6), reading, *at]

    def moments(self, events: Events, **_) -> list[int]:
        return [i for i, e in enumerate(events) if e.kind == "tokens"]

    def frame(self, events: Events, i: int, **_) -> Frame:
        at = [e for e in events[: i + 1] if e.kind == "tokens"][-1]
        place = self.tokens.index(at.tokens)
        paths = [[dots[m][6:] for dots in self._dots[: place + 1]] for m in range(len(self.models))]
        first = [dot[4] for dot in self._dots[0]]
        return {
            "event": at.index, "step": at.step, "tokens": at.tokens, "dots": self._dots[place], "first": first,
            "paths": paths, "roof": self.roof,
        }  # fmt: skip

    def turns(self) -> Recording:
        """Every number of tokens; "limit" says that for some model multiplying begins to take longer than reading."""
        found, before = Recording(), None
        for step, (n, dots) in enumerate(zip(self.tokens, self._dots)):
            limits = [dot[5] for dot in dots]
            for kind in ("limit", "tokens") if before not in (None, limits) else ("tokens",):
                found.append(Event(len(found), step, kind, SRC, {"tokens": n}))
            before = limits
        return found

    def caption(self, frame: Frame) -> str:
        said = []
        for dot, first in zip(frame["dots"], frame["first"]):
            name, visited, experts, megabytes, us, reading, *_ = dot
            who = f"{visited // 10}.{visited % 10} of {experts} experts, " if experts else ""
            times = f"{10 * us // first // 10}.{10 * us // first % 10} times one token's"
            limit = "reading" if reading else "multiplying"
            said.append(
                f"{name}: {who}{_grouped(megabytes)} MB of weights, {limit} takes {_grouped(us)} µs, {times}"
            )
        return f"{count(frame['tokens'], 'token')}. {'; '.join(said)}."

    def table(self, frame: Frame) -> list[list]:
        rows: list[list] = [["model", "experts visited", "of", "MB of weights", "µs", "limit", "TFLOP/s"]]
        for name, visited, experts, megabytes, us, reading, _, rate in frame["dots"]:
            shown = [f"{visited / 10:.1f}", experts] if experts else ["", ""]
            rows.append(
                [name, *shown, megabytes, us, "memory" if reading else "arithmetic", f"{rate / 100:.1f}"]
            )
        return rows


def _hundredths(value: float) -> int:
    return round(100 * value)


def _grouped(value: int) -> str:
    return f"{value:,}"


class RooflineDots:
    """The roof, the way that each model's step has come, and where it is."""

    label = "roofline of a step"

    def name(self, frame: Frame) -> str:
        return f"with {count(frame['tokens'], 'token')}"

    def traces(self, frame: Frame) -> list[dict[str, Any]]:
        roof = {"name": "roofline", "line": {"color": "#777777", "width": 3}, "hoverinfo": "skip"}
        found = [_scatter(frame["roof"], "lines", **roof)]
        for m, (dot, path) in enumerate(zip(frame["dots"], frame["paths"])):
            colour = OKABE_ITO[(0, 5, 2, 3)[m % 4]]
            line = {"color": colour, "width": 1, "dash": "dot"}
            found.append(_scatter(path, "lines+markers", line=line, marker={"color": colour, "size": 4}, showlegend=False, hoverinfo="skip"))  # fmt: skip
            marker = {
                "color": colour,
                "size": 17 if m else 12,
                "symbol": SYMBOLS[m % 4],
                "line": {"width": 3 if m else 0, "color": colour},
            }
            text = f"{dot[0]}: {dot[4]:,} µs"
            found.append(_scatter([dot[6:]], "markers", name=dot[0], marker=marker, text=[text], hovertemplate="%{text}<extra></extra>"))  # fmt: skip
        return found

    def layout(self, frame: Frame) -> dict[str, Any]:
        axis = {"type": "log", "dtick": 1, "fixedrange": True, "gridcolor": "#e6e6e6"}
        return {
            **base_layout(self.label, 760, 390),
            "margin": {"l": 65, "r": 20, "t": 55, "b": 50},
            "xaxis": {"title": {"text": "operations for each byte (intensity)"}, "range": [-0.3, 3.48], **axis},
            "yaxis": {"title": {"text": "TFLOP/s"}, "range": [0.3, 3.1], **axis},
            "legend": {"x": 0.98, "xanchor": "right", "y": 0.03, "yanchor": "bottom", "bgcolor": "rgba(255,255,255,0.8)"},
        }  # fmt: skip


def _scatter(points: Sequence[Sequence[int]], mode: str, **look: Any) -> dict[str, Any]:
    """points: in hundredths."""
    return {
        "type": "scatter",
        "mode": mode,
        "x": [x / 100 for x, _ in points],
        "y": [y / 100 for _, y in points],
        **look,
    }


class RooflineDot(Scrubber):
    """models: name -> StepCost, at most four; the dial is the number of tokens in the step (of one sequence)."""

    def __init__(self, models: Mapping[str, StepCost], machine: Machine, tokens: Sequence[int]):
        if not models or not tokens or list(tokens) != sorted(set(tokens)) or min(tokens) < 1:
            raise ValueError(
                f"give at least one model, and tokens that ascend from at least 1, got {list(tokens)}"
            )
        view, drawing = RooflineView(models, machine, tokens), RooflineDots()
        picture = Picture(view, drawing.label, make=lambda f: PlotPicture(drawing, f), drawing=drawing)
        super().__init__([picture], view.turns())

    def _reasons(self, seq: int | None = None, block: int | None = None) -> list[Reason]:
        return [Reason("A step must read its weights and multiply with them: the longer of the two is its least time.", SRC)]  # fmt: skip
