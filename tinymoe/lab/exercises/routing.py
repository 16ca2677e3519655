"""Exercises on routing and load."""

import math
import random

from tinymoe.lab.exercises.judge import Verdict, agree

NAN = math.nan
FLOAT32 = 1e-5  # an answer may compute in float32, as the engine does


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
