"""The pool of KV blocks: who counts on a block, and which block is handed out next."""

from collections import OrderedDict

import numpy as np

from tinymoe.cache.prefix import PrefixIndex
from tinymoe.core.trace import Trace


class BlockPool:
    """Reference counts and free lists over `num_blocks` physical blocks.

    A block without owners is either blank (reused first, last freed first) or still holds a known prefix: then it waits in
    least-recently-used order, can be taken back by a hit, and is evicted only when no blank block is left.
    """

    def __init__(self, num_blocks: int, prefix: PrefixIndex | None, trace: Trace):
        self.num_blocks = num_blocks
        self.prefix = prefix
        self.trace = trace
        self.refs = np.zeros(num_blocks, dtype=np.int32)
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that still hold a known prefix."""
        return len(self._cached)

    def is_free(self, block: int) -> bool:
        return self.refs[block] == 0

    def free_list(self) -> list[int]:
        """Free blocks in the order in which they will be handed out."""
        return [*reversed(self._blank), *self._cached]

    def take(self) -> int:
        """Hand out one free block with one owner. The caller has checked `num_free`."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            assert self.prefix is not None
            self.prefix.drop(block)
            if self.trace.on:
                self.trace.emit("evict", f"{__name__}:BlockPool.take#least-recently-used", block=block)
        self.refs[block] = 1
        return block

    def share(self, block: int) -> int:
        """One more owner; a cached free block comes back to life. Returns the number of owners."""
        if self.refs[block] == 0:
            del self._cached[block]
        self.refs[block] += 1
        return int(self.refs[block])

    def release(self, block: int) -> None:
        """One owner less; without owners the block is free."""
        self.refs[block] -= 1
        if self.refs[block]:
            return
        cached = self.prefix is not None and block in self.prefix
        if cached:
            self._cached[block] = None
        else:
            self._blank.append(block)
        if self.trace.on:
            self.trace.emit(
                "free", f"{__name__}:BlockPool.release#last-owner", block=block, cached=int(cached)
            )

    def forget_prefixes(self) -> None:
        """Drop every prefix: cached blocks become blank."""
        if self.prefix is None:
            return
        for block in list(self._cached):
            self.prefix.drop(block)
            self._blank.append(block)
            if self.trace.on:
                self.trace.emit("evict", f"{__name__}:BlockPool.forget_prefixes#asked-for", block=block)
        self._cached.clear()
