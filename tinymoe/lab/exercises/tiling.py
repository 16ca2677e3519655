"""Exercises on the kernels of a Mixture-of-Experts layer."""

import random

from tinymoe.lab.exercises.judge import Verdict, agree


def sort_pairs(answer) -> Verdict:
    """07.1: sort_pairs(ids, num_experts, block_m) -> (order, offsets, tiles), as kernels/sort_tokens.py lays them out.

    ids: the expert of each pair, -1 for a pair of nobody. order: the pairs sorted by expert, stable, without those of
    nobody. offsets: E + 1 row numbers. tiles: (expert, first row), each tile with rows of one expert, at most block_m.
    """

    def reference(ids: list[int], num_experts: int, block_m: int) -> tuple[list, list, list]:
        kept = sorted((expert, pair) for pair, expert in enumerate(ids) if expert >= 0)
        offsets = [sum(expert < e for expert, _ in kept) for e in range(num_experts + 1)]
        tiles = [
            (expert, row) for row, (expert, _) in enumerate(kept) if (row - offsets[expert]) % block_m == 0
        ]
        return [pair for _, pair in kept], offsets, tiles

    cases = [([1, 0, 1], 2, 16), ([2, 2, 2, 0], 3, 2), ([0, -1, 1], 2, 2), ([], 2, 4), ([-1, -1], 3, 4)]
    r = random.Random(7)
    while len(cases) < 60:
        experts = r.randint(1, 6)
        ids = [r.choice([r.randrange(experts), experts - 1, -1]) for _ in range(r.randint(1, 14))]
        cases.append((ids, experts, r.choice([1, 2, 4])))
    return agree("sort_pairs", answer, reference, cases)
