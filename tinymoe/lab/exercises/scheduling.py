"""Exercises on the scheduler."""

from collections.abc import Mapping, Sequence

from tinymoe.core.trace import Event
from tinymoe.lab.exercises.judge import Verdict
from tinymoe.lab.frames import schedule
from tinymoe.lab.frames.view import count, letters

STEPS = 3


def plan(answer, events: Sequence[Event]) -> Verdict:
    """12.1: the first three steps by hand: a list of {sequence: tokens}, sequences by letter or number.

    The trace is the key; the rules say what is wrong first. Steps have the engine's numbers, which begin with 0.
    """
    ends = [i for i, e in enumerate(events) if e.kind == "step" and e.used][:STEPS]
    if len(ends) < STEPS:
        raise ValueError(f"the recording has only {len(ends)} steps that run tokens, {STEPS} are wanted")
    if (
        not isinstance(answer, Sequence)
        or len(answer) != STEPS
        or not all(isinstance(s, Mapping) for s in answer)
    ):
        return Verdict(False, f'a list of {STEPS} dicts is wanted, like [{{"A": 4, "B": 2}}, ...]')
    names = {letters(seq): seq for seq, _, _ in schedule.frame(events, ends[-1])["rows"]}
    for end, step in zip(ends, answer):
        mine = {names.get(k, k): n for k, n in step.items() if n != 0}
        wrong = _first_fault(mine, events[: end + 1], set(names.values()))
        if wrong:
            return Verdict(False, f"step {events[end].step}: {wrong}")
    return Verdict(True, f"{STEPS} steps agree with the engine")


def _first_fault(mine: dict, events: Sequence[Event], known: set[int]) -> str:
    """What is wrong with one step, or ""; `events` ends with the step's own."""
    _, budget, used, cells = schedule.frame(events, len(events) - 1)["columns"][-1]
    ran = {c[0]: (c[1], c[2]) for c in cells if c[1] in (schedule.PREFILL, schedule.DECODE)}
    for seq, tokens in mine.items():
        if seq not in known:
            return f"there is no sequence {seq!r}"
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
            return f"{letters(seq)} needs a number of tokens, got {tokens!r}"
    if sum(mine.values()) > budget:
        return f"{count(sum(mine.values()), 'token')} are more than the budget of {budget}"
    for seq, (code, _) in ran.items():
        if code == schedule.DECODE and mine.get(seq) != 1:
            return f"{letters(seq)} has read its prompt, so it decodes: exactly 1 token, before any prompt is read"
    for seq in mine:
        if seq not in ran:
            return f"{letters(seq)} does not run: it has not arrived, has finished, or others are before it"
    if sum(mine.values()) < used:
        return f"{count(used - sum(mine.values()), 'token')} of the budget are left although somebody could use them"
    off = [letters(seq) for seq, (_, tokens) in ran.items() if mine.get(seq) != tokens]
    return f"{off[0]} gets another number of tokens: whose turn is first?" if off else ""
