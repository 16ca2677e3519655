"""W1, expert load: how many tokens each expert of each layer received."""

from collections.abc import Mapping

from tinymoe.core.trace import Event
from tinymoe.lab.frames.view import Events, Frame, last_by, tenths

KINDS = CHANGES = frozenset({"route"})
DECISIONS = frozenset()


def moments(events: Events, **_) -> list[int]:
    """The last routed token of each step."""
    return last_by(events, KINDS, lambda e: e.step)


def frame(events: Events, i: int, *, per: str = "run", experts: int | None = None) -> Frame:
    """Counts up to event i: of the whole run (per="run") or of its step alone (per="step").

    experts: number of experts; None takes the largest id of the recording. Layers come from the whole recording, so
    every frame has the same axes. Raises ValueError for another `per`.
    """
    if per not in ("run", "step"):
        raise ValueError(f'per must be "run" or "step", got {per!r}')
    routes = [e for e in events if e.kind == "route"]
    layers = sorted({e.layer for e in routes})
    seen = [e for e in events[: i + 1] if e.kind == "route"]
    step = seen[-1].step if seen else 0
    counted = seen if per == "run" else [e for e in seen if e.step == step]
    body = _counts(
        counted,
        {layer: row for row, layer in enumerate(layers)},
        lambda e: e.layer,
        experts or _width(routes),
    )
    return {
        "event": seen[-1].index if seen else -1,
        "step": step,
        "per": per,
        "rows": [f"layer {x}" for x in layers],
        **body,
    }


def by_group(events: Events, groups: Mapping[int, str], layer: int, experts: int | None = None) -> Frame:
    """The same frame for one layer, one row per group of sequences (a domain, a tenant): groups[seq] is its row.

    Sequences without a group are left out.
    """
    routes = [e for e in events if e.kind == "route" and e.layer == layer]
    names = sorted(set(groups.values()))
    rows = {name: row for row, name in enumerate(names)}
    body = _counts(
        [e for e in routes if e.seq in groups], rows, lambda e: groups[e.seq], experts or _width(routes)
    )
    step = routes[-1].step if routes else 0
    return {
        "event": routes[-1].index if routes else -1,
        "step": step,
        "per": "run",
        "rows": names,
        "layer": layer,
        **body,
    }


def _width(routes: list[Event]) -> int:
    return 1 + max((x for e in routes for x in e.experts), default=-1)


def _counts(routes: list[Event], row_of: Mapping, key, experts: int) -> Frame:
    counts = [[0] * experts for _ in row_of]
    tokens = [0] * len(row_of)
    for event in routes:
        row = row_of[key(event)]
        tokens[row] += 1
        for expert in event.experts:
            counts[row][expert] += 1
    return {
        "experts": experts,
        "k": len(routes[0].experts) if routes else 0,
        "tokens": tokens,
        "counts": counts,
    }


def percent_of_mean(frame: Frame) -> list[list[int]]:
    """Each count in percent of its row's mean, rounded half up; 100 is a perfectly even load."""
    return [
        [(200 * n * frame["experts"] + total) // (2 * total) if total else 0 for n in row]
        for row, total in ((row, sum(row)) for row in frame["counts"])
    ]


def hottest(frame: Frame) -> tuple[int, int]:
    """(row, expert) of the largest count relative to its row's mean; ties go to the first."""
    cells = [
        (-n * frame["experts"] / sum(row), r, e)
        for r, row in enumerate(frame["counts"])
        if sum(row)
        for e, n in enumerate(row)
    ]
    return min(cells)[1:] if cells else (0, 0)


def caption(frame: Frame) -> str:
    if not any(map(sum, frame["counts"])):
        return "No token has been routed yet."
    row, expert = hottest(frame)
    counts = frame["counts"][row]
    span = "run so far" if frame["per"] == "run" else "this step"
    idle = sum(n == 0 for r in frame["counts"] for n in r)
    cells = frame["experts"] * len(frame["rows"])
    return (
        f"Step {frame['step']}, {span}: {frame['rows'][row]} expert {expert} has {counts[expert]} of {sum(counts)} slots, "
        f"{tenths(counts[expert] * frame['experts'], sum(counts))}× the mean. {idle} of {cells} cells are idle."
    )


def table(frame: Frame) -> list[list]:
    head = ["", *(f"expert {e}" for e in range(frame["experts"])), "sum", "max/mean"]
    body = [
        [name, *row, sum(row), tenths(max(row, default=0) * frame["experts"], sum(row))]
        for name, row in zip(frame["rows"], frame["counts"])
    ]
    return [head, *body]
