"""Plotly drawings of W1 and W2: traces and a fixed layout for a frame, for a live figure and for a kernel-free replay.

Only lists of integers and strings go into a figure (arrays would be stored as base64), and no template.
"""

import copy
from typing import Any, Protocol

import plotly.graph_objects as go
import traitlets

from tinymoe.lab.frames import load
from tinymoe.lab.frames.view import Frame
from tinymoe.lab.widgets.esm import Deferred

OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
COLD_TO_HOT = [[0, "#0072B2"], [0.3333, "#F2F2F2"], [1, "#D55E00"]]  # white is the mean (100 of 0..300)
PAD, TALLEST = (
    6,
    421,
)  # pixels between two nodes of a flow, and the most that its picture is high (in the book)
FONT = {"family": "system-ui, sans-serif", "size": 12, "color": "#1b1b1b"}


class Drawing(Protocol):
    """A stateless way to draw a frame with plotly; `traces` has the same length and types for every frame.

    name: label of the frame on a slider.
    """

    label: str

    def name(self, frame: Frame) -> str: ...

    def traces(self, frame: Frame) -> list[dict[str, Any]]: ...

    def layout(self, frame: Frame) -> dict[str, Any]: ...


def base_layout(label: str, width: int, height: int) -> dict[str, Any]:
    return {
        "template": "none",
        "width": width,
        "height": height,
        "font": FONT,
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "hoverlabel": {"font": {"family": FONT["family"]}},
        "title": {
            "text": "",
            "font": {"size": 13},
            "x": 0.01,
            "xanchor": "left",
            "y": 0.98,
            "yanchor": "top",
        },
        "meta": {"label": label},
    }


class LoadMap:
    """Heat map of rows × experts: colour is the count relative to its row's mean, the number is the count itself."""

    label = "expert load"

    def name(self, frame: Frame) -> str:
        return f"{frame['step']}"

    def traces(self, frame: Frame) -> list[dict[str, Any]]:
        experts = frame["experts"]
        few = experts <= 32
        return [
            {
                "type": "heatmap",
                "x": list(range(experts)),
                "y": list(frame["rows"]),
                "z": load.percent_of_mean(frame),
                "text": frame["counts"],
                "texttemplate": "%{text}" if few else "",
                "textfont": {"size": 11},
                "hovertemplate": "%{y}, expert %{x}: %{text} slots, %{z} % of the mean<extra></extra>",
                "zmin": 0,
                "zmax": 300,
                "colorscale": COLD_TO_HOT,
                "xgap": 1 if few else 0,
                "ygap": 1,
                "colorbar": {
                    "title": {"text": "% of mean", "side": "right"},
                    "tickvals": [0, 100, 200, 300],
                    "thickness": 14,
                    "outlinewidth": 0,
                },
            }
        ]

    def layout(self, frame: Frame) -> dict[str, Any]:
        rows, experts = len(frame["rows"]), frame["experts"]
        return {
            **base_layout(self.label, 760, 150 + 30 * max(3, min(rows, 20))),
            "margin": {"l": 80, "r": 20, "t": 40, "b": 45},
            "xaxis": {
                "title": {"text": "expert"},
                "dtick": 1 if experts <= 32 else 8,
                "range": [-0.5, max(experts, 1) - 0.5],
                "showgrid": False,
                "zeroline": False,
                "fixedrange": True,
            },
            "yaxis": {
                "range": [max(rows, 1) - 0.5, -0.5],
                "showgrid": False,
                "zeroline": False,
                "fixedrange": True,
            },
        }


