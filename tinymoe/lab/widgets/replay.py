"""What a widget leaves behind in a stored notebook: moving pictures that need no kernel, and the caption as text.

Bundle of a picture that an ES module draws (type REPLAY, rendered by tinymoe.lab.book):

    {"schema": 1,
     "esm": "page_table",               tinymoe/lab/page_table.js draws it
     "label": "page table",             accessible name
     "frames": [{...}, ...],            as tinymoe.lab.frames makes them, oldest first
     "captions": ["...", ...],          one a frame, the whole message
     "tables": [[["head", ...], ...]],  one a frame, the first row is the header
     "of": 40,                          how many moments the recording has, if the replay shows fewer
     "start": 5,                        the frame shown first, if it is not the oldest
     "traits": {...},                   further traits that the module reads
     "more": [{"esm", "label", "frames", "captions", "tables"}, ...]}   further pictures that move together (Strip)

It is stored as one string of compact JSON: notebooks are written with indent=1, which would put every integer on a line
of its own and triple the size.

A plotly picture leaves a plotly bundle (PLOTLY) with frames, a slider and buttons; the caption is each frame's title.
Both hold integers and strings, and stay below LIMIT bytes: a longer recording is thinned evenly, ends kept.
"""

import json
from collections.abc import Callable
from typing import Any

from tinymoe.lab.frames.view import Frame
from tinymoe.lab.widgets.plots import Drawing

REPLAY = "application/vnd.tinymoe.replay+json"
PLOTLY = "application/vnd.plotly.v1+json"
LIMIT = 60_000
PACE_MS = 250


def packed(bundle: Any) -> str:
    """Compact JSON."""
    return json.dumps(bundle, separators=(",", ":"), ensure_ascii=False)


def size(bundle: Any) -> int:
    """Bytes of the compact JSON."""
    return len(packed(bundle).encode())


def evenly(total: int, n: int) -> list[int]:
    """n of the indices 0..total-1, evenly spaced, with both ends."""
    if n >= total:
        return list(range(total))
    return [round(i * (total - 1) / (n - 1)) for i in range(n)] if n > 1 else [total - 1]


def fitted(total: int, build: Callable[[list[int]], dict[str, Any]]) -> dict[str, Any]:
    """build(chosen indices) with as many of the `total` moments as LIMIT allows."""
    n = total
    bundle = build(evenly(total, n))
    while n > 1 and (excess := size(bundle)) > LIMIT:
        n = max(1, min(n - 1, n * LIMIT // excess))
        bundle = build(evenly(total, n))
    return bundle


def esm_bundle(parts: list[dict[str, Any]], at: int = 0) -> dict[str, Any]:
    """parts: one {"esm", "label", "frames", "captions", "tables"} for each picture, with equally many frames; at: which of
    them is shown first."""
    total = len(parts[0]["frames"])

    def build(chosen: list[int]) -> dict[str, Any]:
        thin = [
            {k: [v[i] for i in chosen] if k in ("frames", "captions", "tables") else v for k, v in p.items()}
            for p in parts
        ]
        bundle = {"schema": 1, **thin[0]}
        if len(chosen) < total:
            bundle["of"] = total
        if start := min(range(len(chosen)), key=lambda n: abs(chosen[n] - at)):
            bundle["start"] = start
        if thin[1:]:
            bundle["more"] = thin[1:]
        return bundle

    return fitted(total, build)


def plotly_bundle(drawing: Drawing, frames: list[Frame], captions: list[str], at: int) -> dict[str, Any]:
    """A plotly figure of the frames, showing frame `at` first."""

    def build(chosen: list[int]) -> dict[str, Any]:
        start = min(range(len(chosen)), key=lambda n: abs(chosen[n] - at))
        shown = frames[chosen[start]]
        layout = drawing.layout(shown)
        layout["title"] = {**layout["title"], "text": captions[chosen[start]]}
        steps = [_animate([str(n)], 0) | {"label": drawing.name(frames[i])} for n, i in enumerate(chosen)]
        layout |= _controls(steps, start, layout)
        first = drawing.traces(frames[chosen[0]])
        return {
            "data": drawing.traces(shown),
            "layout": layout,
            "frames": [
                {
                    "name": str(n),
                    "data": [_changing(new, old) for new, old in zip(drawing.traces(frames[i]), first)],
                    "layout": {"title": {**layout["title"], "text": captions[i]}},
                }
                for n, i in enumerate(chosen)
            ],
            "config": {"responsive": True, "displayModeBar": False},
        }

    return fitted(len(frames), build)


def _changing(trace: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """What differs between frames; the rest stands in the figure's data."""
    whole = {"heatmap": ("z", "text"), "sankey": ("node", "link"), "scatter": ("x", "y")}
    always = ("type", *whole[trace["type"]])
    return {k: v for k, v in trace.items() if k in always or v != first[k]}


def _animate(frame: list | list[None] | None, pace: int) -> dict[str, Any]:
    how = {"mode": "immediate", "frame": {"duration": pace, "redraw": True}, "transition": {"duration": 0}}
    return {"method": "animate", "args": [frame, how | ({"fromcurrent": True} if frame is None else {})]}


def _controls(steps: list[dict], start: int, layout: dict[str, Any]) -> dict[str, Any]:
    """Slider and buttons below the picture; nothing moves before somebody presses play."""
    below = 92
    margin = layout["margin"]
    inner = layout["height"] - margin["t"] - margin["b"]
    y = round(-margin["b"] / inner, 3)
    buttons = [_animate(None, PACE_MS) | {"label": "▶ play"}, _animate([None], 0) | {"label": "❚❚ pause"}]
    return {
        "height": layout["height"] + below,
        "margin": {**margin, "b": margin["b"] + below},
        "sliders": [
            {
                "active": start,
                "steps": steps,
                "x": 0.22,
                "len": 0.78,
                "y": y,
                "pad": {"t": 8, "b": 4},
                "currentvalue": {"prefix": "step ", "offset": 6},
            }
        ],
        "updatemenus": [
            {
                "type": "buttons",
                "direction": "left",
                "showactive": False,
                "x": 0.0,
                "xanchor": "left",
                "y": y,
                "yanchor": "top",
                "pad": {"t": 26, "l": 0},
                "buttons": buttons,
            }
        ],
    }
