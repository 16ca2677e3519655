"""One run of one arm, and what a set of runs says.

What is timed is steady decoding: all requests are in the batch from the first to the last step that counts. The clock starts
one step after every request has its first token (by then a draft model has read the prompts, too) and stops at the first
step that completes requests * tokens tokens, wherever the requests are by then; so no arm is slower because some of its
requests end early, and every request weighs the same in a step. What prompts cost is in whole_tok_s.

bound_tok_s is what the same steps would give if nothing but drafting and verification took time:

    tokens of the steps / (seconds that drafts took + seconds that forward passes and sampling took)

A verification of k drafts brings 1 + a_1 + ... + a_k tokens, with a_i the measured share of verifications that kept the first
i drafts: the expectation of Leviathan et al. (arXiv 2211.17192) without its assumption that all places are alike. A sequence
without drafts gets one. So what lies between tok_s and its bound is scheduling, bookkeeping and Python.
"""

import math
import random
import time
from collections import deque
from collections.abc import Generator
from statistics import median
from typing import Any, NamedTuple

from tinymoe.bench.results import timing
from tinymoe.core.params import SamplingParams
from tinymoe.engine.engine import Engine


class Arm(NamedTuple):
    """An engine and how deep it guesses: a number, or None for as deep as it likes. speculates: whether it can."""

    name: str
    engine: Engine
    depth: int | None
    speculates: bool = True


class Timed(NamedTuple):
    """One run: seconds of the steps that count, the tokens they made, where the time went, and what came out."""

    seconds: float
    tokens: int
    whole_seconds: float
    whole_tokens: int
    steps: int
    draft_s: float
    verify_s: float
    plain_s: float  # forward and sampling of steps without drafts
    counts: dict[str, int]
    accepted_at: list[int]
    drafts_at: list[int]
    experts: int
    made: list[list[int]]

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def bound(self) -> float:
        """Tokens a second if only drafts, forward passes and sampling took time."""
        return self.tokens / (self.draft_s + self.verify_s + self.plain_s)


COUNTS = ("draft_tokens", "accepted_tokens", "verify_steps", "verifications", "verified_tokens")


def room(prompts: list[list[int]], tokens: int, depth: int) -> int:
    """Most tokens of one sequence: every draft of one request may be kept while all others crawl."""
    return max(map(len, prompts)) + (depth + 1) * (tokens + 2)


def decode(arm: Arm, prompts: list[list[int]], tokens: int, most: int, seed: int = 0) -> Timed:
    """One run from its beginning to its end: see `decoding`."""
    turns = decoding(arm, prompts, tokens, most, seed)
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return end.value


