"""A lesson: fixed seeds, checked exercises, predictions, and a recap that prints the same on every run."""

import random
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import plotly.io
import torch
from IPython.core.getipython import get_ipython

from tinymoe.core.trace import Event
from tinymoe.lab.exercises.catalogue import JUDGES
from tinymoe.lab.exercises.judge import Judge, decide, missing
from tinymoe.lab.widgets.predict import Predict

# More threads gain nothing on the bundled models, and cost a factor of ten where other programs use the cores, too.
THREADS = 1


class Lesson:
    """number: the notebook's two digits, as in Lesson("05"). Seeds random, numpy and torch, and fixes torch's threads.

    Plotly's template is switched off: it would add 6.5 KB to every stored figure.
    judges: exercise id -> judge; the catalogue by default.
    """

    def __init__(self, number: str, seed: int = 0, *, judges: Mapping[str, Judge] = JUDGES):
        if not (isinstance(number, str) and len(number) == 2 and number.isdigit()):
            raise ValueError(f'a lesson has two digits, as in Lesson("05"), got {number!r}')
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        torch.set_num_threads(THREADS)
        plotly.io.templates.default = "none"
        self.number, self.seed = number, seed
        self._judges = {k: j for k, j in judges.items() if k.startswith(f"{number}.")}
        self._state = dict.fromkeys(sorted(self._judges), "open")
        self._predictions: list[Predict] = []

    def check(self, exercise: str, answer: Any, *given: Any) -> None:
        """Judge an answer and print one line: not answered yet, correct, or not yet with a counter-example.

        given: what else the judge needs, for example the recording that is the key. What was solved once stays solved in
        the recap. Raises KeyError for an unknown id, TypeError if something is not given.
        """
        if exercise not in self._judges:
            known = ", ".join(self._judges) or "none"
            raise KeyError(f"lesson {self.number} has no exercise {exercise!r}; it has {known}")
        if needs := missing(self._judges[exercise], given):
            call = f'lesson.check("{exercise}", answer{"" if needs == "nothing" else ", " + needs})'
            raise TypeError(f"besides the answer this exercise needs {needs}, as in {call}; got {len(given)}")
        verdict = decide(self._judges[exercise], answer, *given)
        state = "open" if verdict is None else "correct" if verdict.ok else "not yet"
        said = "not answered yet" if verdict is None else f"{state}: {verdict.message}"
        print(f"[{exercise}] {said}")
        if self._state[exercise] != "correct":
            self._state[exercise] = state

    def predict(
        self, events: Sequence[Event], at: int, question: str, *, num_blocks: int | None = None
    ) -> Predict:
        """A question about what follows events[at] (see widgets.predict.QUESTIONS); the first answer counts in the recap."""
        widget = Predict(events, at, question, num_blocks=num_blocks)
        self._predictions.append(widget)
        return widget

    def needs(self, package: str, reason: str) -> None:
        """Where a package is not installed, say so, and skip the later cells that begin with the line `# needs PACKAGE`."""
        if find_spec(package) is not None:
            return
        said = f"{package} is not installed here ({reason})"
        print(
            f"{said}: cells that begin with '# needs {package}' are skipped; their stored output is in the book."
        )

        def skip(lines: list[str]) -> list[str]:
            return [f"print({f'skipped: {said}'!r})\n"] if lines[:1] == [f"# needs {package}\n"] else lines

        if shell := get_ipython():
            shell.input_transformers_cleanup.append(skip)

    def recap(self) -> None:
        """Print which exercises are solved and how many predictions were right."""
        solved = sum(state == "correct" for state in self._state.values())
        listed = ", ".join(f"{k} {state}" for k, state in self._state.items()) or "none"
        print(f"Lesson {self.number}: {solved} of {len(self._state)} exercises solved ({listed}).")
        if self._predictions:
            made = sum(p.answered for p in self._predictions)
            right = sum(p.right for p in self._predictions)
            print(f"Predictions: {made} of {len(self._predictions)} made, {right} right.")
