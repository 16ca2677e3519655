"""W2, token flow: which experts the tokens of one step chose in one layer."""

from collections import Counter
from collections.abc import Mapping

from tinymoe.lab.frames.view import Events, Frame, count, last_by, letters

KINDS = CHANGES = frozenset({"route"})
DECISIONS = frozenset()
MOST_TOKENS = 24  # more ribbons than this cannot be told apart


def moments(events: Events, *, layer: int | None = None, **_) -> list[int]:
    """The last routed token of each (step, layer), or of each step in one layer."""
    found = last_by(events, KINDS, lambda e: (e.step, e.layer))
    return found if layer is None else [i for i in found if events[i].layer == layer]


def frame(
    events: Events,
    i: int,
    *,
    layer: int | None = None,
    limit: int = MOST_TOKENS,
    words: Mapping[tuple[int, int], str] | None = None,
) -> Frame:
    """The (token, expert, gate) links of the step and layer of the last route up to event i.

    limit: at most so many tokens are drawn, the first ones; `left_out` counts the rest. words: text of token
    (seq, position), shown beside its name.
    """
    seen = [e for e in events[: i + 1] if e.kind == "route" and (layer is None or e.layer == layer)]
    if not seen:
        return {
            "event": -1,
            "step": 0,
            "layer": layer or 0,
            "tokens": [],
            "links": [],
            "experts": [],
            "left_out": 0,
        }
    last = seen[-1]
    routes = [e for e in seen if (e.step, e.layer) == (last.step, last.layer)]
    shown = routes[:limit]
    load = Counter(x for e in shown for x in e.experts)
    return {
        "event": last.index,
        "step": last.step,
        "layer": last.layer,
        "tokens": [f"{letters(e.seq)}{e.position}" + _word(words, e) for e in shown],
        "links": [[t, x, g] for t, e in enumerate(shown) for x, g in zip(e.experts, e.gates)],
        "experts": [[x, load[x]] for x in sorted(load)],
        "left_out": len(routes) - len(shown),
    }


def _word(words: Mapping[tuple[int, int], str] | None, event) -> str:
    word = (words or {}).get((event.seq, event.position))
    return "" if word is None else f" {word!r}"


def caption(frame: Frame) -> str:
    if not frame["tokens"]:
        return "No token has been routed yet."
    most, pairs = max(frame["experts"], key=lambda x: (x[1], -x[0]))
    more = f" {count(frame['left_out'], 'token')} more not drawn." if frame["left_out"] else ""
    return (
        f"Step {frame['step']}, layer {frame['layer']}: {count(len(frame['tokens']), 'token')} in "
        f"{count(len(frame['links']), 'pair')} on {count(len(frame['experts']), 'expert')}; "
        f"expert {most} has {count(pairs, 'pair')}.{more}"
    )


def table(frame: Frame) -> list[list]:
    rows: list[list] = [["token", "expert (gate in 1/1000)"]]
    for t, name in enumerate(frame["tokens"]):
        rows.append([name, ", ".join(f"{x} ({g})" for token, x, g in frame["links"] if token == t)])
    return rows