def decoding(
    arm: Arm, prompts: list[list[int]], tokens: int, most: int, seed: int = 0, turn_s: float = math.inf
) -> Generator[None, None, Timed]:
    """Run the prompts, greedily, from a cold prefix cache, until len(prompts) * tokens tokens have been timed; in turns of at
    least turn_s seconds, between which something else may run that no clock sees.

    most: the longest sequence that the engine has pages for, in tokens. seed: of the first request, one more for each other;
    only a coin (tinymoe.bench.spec.synthetic) asks for it.
    """
    engine, watch = arm.engine, Stopwatch(turn_s)
    engine.reset_prefix_cache()
    outbox: deque = deque()
    metrics, routes = engine.metrics, engine.routes
    first = metrics.generation_tokens
    ids = [f"spec-{i}" for i in range(len(prompts))]
    for i, (request_id, prompt) in enumerate(zip(ids, prompts)):
        params = SamplingParams(
            temperature=0, max_tokens=most - len(prompt), ignore_eos=True, detokenize=False, seed=seed + i,
            num_speculative_tokens=arm.depth if arm.speculates else None,
        )  # fmt: skip
        engine.add_request(request_id, prompt, params, outbox=outbox, final_only=True)
    while _reading(engine):
        engine.step(collect=False)
    engine.step(collect=False)
    before = {name: getattr(metrics, name) for name in COUNTS}
    accepted_at, drafts_at = list(metrics.accepted_at), list(metrics.drafts_at)
    made, steps, plain_s = metrics.generation_tokens, 0, 0.0
    draft_s, verify_s, visited = metrics.draft_seconds, metrics.verify_seconds, routes.visited()
    routed = routes.routed_steps
    began = watch.seconds
    end = made + len(prompts) * tokens
    while metrics.generation_tokens < end:
        if watch.over:
            watch.stop()
            yield
            watch.start()
        verified, busy = metrics.verify_steps, metrics.forward_seconds + metrics.sample_seconds
        engine.step(collect=False)
        steps += 1
        if metrics.verify_steps == verified:
            plain_s += metrics.forward_seconds + metrics.sample_seconds - busy
    now = watch.seconds
    experts = (routes.visited() - visited) * steps / max(1, routes.routed_steps - routed)
    timed = Timed(
        seconds=now - began,
        tokens=metrics.generation_tokens - made,
        whole_seconds=now,
        whole_tokens=metrics.generation_tokens - first,
        steps=steps,
        draft_s=metrics.draft_seconds - draft_s,
        verify_s=metrics.verify_seconds - verify_s,
        plain_s=plain_s,
        counts={name: getattr(metrics, name) - before[name] for name in COUNTS},
        accepted_at=[a - b for a, b in zip(metrics.accepted_at, accepted_at)],
        drafts_at=[a - b for a, b in zip(metrics.drafts_at, drafts_at)],
        experts=round(experts),
        made=[],
    )
    outputs = [engine.abort_request(request_id) for request_id in ids]
    broken = [output.error for output in outputs if output is not None and output.error]
    if broken or None in outputs:
        raise ValueError(f"a request of {arm.name} ended before its time: {broken or 'it was finished'}")
    return timed._replace(made=[output.outputs[0].token_ids for output in outputs if output is not None])


class Stopwatch:
    """Seconds of all turns so far. over: whether this one has lasted turn_s."""

    def __init__(self, turn_s: float):
        self.turn_s, self._before = turn_s, 0.0
        self.start()

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> None:
        self._before = self.seconds

    @property
    def seconds(self) -> float:
        return self._before + time.perf_counter() - self._began

    @property
    def over(self) -> bool:
        return time.perf_counter() - self._began >= self.turn_s


def _reading(engine: Engine) -> bool:
    """Whether some request still has no token."""
    everybody = (*engine.scheduler.waiting, *engine.scheduler.running)
    return any(seq.num_tokens == seq.num_prompt_tokens for seq in everybody)


