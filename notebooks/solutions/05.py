"""Reference solutions of notebook 05, and answers that must be refused. Injected by tests/test_exercises.py."""

SOLUTIONS = {
    "05.1": """
def align_block_size(ids, num_experts, block_m):
    rows, experts = [], []
    for expert in range(num_experts):
        mine = [pair for pair, chosen in enumerate(ids) if chosen == expert]
        mine += [None] * (-len(mine) % block_m)
        rows += mine
        experts += [expert] * (len(mine) // block_m)
    return rows, experts
""",
}

WRONG = {
    "05.1": [
        # not stable: places are filled from the end of each expert's room, so later pairs come first
        """
def align_block_size(ids, num_experts, block_m):
    rows, experts = [], []
    for expert in range(num_experts):
        mine = [pair for pair, chosen in enumerate(ids) if chosen == expert][::-1]
        mine += [None] * (-len(mine) % block_m)
        rows += mine
        experts += [expert] * (len(mine) // block_m)
    return rows, experts
""",
        # the running sum counts from the wrong side: an expert begins where it ends
        """
def align_block_size(ids, num_experts, block_m):
    sizes = [-(-ids.count(expert) // block_m) * block_m for expert in range(num_experts)]
    free = [sum(sizes[: expert + 1]) for expert in range(num_experts)]
    rows = [None] * (2 * sum(sizes))
    for pair, expert in enumerate(ids):
        rows[free[expert]] = pair
        free[expert] += 1
    experts = [expert for expert in range(num_experts) for _ in range(sizes[expert] // block_m)]
    return rows[: sum(sizes)], experts
""",
        # the padding is forgotten between experts: only the end is filled up, and blocks hold two experts
        """
def align_block_size(ids, num_experts, block_m):
    rows = sorted(range(len(ids)), key=lambda pair: ids[pair])
    rows += [None] * (-len(rows) % block_m)
    experts = [ids[rows[start]] for start in range(0, len(rows), block_m)]
    return rows, experts
""",
        # a whole block of padding for an expert that is just full, or has no pair at all
        """
def align_block_size(ids, num_experts, block_m):
    rows, experts = [], []
    for expert in range(num_experts):
        mine = [pair for pair, chosen in enumerate(ids) if chosen == expert]
        mine += [None] * (block_m - len(mine) % block_m)
        rows += mine
        experts += [expert] * (len(mine) // block_m)
    return rows, experts
""",
        # rounded down: what does not fill a block is dropped
        """
def align_block_size(ids, num_experts, block_m):
    rows, experts = [], []
    for expert in range(num_experts):
        mine = [pair for pair, chosen in enumerate(ids) if chosen == expert]
        mine = mine[: len(mine) // block_m * block_m]
        rows += mine
        experts += [expert] * (len(mine) // block_m)
    return rows, experts
""",
        # padded with pair 0 instead of None: it would be computed, and stored, several times
        """
def align_block_size(ids, num_experts, block_m):
    rows, experts = [], []
    for expert in range(num_experts):
        mine = [pair for pair, chosen in enumerate(ids) if chosen == expert]
        mine += [0] * (-len(mine) % block_m)
        rows += mine
        experts += [expert] * (len(mine) // block_m)
    return rows, experts
""",
        # the padding comes first
        """
def align_block_size(ids, num_experts, block_m):
    rows, experts = [], []
    for expert in range(num_experts):
        mine = [pair for pair, chosen in enumerate(ids) if chosen == expert]
        mine = [None] * (-len(mine) % block_m) + mine
        rows += mine
        experts += [expert] * (len(mine) // block_m)
    return rows, experts
""",
    ],
}
