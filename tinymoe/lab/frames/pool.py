"""The page pool as the events tell it: who owns which block, what is cached, which block hangs under which.

An owner that leaves a shared block makes no event (only the last owner's leaving does, as `free`), so `finish` and
`preempt` take the sequence out of every block that others hold; what it holds alone stays until `free` says so.
"""

from tinymoe.core.trace import Event

KINDS = frozenset(
    [
        "arrive",
        "admit",
        "chunk",
        "preempt",
        "fork",
        "finish",
        "alloc",
        "share",
        "cow",
        "free",
        "evict",
        "hash",
        "hit",
        "undo",
        "step",
    ]
)
NONE = -1  # a table entry without a block, a node without a parent
LOST = -2  # parent of a node whose parent was evicted before it


class Pool:
    """Block tables, cached blocks and the prefix index after the events applied so far."""

    def __init__(self):
        self.tables: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}  # tokens of each sequence whose KV is in the pages
        self.freed: dict[int, None] = {}  # blocks given back and not in the index, in that order
        self.cached: dict[int, None] = {}  # blocks without an owner that the index keeps, longest kept first
        self.nodes: dict[
            int, tuple[int, int, int]
        ] = {}  # block -> (parent, number of its salt, depth in blocks)
        self.salts: dict[int, int] = {}  # salt -> its number, in order of appearance
        self._copies: list[tuple[int, int, int, int]] = []  # (step, seq, index, old) of each copy-on-write
        self._finished: set[int] = set()  # until the last of their blocks is free

    def apply(self, event: Event) -> None:
        """Raises nothing for events it does not know: they do not concern pages."""
        match event.kind:
            case "arrive":
                self.tables.setdefault(event.seq, [])
                self.computed.setdefault(event.seq, 0)
            case "admit":
                self.computed[event.seq] = event.cached
            case "chunk":
                self.computed[event.seq] = event.stop
            case "undo":
                self._undo(event)
            case "fork":
                self.tables[event.child] = list(self.tables.get(event.parent, []))
                self.computed[event.child] = self.computed.get(event.parent, 0)
            case "alloc" | "share":
                self._enter(event.seq, event.data["index"], event.block)
            case "cow":
                self._copies.append((event.step, event.seq, event.data["index"], event.old))
                self._enter(event.seq, event.data["index"], event.new)
            case "preempt" | "finish":
                self._leave(event.seq, finished=event.kind == "finish")
            case "free":
                self._clear(event.block, event.cached)
            case "evict":
                self._drop(event.block)
            case "hash":
                self._index(event)

    def owners(self) -> dict[int, list[int]]:
        """block -> the sequences whose tables name it."""
        owners: dict[int, list[int]] = {}
        for seq, table in self.tables.items():
            for block in table:
                if block != NONE and seq not in owners.setdefault(block, []):
                    owners[block].append(seq)
        return owners

    def free(self, total: int) -> list[int]:
        """Free blocks as the engine hands them out: those given back, the last one first, then those never used."""
        taken = self.owners().keys() | self.cached.keys()
        never = [b for b in range(total) if b not in taken and b not in self.freed]
        return [b for b in reversed(self.freed) if b not in taken] + never

    def _index(self, event: Event) -> None:
        """A block enters the index. Its parent may be missing there: evicted, or a copy of a block that came first."""
        salt = self.salts.setdefault(event.salt, len(self.salts))
        parent = event.parent if event.parent in self.nodes or event.parent == NONE else LOST
        depth = self.nodes[parent][2] + 1 if parent in self.nodes else 0
        if parent == LOST:  # its own place in a block table says how deep it hangs
            depth = max((t.index(event.block) for t in self.tables.values() if event.block in t), default=0)
        self.nodes[event.block] = (parent, salt, depth)

    def _undo(self, event: Event) -> None:
        """The pages taken in this step were freed just before; a copied page is the shared one again."""
        self.computed[event.seq] = event.start
        for step, seq, index, old in self._copies:
            if (step, seq) == (event.step, event.seq):
                self._enter(seq, index, old)

    def _enter(self, seq: int, index: int, block: int) -> None:
        table = self.tables.setdefault(seq, [])
        table.extend([NONE] * (index + 1 - len(table)))
        table[index] = block
        self.freed.pop(block, None)
        self.cached.pop(block, None)

    def _leave(self, seq: int, finished: bool) -> None:
        owners = self.owners()
        table = [NONE if b == NONE or len(owners[b]) > 1 else b for b in self.tables.get(seq, [])]
        self.computed[seq] = 0
        if finished:
            self._finished.add(seq)
        self._keep(seq, table)

    def _clear(self, block: int, cached: int) -> None:
        for seq in list(self.tables):
            if block in self.tables[seq]:
                self._keep(seq, [NONE if b == block else b for b in self.tables[seq]])
        self.cached.pop(block, None)
        if cached:
            self.cached[block] = None
        else:
            self._drop(block)

    def _drop(self, block: int) -> None:
        """The block leaves the index; its children stay, but nothing leads to them any more."""
        self.cached.pop(block, None)
        self.nodes.pop(block, None)
        self.freed[block] = None
        for child, (parent, salt, depth) in self.nodes.items():
            if parent == block:
                self.nodes[child] = (LOST, salt, depth)

    def _keep(self, seq: int, table: list[int]) -> None:
        """Store a table without its empty end; a finished sequence disappears with its last block."""
        while table and table[-1] == NONE:
            table.pop()
        self.tables[seq] = table
        if seq in self._finished and not table:
            del self.tables[seq], self.computed[seq]
            self._finished.discard(seq)