def interleave(
    arms: list[Arm], sets: list[list[list[int]]], tokens: int, most: int, turn_s: float = math.inf
) -> dict[str, list[Timed]]:
    """Runs of every arm by its name, one for each set of prompts.

    All arms run a set side by side, in turns of turn_s seconds and in an order that changes, so that whatever else the machine
    does falls on all. By default a turn is a whole run: a GPU drifts little, and would be found at work for another arm.
    Before that each warms up (fixed depths in short, but adaptive depth learns from it).
    """
    for arm in arms:
        learns = arm.speculates and arm.depth is None
        decode(arm, sets[0], tokens if learns else max(1, tokens // 4), most)
    runs: dict[str, list[Timed]] = {arm.name: [] for arm in arms}
    order = random.Random(0)
    for i, prompts in enumerate(sets):
        under_way = {arm.name: decoding(arm, prompts, tokens, most, i * len(prompts), turn_s) for arm in arms}
        while under_way:
            for name in order.sample(list(under_way), len(under_way)):
                try:
                    next(under_way[name])
                except StopIteration as end:
                    runs[name].append(end.value)
                    del under_way[name]
    return runs


def summary(runs: list[Timed], plain: list[Timed], layers: int) -> dict[str, Any]:
    """The measured part of a row. layers: how many of the target's have experts.

    tok_s, plain_tok_s, bound_tok_s: medians; speedup: tok_s over that of plain decoding with the same prompts, beside it, and
    bound_share: over the bound of the same run, both with quartiles.
    acceptance: drafts kept per draft; acceptance_at: the same for each place. distinct_experts: visited in one layer by one
    step (null without experts). draft_ms, verify_ms: of one step, as a mean; steps without drafts verify nothing but
    count. same_as_plain: share of requests whose tokens are plain decoding's as far as both go.
    """
    total = {name: sum(run.counts[name] for run in runs) for name in COUNTS}
    steps = sum(run.steps for run in runs)
    drafts, kept = ([sum(c) for c in zip(*columns)] for columns in _places(runs))
    pairs = [(a, b) for run, other in zip(runs, plain) for a, b in zip(run.made, other.made)]
    return {
        "tok_s": median(run.tok_s for run in runs),
        "plain_tok_s": median(run.tok_s for run in plain),
        "bound_tok_s": median(run.bound for run in runs),
        "acceptance": total["accepted_tokens"] / total["draft_tokens"] if total["draft_tokens"] else None,
        "distinct_experts": sum(run.experts for run in runs) / (layers * steps) if layers else None,
        "speedup": timing(run.tok_s / other.tok_s for run, other in zip(runs, plain)),
        "bound_share": timing(run.tok_s / run.bound for run in runs),
        "whole_tok_s": median(run.whole_tokens / run.whole_seconds for run in runs),
        "draft_ms": 1e3 * sum(run.draft_s for run in runs) / steps,
        "verify_ms": 1e3 * sum(run.verify_s + run.plain_s for run in runs) / steps,
        "plain_ms": 1e3 * sum(run.plain_s for run in plain) / sum(run.steps for run in plain),
        "tokens_per_verify": total["verified_tokens"] / total["verifications"] if total["verifications"] else None,
        "mean_depth": total["draft_tokens"] / sum(len(run.made) * run.steps for run in runs),
        "verifying_steps": total["verify_steps"] / steps,
        "acceptance_at": [k / n for k, n in zip(kept, drafts) if n],
        "same_as_plain": sum(a[: len(b)] == b[: len(a)] for a, b in pairs) / len(pairs),
    }  # fmt: skip


def _places(runs: list[Timed]) -> tuple[list[list[int]], list[list[int]]]:
    return [run.drafts_at for run in runs], [run.accepted_at for run in runs]


def against_best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How adaptive depth compares to the better of no speculation and the best fixed depth, for each group of rows that
    differ in depth only; and how near the fastest arm comes to its bound.

    Compared are times plain decoding, each against the plain run beside it. The best of several depths that were measured with
    noise is a little too good. placebo: depth 0, which should be plain decoding, if it was measured.
    """
    found = []
    for group in dict.fromkeys(map(group_of, rows)):
        mine = [row for row in rows if group_of(row) == group]
        best, free = best_fixed(mine), [row for row in mine if row["adaptive"]]
        if best is None or not free:
            continue
        times = best["speedup"]["median"]
        found.append({
            "what": "adaptive depth over the better of plain and the best fixed depth",
            **{key: best.get(key) for key in GROUP},
            "best_depth": best["depth"] if times > 1 else 0,
            "ratio": free[0]["speedup"]["median"] / max(1.0, times),
            "best_speedup": times,
            "best_of_its_bound": best["bound_share"]["median"],
            "placebo": next((row["speedup"]["median"] for row in mine if row["depth"] == 0), None),
        })  # fmt: skip
    return found


GROUP = (
    "model",
    "domain",
    "requests",
    "draft",
    "forced_acceptance",
    "draft_layers",
    "draft_cost",
)  # rows alike in these differ in depth only


def group_of(row: dict[str, Any]) -> tuple:
    return tuple(row.get(key) for key in GROUP)


def best_fixed(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The fastest row of a fixed depth above 0; None if there is none."""
    return max((row for row in rows if row["depth"]), key=lambda row: row["speedup"]["median"], default=None)
