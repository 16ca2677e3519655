"""Router dial: one token's router logits; one of them is turned, and the best k experts are chosen anew.

Every state is computed by ops.topk_softmax, the function that routes in the engine. Logits are rounded to hundredths
first, so that the picture is the same on every machine.
"""

import math
from collections.abc import Sequence

import torch
import traitlets

from tinymoe import ops
from tinymoe.core.trace import Event, Recording
from tinymoe.lab.frames.view import Events, Frame, listed
from tinymoe.lab.frames.why import Reason
from tinymoe.lab.widgets.esm import EsmPicture, source
from tinymoe.lab.widgets.scrubber import Picture, Scrubber, clicked

KINDS = frozenset({"turn", "choice"})
SRC = "tinymoe.lab.widgets.lessons.dial:best#best-k"
STRIDE = 50  # hundredths from one position of the dial to the next
MOST_K = 4  # the reader may ask for so many experts


class DialPicture(EsmPicture):
    """A click on expert 5 sets `selection` to "expert 5". turnable: there is a kernel that can answer."""

    _esm = source("router_dial")
    turnable = traitlets.Bool(True).tag(sync=True)


def best(logits: Sequence[int], k: int) -> tuple[list[int], list[int]]:
    """(experts, best first; their weights in percent) for logits in hundredths."""
    row = torch.tensor([logits], dtype=torch.float32) / 100
    ids, weights = ops.topk_softmax(row, k)  # shown by "why?": #best-k
    return ids[0].tolist(), [round(100 * w) for w in weights[0].tolist()]


class DialView:
    """The view of `turns`. A frame, numbers in hundredths: expert (the turned one), own (its logit as the router gave it),
    logits, share (of the softmax over all experts), best ([ids, weights] for k = 1, 2, ...), k, range (of the axis)."""

    KINDS = KINDS
    CHANGES = frozenset({"turn"})
    DECISIONS = frozenset({"choice"})

    def __init__(self, logits: Sequence[int], k: int):
        self.logits, self.k = list(logits), k
        self.range = [min(logits) - STRIDE, max(logits) + 3 * STRIDE]

    def moments(self, events: Events, **_) -> list[int]:
        return [i for i, e in enumerate(events) if e.kind == "turn"]

    def frame(self, events: Events, i: int, **_) -> Frame:
        last = [e for e in events[: i + 1] if e.kind == "turn"][-1]
        logits = self.turned(last.expert, last.logit)
        order, ranked = best(logits, len(logits))
        most = min(max(self.k, MOST_K), len(logits))
        return {
            "event": last.index,
            "step": last.step,
            "expert": last.expert,
            "own": self.logits[last.expert],
            "logits": logits,
            "share": [ranked[order.index(x)] for x in range(len(logits))],
            "best": [list(best(logits, k)) for k in range(1, most + 1)],
            "k": self.k,
            "range": self.range,
        }

    def turned(self, expert: int, logit: int) -> list[int]:
        return [logit if x == expert else own for x, own in enumerate(self.logits)]

    def turns(self, expert: int) -> Recording:
        """The positions of the dial: every STRIDE, the router's own value, and level with each other expert. "choice" says
        that other experts are chosen than at the position before."""
        low, high = self.range
        places = {*self.logits, *range(STRIDE * math.ceil(low / STRIDE), high + 1, STRIDE)}
        found, before = Recording(), None
        for step, logit in enumerate(sorted(places)):
            chosen = sorted(best(self.turned(expert, logit), self.k)[0])
            for kind in ("choice", "turn") if before not in (None, chosen) else ("turn",):
                data = {"expert": expert, "logit": logit}
                found.append(Event(len(found), step, kind, SRC, data))
            before = chosen
        return found

    def caption(self, frame: Frame) -> str:
        expert, own, logits = frame["expert"], frame["own"], frame["logits"]
        logit = logits[expert]
        where = "as the router gave it" if logit == own else f"turned from {_decimal(own)}"
        level = [str(x) for x, other in enumerate(logits) if other == logit and x != expert]
        others = f"expert{'s' if len(level) > 1 else ''} {listed(level)}"
        tie = f", level with {others}: the lower number goes first" if level else ""
        return f"Expert {expert} at {_decimal(logit)}, {where}{tie}. Chosen: {chosen_words(frame)}."

    def table(self, frame: Frame) -> list[list]:
        ids, weights = frame["best"][self.k - 1]
        rows: list[list] = [["expert", "logit", "% of the softmax", "chosen", "weight in %"]]
        for x, (logit, share) in enumerate(zip(frame["logits"], frame["share"])):
            rank = ids.index(x) if x in ids else None
            more = ["", ""] if rank is None else [rank + 1, weights[rank]]
            rows.append([x, _decimal(logit), share, *more])
        return rows


def chosen_words(frame: Frame) -> str:
    ids, weights = frame["best"][frame["k"] - 1]
    return listed([f"expert {x} with {w} %" for x, w in zip(ids, weights)])


def _decimal(hundredths: int) -> str:
    """-108 -> −1.08, from integers, so that it prints alike everywhere."""
    whole, rest = divmod(abs(hundredths), 100)
    return f"{'−' if hundredths < 0 else ''}{whole}.{rest:02d}"


class RouterDial(Scrubber):
    """logits: one token's router logits [E], all finite. expert: the one whose logit the dial turns; the others stay.

    In JupyterLab a click on another expert turns that one. Raises ValueError for what cannot be turned.
    """

    def __init__(self, logits: Sequence[float], *, expert: int, top_k: int = 2):
        given = [float(x) for x in logits]
        if len(given) < 2 or not all(map(math.isfinite, given)):
            raise ValueError(f"the dial needs at least two logits, all finite, got {given}")
        if not 1 <= top_k <= len(given):
            raise ValueError(f"top_k must be in 1..{len(given)} (the experts), got {top_k}")
        self._view = DialView([round(100 * x) for x in given], top_k)
        picture = Picture(self._view, "router dial", make=lambda f: DialPicture(frame=f), esm="router_dial")
        super().__init__([picture], self._turns(expert))
        self.turn(expert)

    def turn(self, expert: int) -> None:
        """Give every expert its own logit back, and turn this one from now on."""
        self._source, self._taken, self._events = self._turns(expert), 0, []
        self._take()
        own = self._view.logits[expert]
        self.controls.at = next(n for n, e in enumerate(self.moments) if e.logit == own)
        self._draw()

    def _turns(self, expert: int) -> Recording:
        if not 0 <= expert < len(self._view.logits):
            raise ValueError(f"expert must be in 0..{len(self._view.logits) - 1}, got {expert}")
        return self._view.turns(expert)

    def _clicked(self, change: dict) -> None:
        if change["new"]:
            change["owner"].selection = ""
            _, [expert] = clicked(change["new"], "expert NUMBER")
            self.turn(expert)

    def _reasons(self, seq: int | None = None, block: int | None = None) -> list[Reason]:
        k = self._view.k
        return [Reason(f"The {k} highest logits win, and their softmax is the weights.", SRC)]
