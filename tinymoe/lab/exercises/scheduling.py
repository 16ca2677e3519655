"""Exercises on what each step did: when a request gets its first token, and who runs."""

import random
from collections.abc import Mapping, Sequence

from tinymoe.core.trace import Event, Recording, Trace
from tinymoe.lab.exercises.judge import Verdict, attempt, shown
from tinymoe.lab.frames.steps import schedule
from tinymoe.lab.frames.view import count, letters

RUNS, STEPS = 40, 3


def first_token(answer) -> Verdict:
    """00.1: first_token_step(events, request) -> the step in which the request with that number gets its first token;
    None if it has none."""
    if not callable(answer):
        return Verdict(False, f"write a function first_token_step, got {type(answer).__name__}")
    for number in range(RUNS):
        events, truth = _run(random.Random(number), requests=1 + number // 8)
        for request, expected in truth.items():
            got, failure = attempt(answer, events, request)
            if failure or type(got) is not type(expected) or got != expected:
                what = failure or f"got {shown(got)}{_hint(events, request, got)}"
                wanted = "has no token: None is wanted"
                if expected is not None:
                    wanted = f"gets its first token in step {expected}"
                run = "a run" if len(truth) == 1 else f"a run of {len(truth)} requests"
                return Verdict(False, f"in {run}, request {request} {wanted}; {what}")
    return Verdict(True, f"{RUNS} random runs agree")


def _hint(events: Recording, request: int, got: object) -> str:
    """What the wrong answer looks like."""
    mine = {e.seq for e in events.of("arrive") if e.request == request}
    chunks = [e for e in events.of("chunk") if e.seq in mine]
    tokens = [e for e in events.of("sample") if e.request == request]
    if chunks and got == chunks[0].step:
        return ", the step in which it begins to read its prompt"
    if tokens and got == tokens[0].index:
        return ", the number of an event: an event's step is e.step"
    if tokens and got == tokens[-1].step:
        return ", the step of its last token"
    if any(e.step == got for e in events.of("sample")):
        return ", a step that gives a token to another request"
    return ""


def _run(r: random.Random, requests: int) -> tuple[Recording, dict[int, int | None]]:
    """A made-up recording, and the answer for each request: the step in which its last prompt token ran."""
    trace, truth = Trace(), dict.fromkeys(range(requests))
    prompts = [r.randint(1, 30) for _ in range(requests)]
    arrives = sorted(r.randint(0, 6) for _ in range(requests))
    answers = [r.choice([1, 1, 2]) for _ in range(requests)]  # sequences a request forks into
    seqs = r.sample(range(3 * requests), 3 * requests)  # a sequence's number says nothing about its request's
    done = [0] * requests
    with trace.record() as events:
        for step in range(r.randint(6, 14)):
            trace.step = step
            for q in (q for q in range(requests) if arrives[q] == step):
                trace.emit("arrive", "", request=q, seq=seqs[q], prompt_tokens=prompts[q], priority=0)
            ran = []
            for q in (q for q in range(requests) if arrives[q] <= step):
                tokens = 1 if done[q] >= prompts[q] else min(prompts[q] - done[q], r.choice([0, 3, 8]))
                if tokens:
                    stop = done[q] + tokens
                    ends = int(stop >= prompts[q])
                    trace.emit("chunk", "", seq=seqs[q], start=done[q], stop=stop, samples=ends)
                    done[q] = stop
                    ran += [(q, n) for n in range(answers[q])] if ends else []
            for q, n in r.sample(ran, len(ran)):
                seq, position = seqs[q + n * requests], done[q]
                trace.emit("sample", "", request=q, seq=seq, position=position, token=r.randint(1, 99))
                if truth[q] is None:
                    truth[q] = step
    return events, truth


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
