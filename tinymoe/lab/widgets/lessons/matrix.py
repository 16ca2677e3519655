"""Matrix reveal: which rows of the attention matrix a step computes, and which keys it reads from the cache.

Rows are tokens that ask (queries), columns are tokens that answer (keys); a token sees itself and what precedes it.
Several recordings of the same tokens are shown side by side, step by step, so that their difference can be seen.
"""

from collections.abc import Mapping, Sequence

from tinymoe.core.trace import Event, Recording
from tinymoe.lab.frames.view import Events, Frame, count, last_by
from tinymoe.lab.widgets.esm import EsmPicture, source
from tinymoe.lab.widgets.scrubber import Picture, Scrubber

KINDS = frozenset({"chunk"})


class MatrixPicture(EsmPicture):
    _esm = source("token_matrix")


class MatrixView:
    """The view of `merged` recordings: event.data["panel"] says which of `names` an event belongs to.

    A frame: panels [[name, start, stop], ...]: positions start..stop-1 ran in this step, those before came from the cache;
    words: the tokens' texts; size: tokens at the end.
    """

    KINDS = CHANGES = KINDS
    DECISIONS: frozenset[str] = frozenset()

    def __init__(self, names: Sequence[str], words: Sequence[str]):
        self.names, self.words = list(names), list(words)

    def moments(self, events: Events, **_) -> list[int]:
        return last_by(events, KINDS, lambda e: e.step)

    def frame(self, events: Events, i: int, **_) -> Frame:
        shown = [e for e in events[: i + 1] if e.kind == "chunk"]
        panels = [[name, 0, 0] for name in self.names]
        for event in shown:
            panels[event.panel][1:] = [event.start, event.stop]
        return {
            "event": shown[-1].index if shown else -1,
            "step": shown[-1].step if shown else 0,
            "panels": panels,
            "words": self.words,
            "size": max((e.stop for e in events if e.kind == "chunk"), default=0),
        }

    def caption(self, frame: Frame) -> str:
        if frame["event"] < 0:
            return "No token has run yet."
        parts = [
            f"{name}: {count(stop - start, 'token')} run, {start} read from the cache."
            for name, start, stop in frame["panels"]
        ]
        return " ".join([f"Step {frame['step']}.", *parts])

    def table(self, frame: Frame) -> list[list]:
        """pairs: products of a query and a key in one head of one layer."""
        rows: list[list] = [["", "tokens run", "keys computed", "keys read from the cache", "pairs"]]
        for name, start, stop in frame["panels"]:
            pairs = (stop * (stop + 1) - start * (start + 1)) // 2
            rows.append([name, stop - start, stop - start, start, pairs])
        return rows


class TokenMatrix(Scrubber):
    """runs: name -> recording, one request's tokens in each. A run's n-th chunk is shown in step n, so the runs keep pace.

    words: text of each token, shown beside its row.
    """

    def __init__(self, runs: Mapping[str, Events], *, words: Sequence[str] = ()):
        view = MatrixView(list(runs), words)
        label = "attention matrix"
        picture = Picture(view, label, make=lambda f: MatrixPicture(frame=f), esm="token_matrix")
        super().__init__([picture], merged(list(runs.values())))


def merged(runs: Sequence[Events]) -> Recording:
    """The chunks of all runs in step: the n-th of each has step n, and `panel` in its data says whose it is."""
    chunks = [[e for e in run if e.kind == "chunk"] for run in runs]
    both = Recording()
    for n in range(max(map(len, chunks), default=0)):
        for panel, found in enumerate(chunks):
            if n < len(found):
                event = found[n]
                both.append(Event(len(both), n, "chunk", event.src, {**event.data, "panel": panel}))
    return both
