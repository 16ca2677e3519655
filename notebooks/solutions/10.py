"""Reference solutions of notebook 10, and answers that must be refused. Injected by tests/test_exercises.py."""

SOLUTIONS = {
    "10.1": """
def hit_tokens(cached, salt, prompt, block_size):
    best = 0
    for other_salt, tokens in cached:
        if other_salt != salt:
            continue
        same = 0
        while same < min(len(tokens), len(prompt)) and tokens[same] == prompt[same]:
            same += 1
        same = min(same, len(prompt) - 1)
        best = max(best, same // block_size * block_size)
    return best
""",
    "10.2": """
def before_write(table, index, refs, free):
    old = table[index]
    if refs[old] == 1:
        return None
    new = free.pop()
    refs[old] -= 1
    refs[new] = 1
    table[index] = new
    return old, new
""",
}

WRONG = {
    "10.1": [
        # all of the prompt may be cached
        """
def hit_tokens(cached, salt, prompt, block_size):
    best = 0
    for other_salt, tokens in cached:
        same = 0
        while other_salt == salt and same < min(len(tokens), len(prompt)) and tokens[same] == prompt[same]:
            same += 1
        best = max(best, same // block_size * block_size)
    return best
""",
        # parts of blocks count
        """
def hit_tokens(cached, salt, prompt, block_size):
    best = 0
    for other_salt, tokens in cached:
        same = 0
        while other_salt == salt and same < min(len(tokens), len(prompt) - 1) and tokens[same] == prompt[same]:
            same += 1
        best = max(best, same)
    return best
""",
        # the salt is ignored
        """
def hit_tokens(cached, salt, prompt, block_size):
    best = 0
    for _, tokens in cached:
        same = 0
        while same < min(len(tokens), len(prompt) - 1) and tokens[same] == prompt[same]:
            same += 1
        best = max(best, same // block_size * block_size)
    return best
""",
        # a block counts wherever it stands
        """
def hit_tokens(cached, salt, prompt, block_size):
    blocks = lambda tokens: [tuple(tokens[i : i + block_size]) for i in range(0, len(tokens) - block_size + 1, block_size)]
    known = {block for s, tokens in cached if s == salt for block in blocks(tokens)}
    hits = 0
    for block in blocks(prompt[:-1]):
        if block not in known:
            break
        hits += block_size
    return hits
""",
    ],
    "10.2": [
        # writes where others read
        """
def before_write(table, index, refs, free):
    return None
""",
        # copies even what nobody else owns
        """
def before_write(table, index, refs, free):
    old, new = table[index], free.pop()
    refs[old] -= 1
    refs[new] = 1
    table[index] = new
    return old, new
""",
        # the old block keeps an owner too many, so it is never freed
        """
def before_write(table, index, refs, free):
    old = table[index]
    if refs[old] == 1:
        return None
    new = free.pop()
    refs[new] = 1
    table[index] = new
    return old, new
""",
        # the block table still leads to the shared block
        """
def before_write(table, index, refs, free):
    old = table[index]
    if refs[old] == 1:
        return None
    new = free.pop()
    refs[old] -= 1
    refs[new] = 1
    return old, new
""",
    ],
}