class FlowRibbons:
    """Sankey diagram: tokens on the left, experts on the right, a ribbon as wide as its gate."""

    label = "token flow"

    def name(self, frame: Frame) -> str:
        return f"{frame['step']}, layer {frame['layer']}"

    def traces(self, frame: Frame) -> list[dict[str, Any]]:
        tokens, experts = frame["tokens"], [x for x, _ in frame["experts"]]
        node_of = {x: len(tokens) + n for n, x in enumerate(experts)}
        links = [[t, x, max(1, g)] for t, x, g in frame["links"]]
        sums = [
            [sum(g for t, _, g in links if t == n) for n in range(len(tokens))],
            [sum(g for _, x, g in links if x == e) for e in experts],
        ]
        hues = {x: OKABE_ITO[x % 7] for x in experts}
        return [
            {
                "type": "sankey",
                "arrangement": "snap",
                "node": {
                    "label": [*tokens, *(f"expert {x}: {n}" for x, n in frame["experts"])],
                    "color": [*["#8a8a8a" for _ in tokens], *(hues[x] for x in experts)],
                    "x": [0.01] * len(tokens) + [0.99] * len(experts),
                    "y": _centres(sums),
                    "pad": PAD,
                    "thickness": 12,
                    "line": {"width": 0},
                },
                "link": {
                    "source": [t for t, _, _ in links],
                    "target": [node_of[x] for _, x, _ in links],
                    "value": [g for _, _, g in links],
                    "color": [_faded(hues[x]) for _, x, _ in links],
                    "hovertemplate": "%{source.label} to %{target.label}: gate %{value}/1000<extra></extra>",
                },
            }
        ]

    def layout(self, frame: Frame) -> dict[str, Any]:
        return {**base_layout(self.label, 760, 460), "margin": {"l": 15, "r": 15, "t": 45, "b": 15}}


def _centres(columns: list[list[int]]) -> list[float]:
    """Centres of the nodes of both columns, 0 at the top and 1 at the bottom; three decimals, alike everywhere.

    plotly gives a node the height that lets the fullest column fit with PAD pixels between nodes. Centres that are too
    close for that are pushed down, out of the picture, so the same height is taken here, and the rest becomes gaps.
    """
    pad = PAD / TALLEST
    scale = min([(0.99 - pad * (len(c) - 1)) / sum(c) for c in columns if c], default=0)
    centres = []
    for column in columns:
        gap = (0.99 - scale * sum(column)) / max(1, len(column) - 1)
        below = 0.0 if len(column) > 1 else gap / 2
        for value in column:
            centres.append(round(below + scale * value / 2, 3))
            below += scale * value + gap
    return centres


def _faded(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.4)"


class PlotPicture(Deferred, go.FigureWidget):
    """A live figure; `selection` is "cell row expert" after a click on a heat map."""

    selection = traitlets.Unicode()

    def __init__(self, drawing: Drawing, frame: Frame):
        self._drawing = drawing
        self._frame, self._unheard = frame, True
        super().__init__(data=drawing.traces(frame), layout=self._untitled(frame))
        self.add_class("tm-plot")
        first: Any = self.data[0]
        if first.type == "heatmap":
            first.on_click(self._clicked)
        self.complete()

    def draw(self, frame: Frame) -> None:
        self._frame = frame
        layout = self._untitled(frame)
        with self.batch_update():
            shown: Any = self.data
            for trace, new in zip(shown, self._drawing.traces(frame)):
                trace.update({k: v for k, v in new.items() if k != "type"}, overwrite=True)
            self.update_layout({k: layout[k] for k in ("height", "xaxis", "yaxis") if k in layout})
        # To a browser that has not made its figure yet the update means nothing; it will begin with this state instead.
        self._widget_data, self._widget_layout = copy.deepcopy(self._data), self.layout.to_plotly_json()

    @traitlets.observe("_js2py_layoutDelta")
    def _drawn(self, change: dict[str, Any]) -> None:
        """The browser has made its figure. What was sent before that may be lost while JupyterLab connects: send it again."""
        if change["new"] and self._unheard:
            self._unheard = False
            if self._last_layout_edit_id:
                self.draw(self._frame)

    def _untitled(self, frame: Frame) -> dict[str, Any]:
        """Without room for a title: the caption stands above the figure."""
        layout = self._drawing.layout(frame)
        top = layout["margin"]["t"] - 10
        return {**layout, "height": layout["height"] - top, "margin": {**layout["margin"], "t": 10}}

    def _clicked(self, trace: Any, points: Any, state: Any) -> None:
        if points.point_inds:
            row, expert = points.point_inds[0]
            self.selection = f"cell {row} {expert}"
