"""Predict, then reveal: a question about the next event of a kind. The trace is the answer key."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anywidget
import traitlets

from tinymoe.core.trace import Event
from tinymoe.lab.frames import pages, why
from tinymoe.lab.frames.view import Frame, letters
from tinymoe.lab.widgets.esm import source
from tinymoe.lab.widgets.replay import REPLAY, evenly, packed

MOST_CHOICES = 5


@dataclass(frozen=True)
class Question:
    """kind.field of the next event is the answer; candidates(frame) are the values a reader may consider. total: the field
    summed over that event and all others of its kind, step and sequence, the last of which is the reason."""

    kind: str
    field: str
    words: str
    candidates: Callable[[Frame], list[int]]
    name: Callable[[int], str]
    total: bool = False

    def key(self, coming: Sequence[Event]) -> tuple[int, Event] | None:
        """(answer, the event that decides it) from the events that follow, or None."""
        first = next((e for e in coming if e.kind == self.kind), None)
        if first is None or not self.total:
            return first and (first.data[self.field], first)
        mine = [e for e in coming if (e.kind, e.step) == (first.kind, first.step) and e.seq == first.seq]
        return sum(e.data[self.field] for e in mine), mine[-1]


def _owned(frame: Frame) -> list[int]:
    return [b for b, owners in enumerate(frame["owners"]) if owners]


def _sequences(frame: Frame) -> list[int]:
    return [seq for seq, _, _ in frame["tables"]]


def _block(number: int) -> str:
    return f"block {number}"


QUESTIONS = {
    "alloc": Question(
        "alloc", "block", "which block is handed out next?", lambda f: f["free"] + f["cached"], _block
    ),
    "free": Question("free", "block", "which block loses its last owner next?", _owned, _block),
    "evict": Question("evict", "block", "which cached block is dropped next?", lambda f: f["cached"], _block),
    "cow": Question("cow", "seq", "which sequence must copy a page next?", _sequences, letters),
    "preempt": Question("preempt", "seq", "which sequence is preempted next?", _sequences, letters),
    "hit": Question(
        "hit", "blocks", "how many blocks does the next lookup find?", lambda f: list(range(5)), str
    ),
    "stay": Question(
        "verify", "accepted", "how many of the next drafts stay?", lambda f: list(range(5)), str, total=True
    ),
}


def quiz(events: Sequence[Event], at: int, question: str, *, num_blocks: int | None = None) -> Frame:
    """{"question", "choices", "answer" (an index into choices), "because"} about the first such event after events[at].

    Raises ValueError for an unknown question, if no such event follows, or if there is nothing to choose from.
    """
    if question not in QUESTIONS:
        raise ValueError(f"question must be one of {sorted(QUESTIONS)}, got {question!r}")
    asked = QUESTIONS[question]
    key = asked.key(events[at + 1 :])
    if key is None:
        raise ValueError(f"no {asked.kind!r} event follows event {at}: choose an earlier moment")
    right, event = key
    others = [c for c in asked.candidates(pages.frame(events, at, num_blocks=num_blocks)) if c != right]
    if not others:
        raise ValueError(f"only one answer is possible at event {at}: choose another moment")
    values = sorted({right, *(others[i] for i in evenly(len(others), MOST_CHOICES - 1))})
    return {
        "question": asked.words,
        "choices": [asked.name(v) for v in values],
        "answer": values.index(right),
        "because": why.reason(event).words,
    }


class Predict(anywidget.AnyWidget):
    """The question as a picture; `choice` is the index chosen, -1 while there is none. The first choice counts."""

    _esm = source("predict")
    frame = traitlets.Dict().tag(sync=True)
    choice = traitlets.Int(-1).tag(sync=True)

    def __init__(self, events: Sequence[Event], at: int, question: str, *, num_blocks: int | None = None):
        super().__init__(frame=quiz(events, at, question, num_blocks=num_blocks))

    @traitlets.validate("choice")
    def _among(self, proposal: dict[str, Any]) -> int:
        choice, most = proposal["value"], len(self.frame["choices"]) - 1
        if not -1 <= choice <= most:
            raise traitlets.TraitError(f"choice must be in 0..{most}, or -1 for none yet, got {choice}")
        return choice

    @property
    def text(self) -> str:
        return f"Predict: {self.frame['question']} {' / '.join(self.frame['choices'])}"

    @property
    def answered(self) -> bool:
        return self.choice >= 0

    @property
    def right(self) -> bool:
        return self.choice == self.frame["answer"]

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        shown: Any = super()._repr_mimebundle_(**kwargs)  # anywidget adds metadata, ipywidgets does not
        bundle: dict[str, Any] = dict(shown[0] if isinstance(shown, tuple) else shown or {})
        bundle["text/plain"] = self.text
        caption = f"Predict: {self.frame['question']}"
        alone = {
            "schema": 1,
            "esm": "predict",
            "label": "prediction",
            "frames": [self.frame],
            "captions": [caption],
        }
        bundle[REPLAY] = packed({**alone, "traits": {"choice": -1}})
        return bundle
