"""Reference solutions of notebook 09, and answers that must be refused. Injected by tests/test_exercises.py.

09.2 asks for a number that depends on the notebook's own recording: `events` and `at` are variables of the notebook.
"""

POOL = """
class Pool:
    def __init__(self, num_blocks):
        self.free_blocks = list(range(num_blocks - 1, -1, -1))
        self.refs = [0] * num_blocks

    def alloc(self):
        if not self.free_blocks:
            return None
        block = self.free_blocks.pop()
        self.refs[block] = 1
        return block

    def share(self, block):
        self.refs[block] += 1
        return self.refs[block]

    def free(self, block):
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self.free_blocks.append(block)
            return True
        return False
"""

SOLUTIONS = {
    "09.1": POOL,
    "09.2": "next_block = next(e.block for e in events[at + 1 :] if e.kind == 'alloc')",
}

WRONG = {
    "09.1": [
        POOL.replace("if self.refs[block] == 0:", "if True:"),  # forgets the other owners
        POOL.replace("range(num_blocks - 1, -1, -1)", "range(num_blocks)").replace(
            "pop()", "pop(0)"
        ),  # first in, first out
        POOL.replace("if not self.free_blocks:", "if False:"),  # no answer to an empty pool
    ],
    "09.2": [
        "next_block = -1",
        "next_block = next(e.block for e in events[: at + 1] if e.kind == 'alloc')",
        "next_block = 'the lowest'",
    ],
}
