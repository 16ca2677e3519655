"""Reference solutions of notebook 07, and answers that must be refused. Injected by tests/test_exercises.py."""

SOLUTIONS = {
    "07.1": """
def sort_pairs(ids, num_experts, block_m):
    counts = [0] * num_experts
    for expert in ids:
        if expert >= 0:
            counts[expert] += 1
    offsets = [0]
    for size in counts:
        offsets.append(offsets[-1] + size)
    free, order = list(offsets), [None] * offsets[-1]
    for pair, expert in enumerate(ids):
        if expert >= 0:
            order[free[expert]] = pair
            free[expert] += 1
    tiles = []
    for expert in range(num_experts):
        tiles += [(expert, row) for row in range(offsets[expert], offsets[expert + 1], block_m)]
    return order, offsets, tiles
""",
    "07.2": """
def choose(tokens, num_experts, top_k):
    if tokens * top_k <= num_experts:  # hardly any expert is visited twice: nothing to gain by sorting
        return "few"
    return "grouped16" if tokens * top_k <= 6 * num_experts else "grouped64"
""",
}

START = """
def sort_pairs(ids, num_experts, block_m):
    kept = [pair for pair, expert in enumerate(ids) if expert >= 0]
    order = sorted(kept, key=lambda pair: ids[pair])
    counts = [ids.count(expert) for expert in range(num_experts)]
    offsets = [sum(counts[:expert]) for expert in range(num_experts + 1)]
"""

WRONG = {
    "07.1": [
        # not stable: an expert's later pairs come first
        START
        + """
    order = sorted(reversed(kept), key=lambda pair: ids[pair])
    tiles = [(e, row) for e in range(num_experts) for row in range(offsets[e], offsets[e + 1], block_m)]
    return order, offsets, tiles
""",
        # pairs of nobody are sorted in front
        START
        + """
    order = sorted(range(len(ids)), key=lambda pair: ids[pair])
    tiles = [(e, row) for e in range(num_experts) for row in range(offsets[e], offsets[e + 1], block_m)]
    return order, offsets, tiles
""",
        # all rows are cut into tiles, so that a tile may hold two experts
        START
        + """
    tiles = [(ids[order[row]], row) for row in range(0, len(order), block_m)]
    return order, offsets, tiles
""",
        # only full tiles: the rest of an expert's rows is served by nobody
        START
        + """
    tiles = [(e, offsets[e] + i * block_m) for e in range(num_experts) for i in range(counts[e] // block_m)]
    return order, offsets, tiles
""",
        # an expert without tokens gets a tile, and its weights are read for nothing
        START
        + """
    tiles = [(e, offsets[e] + i) for e in range(num_experts) for i in range(0, max(1, counts[e]), block_m)]
    return order, offsets, tiles
""",
        # the end of the last expert is missing
        START
        + """
    tiles = [(e, row) for e in range(num_experts) for row in range(offsets[e], offsets[e + 1], block_m)]
    return order, offsets[:-1], tiles
""",
    ],
    "07.2": [
        # one path for all, the one that invariant mode takes
        "def choose(tokens, num_experts, top_k): return 'grouped64'",
        # never sorts: each pair reads its expert's weights anew
        "def choose(tokens, num_experts, top_k): return 'few' if tokens <= 64 else 'grouped64'",
        # always sorts, and thinks of small tiles only
        "def choose(tokens, num_experts, top_k): return 'few' if tokens <= 8 else 'grouped16'",
        # large tiles as soon as anything is sorted: most of their rows are empty then
        "def choose(tokens, num_experts, top_k): return 'few' if tokens <= 8 else 'grouped64'",
        # all experts on all tokens: arithmetic grows with tokens * experts
        "def choose(tokens, num_experts, top_k): return 'few' if tokens <= 8 else 'dense64'",
        # counts tokens where an expert's rows are meant
        """
def choose(tokens, num_experts, top_k):
    rows = tokens
    return "few" if rows <= 1 else "grouped16" if rows <= 6 else "grouped64"
""",
        # a regime, not a path
        "def choose(tokens, num_experts, top_k): return 'few' if tokens <= 8 else 'some'",
    ],
}
