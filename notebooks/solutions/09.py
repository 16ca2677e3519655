"""Reference solutions of notebook 09, and answers that must be refused. Injected by tests/test_exercises.py.

09.2 asks for a number that depends on the notebook's own recording: `events` and `at` are variables of the notebook.
"""

SOLUTIONS = {
    "09.1": """
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
""",
    "09.2": "next_block = next(e.block for e in events[at + 1 :] if e.kind == 'alloc')",
}

WRONG = {
    "09.1": [
        # forgets the other owners
        """
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
        self.free_blocks.append(block)
        return True
""",
        # the block that has been free longest goes first
        """
class Pool:
    def __init__(self, num_blocks):
        self.free_blocks = list(range(num_blocks))
        self.refs = [0] * num_blocks

    def alloc(self):
        if not self.free_blocks:
            return None
        block = self.free_blocks.pop(0)
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
""",
        # no answer to an empty pool
        """
class Pool:
    def __init__(self, num_blocks):
        self.free_blocks = list(range(num_blocks - 1, -1, -1))
        self.refs = [0] * num_blocks

    def alloc(self):
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
        return self.refs[block] == 0
""",
    ],
    "09.2": [
        "next_block = -1",
        "next_block = next(e.block for e in events[: at + 1] if e.kind == 'alloc')",
        "next_block = 'the lowest'",
    ],
}
