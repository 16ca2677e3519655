"""Exercises on routing, load, and the way through the experts."""

import math
import random
from collections.abc import Sequence
from typing import Any

from tinymoe.lab.exercises.judge import Verdict, agree, attempt, shown

NAN = math.nan
FLOAT32 = 1e-5  # an answer may compute in float32, as the engine does
EXPERTS, TOP_K = 16, 2  # of the recorded layers: the bundled model's routes at another model's widths
MEAN, WORST = 0.02, 0.10


def choose(answer) -> Verdict:
    """01.1: route(logits, k) -> (the k best experts, best first; their weights, which sum to 1).

    Equal logits: the lower id first. NaN is below every number: chosen only when the numbers are used up, with weight 0;
    where all are NaN, the weights are equal. Tensors are taken for the lists that they hold.
    """

    def reference(logits: list[float], k: int) -> tuple[list[int], list[float]]:
        numbers = sorted((-x, expert) for expert, x in enumerate(logits) if not math.isnan(x))
        last = [expert for expert, x in enumerate(logits) if math.isnan(x)]
        ids = ([expert for _, expert in numbers] + last)[:k]
        if not numbers:
            return ids, [1 / k] * k
        parts = [0.0 if math.isnan(logits[x]) else math.exp(logits[x] + numbers[0][0]) for x in ids]
        total = math.fsum(parts)
        return ids, [p / total for p in parts]

    def listed(logits: list[float], k: int):
        got = answer(logits, k)
        if not isinstance(got, list | tuple):
            return got
        return tuple(part.tolist() if hasattr(part, "tolist") else part for part in got)

    cases = [([0.1, 0.7, 0.4], 2), ([0.5, 0.5, 0.5], 2), ([-1.0, NAN, -2.0], 2), ([NAN, -3.0], 2)]
    cases += [([1000.0, 999.0, -1000.0], 3), ([NAN, NAN, NAN], 2)]
    r = random.Random(1)
    while len(cases) < 60:
        logits = [r.choice([r.gauss(0, 2), r.randint(-2, 2) / 2, -1.0, NAN]) for _ in range(r.randint(2, 8))]
        cases.append((logits, r.randint(1, len(logits))))
    return agree("route", listed if callable(answer) else answer, reference, cases, FLOAT32)


def imbalance(answer) -> Verdict:
    """02.1: imbalance(counts) -> (max/mean, entropy in bits) of the tokens per expert; an idle expert adds no entropy."""

    def reference(counts: list[int]) -> tuple[float, float]:
        total = math.fsum(counts)
        shares = [n / total for n in counts if n]
        return max(counts) * len(counts) / total, -math.fsum(p * math.log2(p) for p in shares)

    r = random.Random(2)
    cases = [([4, 0, 0, 0],), ([3, 3],), ([7],)]
    while len(cases) < 50:
        counts = [r.choice([0, r.randint(0, 9), r.randint(0, 400)]) for _ in range(r.randint(2, 16))]
        if any(counts):
            cases.append((counts,))
    return agree("imbalance", answer, reference, cases)


def path(answer, recorded: Sequence[dict[str, Any]]) -> Verdict:
    """07.2: choose(tokens, num_experts, top_k) -> the name of an expert path, judged by what was recorded on a GPU.

    recorded: the controls of a selection results file. Regret is the time of the chosen path over that of the fastest, less
    one, for each recorded batch: at most MEAN on average and WORST anywhere.
    """
    if not callable(answer):
        return Verdict(False, f"write a function choose, got {type(answer).__name__}")
    batches: dict[tuple[int, float], dict[str, float]] = {}
    for row in recorded:
        if row["kind"] == "cost":
            batches.setdefault((row["tokens"], row["skew"]), {})[row["path"]] = row["us"]
    steps = [(row["tokens"], row["us"]) for row in recorded if row["kind"] == "step"]
    if not batches or not steps:
        return Verdict(False, "the recording holds no costs; it needs the controls of selection_h200.json")
    chosen: dict[int, Any] = {}
    for tokens in sorted({tokens for tokens, _ in batches} | {tokens for tokens, _ in steps}):
        call = f"choose({tokens}, {EXPERTS}, {TOP_K})"
        chosen[tokens], failure = attempt(answer, tokens, EXPERTS, TOP_K)
        if failure:
            return Verdict(False, f"{call} {failure}")
        times = [us for (count, _), us in batches.items() if count == tokens] or [
            us for count, us in steps if count == tokens
        ]
        if not isinstance(chosen[tokens], str) or chosen[tokens] not in times[0]:
            measured = ", ".join(times[0])
            return Verdict(False, f"{call} gave {shown(chosen[tokens])}; measured there: {measured}")
    regrets = {cell: us[chosen[cell[0]]] / min(us.values()) - 1 for cell, us in batches.items()}
    cell = max(regrets, key=regrets.__getitem__)
    mean, worst = sum(regrets.values()) / len(regrets), regrets[cell]
    if worst > WORST:
        us, (tokens, skew) = batches[cell], cell
        best = min(us, key=us.__getitem__)
        return Verdict(
            False,
            f"choose({tokens}, {EXPERTS}, {TOP_K}) gave {chosen[tokens]!r}: {us[chosen[tokens]]:.1f} us with routes of skew "
            f"{skew:g}, where {best!r} took {us[best]:.1f}; nowhere more than {WORST:.0%} above the fastest is wanted",
        )
    if mean > MEAN:
        return Verdict(
            False,
            f"mean regret {mean:.1%} over {len(regrets)} recorded batches; at most {MEAN:.0%} is wanted",
        )
    served = sum(us[chosen[tokens]] / min(us.values()) - 1 for tokens, us in steps) / len(steps)
    return Verdict(
        True,
        f"mean regret {mean:.1%} over {len(regrets)} recorded batches, worst {worst:.1%}; "
        f"on {len(steps)} steps of the bundled model {served:.1%}",
    )
