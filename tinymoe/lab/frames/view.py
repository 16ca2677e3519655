"""What every view offers, and the words they share."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tinymoe.core.trace import Event

Frame = dict[str, Any]
Events = Sequence[Event]


class View(Protocol):
    """A module of tinymoe.lab.frames. `i` counts within `events`; any i is valid, also between two moments.

    CHANGES: kinds that make a moment. DECISIONS: those worth jumping to. moments(events, **options), frame(events, i, **options).
    """

    @property
    def KINDS(self) -> frozenset[str]: ...

    @property
    def CHANGES(self) -> frozenset[str]: ...

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


def paced(events: Events, every: str, kinds: frozenset[str], changing: frozenset[str]) -> list[int]:
    """Moments for every="event" (see `changes`) or every="step" (the last of `kinds`). Raises ValueError for another."""
    if every == "step":
        return last_by(events, kinds, lambda e: e.step)
    if every != "event":
        raise ValueError(f'every must be "event" or "step", got {every!r}')
    return changes(events, changing)


def changes(events: Events, kinds: frozenset[str]) -> list[int]:
    """One moment for each event of `kinds`, and one for each step without any.

    A moment ends at the last index before the next one in the same step: what follows an event belongs to its moment.
    """
    busy = {e.step for e in events if e.kind in kinds}
    found: list[int] = []
    step = -1
    for i, event in enumerate(events):
        if event.kind in kinds or (event.kind == "step" and event.step not in busy):
            found.append(i)
            step = event.step
        elif found and event.step == step:
            found[-1] = i
    return found


def last_change(events: Events, i: int, kinds: frozenset[str]) -> Event | None:
    """The event that the moment around index i shows: the last one of `kinds`, or the `step` of a step without any."""
    quiet: Event | None = None
    for event in reversed(events[: i + 1]):
        if event.kind in kinds and (quiet is None or event.step == quiet.step):
            return event
        if quiet and event.step != quiet.step:
            return quiet
        if event.kind == "step":
            quiet = event
    return quiet
