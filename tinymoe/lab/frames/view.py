"""What every view offers, and the words they share."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tinymoe.core.trace import Event

Frame = dict[str, Any]
Events = Sequence[Event]


class View(Protocol):
    """A module of tinymoe.lab.frames. `i` counts within `events`; any i is valid, also between two moments.

    DECISIONS: kinds of events worth jumping to. moments(events, **options), frame(events, i, **options).
    """

    @property
    def KINDS(self) -> frozenset[str]: ...

    @property
    def DECISIONS(self) -> frozenset[str]: ...

    @property
    def moments(self) -> Callable[..., list[int]]: ...

    @property
    def frame(self) -> Callable[..., Frame]: ...

    @property
    def caption(self) -> Callable[[Frame], str]: ...

    @property
    def table(self) -> Callable[[Frame], list[list]]: ...


def letters(seq: int) -> str:
    """Short name of a sequence: 0 -> A, 25 -> Z, 26 -> AA, as spreadsheets name columns."""
    name = ""
    seq += 1
    while seq > 0:
        seq, rest = divmod(seq - 1, 26)
        name = chr(65 + rest) + name
    return name


def count(number: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(words: Sequence[str], limit: int = 8) -> str:
    """`A, B and C`; beyond `limit` names the rest is counted."""
    words = list(words)
    if len(words) > limit:
        words = words[: limit - 1] + [f"{len(words) - limit + 1} more"]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1] if words else "none"


def tenths(numerator: int, denominator: int) -> str:
    """A ratio with one decimal, rounded half up from integers, so that it prints alike everywhere."""
    scaled = (20 * numerator + denominator) // (2 * denominator) if denominator else 0
    return f"{scaled // 10}.{scaled % 10}"


def last_by(events: Events, kinds: frozenset[str], key) -> list[int]:
    """Index of the last event of `kinds` for each run of equal key(event)."""
    found: list[int] = []
    previous: Any = None
    for i, event in enumerate(events):
        if event.kind in kinds:
            if found and key(event) == previous:
                found[-1] = i
            else:
                found.append(i)
            previous = key(event)
    return found
