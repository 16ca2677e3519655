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

import time
from collections import deque
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
    """Run the prompts, greedily, from a cold prefix cache, until len(prompts) * tokens tokens have been timed. most: the
    longest sequence that the engine has pages for, in tokens. seed: of the first request, one more for each other; only a
    coin (tinymoe.bench.spec.synthetic) asks for it."""
    engine = arm.engine
    engine.reset_prefix_cache()
    outbox: deque = deque()
    start = time.perf_counter()
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
    began = time.perf_counter()
    end = made + len(prompts) * tokens
    while metrics.generation_tokens < end:
        verified, busy = metrics.verify_steps, metrics.forward_seconds + metrics.sample_seconds
        engine.step(collect=False)
        steps += 1
        if metrics.verify_steps == verified:
            plain_s += metrics.forward_seconds + metrics.sample_seconds - busy
    now = time.perf_counter()
    experts = (routes.visited() - visited) * steps / max(1, routes.routed_steps - routed)
    timed = Timed(
        seconds=now - began,
        tokens=metrics.generation_tokens - made,
        whole_seconds=now - start,
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


def _reading(engine: Engine) -> bool:
    """Whether some request still has no token."""
    everybody = (*engine.scheduler.waiting, *engine.scheduler.running)
    return any(seq.num_tokens == seq.num_prompt_tokens for seq in everybody)


class Runs(NamedTuple):
    """Runs of one arm, one for each set of prompts, and what plain decoding did with the same prompts right before and after
    each of them, as one run."""

    own: list[Timed]
    plain: list[Timed]


BESIDE = 2  # arms between two runs of plain decoding


def interleave(arms: list[Arm], sets: list[list[list[int]]], tokens: int, most: int) -> dict[str, Runs]:
    """Runs of every arm by its name; the first arm is plain decoding. All arms run a set in turn, in one direction and back,
    with plain decoding before and after every two of them: a machine drifts, and what is compared should stand side by
    side. Before that each warms up (fixed depths in short, but adaptive depth learns from it)."""
    plain, *others = arms
    for arm in arms:
        learns = arm.speculates and arm.depth is None
        decode(arm, sets[0], tokens if learns else max(1, tokens // 4), most)
    runs = {arm.name: Runs([], []) for arm in others}
    for i, prompts in enumerate(sets):
        turn, seed = others[:: 1 - 2 * (i % 2)], i * len(prompts)
        after = decode(plain, prompts, tokens, most, seed)
        for start in range(0, len(turn), BESIDE):
            part, before = turn[start : start + BESIDE], after
            for arm in part:
                runs[arm.name].own.append(decode(arm, prompts, tokens, most, seed))
            after = decode(plain, prompts, tokens, most, seed)
            for arm in part:
                runs[arm.name].plain.append(together(before, after))
    return runs


def together(a: Timed, b: Timed) -> Timed:
    """Two runs of one arm with the same prompts as one."""
    summed = (
        "seconds",
        "tokens",
        "whole_seconds",
        "whole_tokens",
        "steps",
        "draft_s",
        "verify_s",
        "plain_s",
        "experts",
    )
    return a._replace(**{name: getattr(a, name) + getattr(b, name) for name in summed})


def summary(runs: list[Timed], plain: list[Timed], layers: int) -> dict[str, Any]:
    """The measured part of a row. layers: how many of the target's have experts.

    tok_s, plain_tok_s, bound_tok_s: medians; speedup: tok_s over that of plain decoding beside it, and bound_share: over the
    bound of the same run, both with quartiles.
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

    Compared are times plain decoding, each against plain runs beside it. The best of several depths that were measured with
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
