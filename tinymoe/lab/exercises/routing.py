"""Exercises on routing and load."""

import math
import random

from tinymoe.lab.exercises.judge import Verdict, agree


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
