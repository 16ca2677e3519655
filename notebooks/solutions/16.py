"""Reference solutions of notebook 16, and answers that must be refused. Injected by tests/test_exercises.py."""

SOLUTIONS = {
    "16.1": """
def residual(p, q):
    rest = [max(0, a - b) for a, b in zip(p, q)]
    return [x / sum(rest) for x in rest] if sum(rest) > 0 else p
""",
    "16.2": """
def fits(counts, wanted):
    n, total, cells = sum(counts), 0, 0
    for count, chance in zip(counts, wanted):
        if chance == 0:
            if count:
                return False
            continue
        total += (count - n * chance) ** 2 / (n * chance)
        cells += 1
    free = cells - 1
    return total < free + 4 * (2 * free) ** 0.5
""",
}

WRONG = {
    "16.1": [
        # the first seeded bug: redrawn from p
        """
def residual(p, q):
    return p
""",
        # not normalised
        """
def residual(p, q):
    return [max(0, a - b) for a, b in zip(p, q)]
""",
        # the distance, not what is left
        """
def residual(p, q):
    rest = [abs(a - b) for a, b in zip(p, q)]
    return [x / sum(rest) for x in rest] if sum(rest) > 0 else p
""",
        # the wrong way round
        """
def residual(p, q):
    rest = [max(0, b - a) for a, b in zip(p, q)]
    return [x / sum(rest) for x in rest] if sum(rest) > 0 else p
""",
        # divides by zero where p and q are equal
        """
def residual(p, q):
    rest = [max(0, a - b) for a, b in zip(p, q)]
    return [x / sum(rest) for x in rest]
""",
        "residual = [0.5, 0.5]",
    ],
    "16.2": [
        # believes everybody
        """
def fits(counts, wanted):
    return True
""",
        # believes nobody
        """
def fits(counts, wanted):
    return False
""",
        # a level of 5 %: one right run in twenty is refused
        """
def fits(counts, wanted):
    n = sum(counts)
    cells = [(c, w) for c, w in zip(counts, wanted) if w]
    total = sum((c - n * w) ** 2 / (n * w) for c, w in cells)
    free = len(cells) - 1
    return total < free + 1.7 * (2 * free) ** 0.5
""",
        # compares shares, whatever the number of runs
        """
def fits(counts, wanted):
    n = sum(counts)
    return max(abs(c / n - w) for c, w in zip(counts, wanted)) < 0.05
""",
        # expects the probabilities themselves: the number of runs is forgotten
        """
def fits(counts, wanted):
    total = sum((c - w) ** 2 / w for c, w in zip(counts, wanted) if w)
    return total < 40
""",
        # impossible pairs have no chance to be divided by
        """
def fits(counts, wanted):
    n = sum(counts)
    total = sum((c - n * w) ** 2 / (n * w) for c, w in zip(counts, wanted))
    return total < 40
""",
        # leaves out what is impossible, although it came
        """
def fits(counts, wanted):
    cells = [(c, w) for c, w in zip(counts, wanted) if w]
    n, free = sum(c for c, _ in cells), len(cells) - 1
    total = sum((c - n * w) ** 2 / (n * w) for c, w in cells)
    return total < free + 4 * (2 * free) ** 0.5
""",
        # looks at the first token alone
        """
def fits(counts, wanted):
    n = sum(counts)
    mine = [sum(counts[i : i + 4]) for i in range(0, 16, 4)]
    its = [n * sum(wanted[i : i + 4]) for i in range(0, 16, 4)]
    return sum((c - w) ** 2 / w for c, w in zip(mine, its) if w) < 20
""",
    ],
}
