"""Page accounting: block tables, copy-on-write, prefix hits, and undo.

One step of the engine is one transaction: `reserve(chunks)` takes the worst case of blocks before the forward pass,
`place(layer)` says during it where each token's KV goes, and `settle()` makes it permanent, or `undo()` takes it all
back. Routing is known only inside the forward pass, so a cache with tables per expert would reserve its bound here and
place by expert; attention that shares its KV, as here, places every layer alike.

Paged attention: Kwon et al., SOSP 2023, arXiv 2309.06180. Python and numpy only.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from tinymoe.cache.pool import BlockPool
from tinymoe.cache.prefix import PrefixIndex, block_key, root_key, short
from tinymoe.core.sequence import Chunk, Sequence
from tinymoe.core.trace import Trace


class Need(NamedTuple):
    """What chunks will take: so many blocks; for each chunk the length of its table and the blocks missing at its end;
    and which chunks start by writing into a block that others own too."""

    blocks: int
    have: np.ndarray
    missing: np.ndarray
    writers: np.ndarray


class BlockManager:
    """Block tables of all running sequences over one pool.

    A sequence holds a row of `tables` [max_num_seqs, max_blocks] int32 from `admit` (or `fork`) until `free`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_num_seqs: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        trace: Trace | None = None,
    ):
        self.trace = trace or Trace()
        self.block_size = block_size
        self.prefix = PrefixIndex() if enable_prefix_caching else None
        self.pool = BlockPool(num_blocks, self.prefix, self.trace)
        self.tables = np.full((max_num_seqs, self.blocks_for(max_model_len)), -1, dtype=np.int32)
        self.lengths = np.zeros(max_num_seqs, dtype=np.int64)
        self.drafted = np.zeros(num_blocks, dtype=np.int32)  # leading slots whose KV a draft model has, too
        self.copies: list[tuple[int, int]] = []  # (old, new): content to be copied before this forward
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._chunks: list[Chunk] = []
        self._log: list[tuple[Sequence, int, int, int]] = []  # (seq, index, old or -1, new), for undo
        self._slots: tuple[np.ndarray, np.ndarray] | None = None

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # A sequence comes and goes

    def lookup(self, seq: Sequence) -> list[int]:
        """Blocks of the longest cached prefix, at most all but the last token: its logits are still needed."""
        if self.prefix is None or seq.request.params.prompt_logprobs is not None:
            return []
        usable = (seq.num_tokens - 1) // self.block_size
        self._extend_keys(seq, usable)
        return self.prefix.find(seq.block_keys[:usable])

    def count_fitting(self, entrants: Seq[Chunk], after: Seq[Chunk] = ()) -> int:
        """How many of these first chunks of waiting sequences could be admitted, in this order, if `after` is reserved
        as well. There must be room for each whole sequence, at the time when it enters."""
        room, held = self.pool.num_free - (self._need(after).blocks if after else 0), set()
        for count, chunk in enumerate(entrants):
            hits = self.lookup(chunk.seq)
            revived = {block for block in hits if self.pool.is_free(block)} - held
            if self.blocks_for(chunk.seq.num_tokens) - len(hits) > room - len(revived):
                return count
            held |= revived
            room -= len(revived) + self.blocks_for(chunk.stop) - len(hits)
        return len(entrants)

    def admit(self, seq: Sequence, hits: Seq[int]) -> None:
        """Give `seq` a row that starts with the shared blocks `hits`; sets its computed and cached token counts."""
        row = seq.row = self._free_rows.pop()
        for index, block in enumerate(hits):
            refs = self.pool.share(block)
            self.tables[row, index] = block
            if self.trace.on:
                src = f"{__name__}:BlockManager.admit#prefix-hit"
                self.trace.emit("share", src, seq=seq.seq_id, index=index, block=block, refs=refs)
        self.lengths[row] = len(hits)
        seq.num_computed_tokens = seq.num_cached_tokens = len(hits) * self.block_size
        if self.trace.on:
            src = f"{__name__}:BlockManager.admit#longest-known-prefix"
            self.trace.emit("hit", src, seq=seq.seq_id, blocks=len(hits), tokens=seq.num_cached_tokens)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share every block of `parent`, the last, partly filled one too."""
        row = child.row = self._free_rows.pop()
        length = self.lengths[row] = self.lengths[parent.row]
        self.tables[row, :length] = self.tables[parent.row, :length]
        for index in range(length):
            block = int(self.tables[row, index])
            refs = self.pool.share(block)
            if self.trace.on:
                src = f"{__name__}:BlockManager.fork#same-prompt"
                self.trace.emit("share", src, seq=child.seq_id, index=index, block=block, refs=refs)
        child.num_computed_tokens = parent.num_computed_tokens
        child.block_keys = list(parent.block_keys)

    def free(self, seq: Sequence) -> None:
        """Give up all blocks and the row. Last blocks first: the tail of a prefix is evicted before its head."""
        self.truncate(seq, 0)
        self._free_rows.append(seq.row)
        seq.row = -1

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        """Keep only the blocks that the first `num_tokens` tokens need."""
        keep, row = self.blocks_for(num_tokens), seq.row
        for index in range(int(self.lengths[row]) - 1, keep - 1, -1):
            self.pool.release(int(self.tables[row, index]))
            self.tables[row, index] = -1
        self.lengths[row] = min(self.lengths[row], keep)

    # One step

    def room(self, chunks: Seq[Chunk]) -> int:
        """Blocks that would stay free beside these chunks; negative if the pool cannot serve them."""
        return self.pool.num_free - self._need(chunks).blocks

    def reserve(self, chunks: Seq[Chunk]) -> bool:
        """Take every block that these chunks will write, or nothing at all.

        A chunk that starts inside a block which others own too gets a copy of it (copy-on-write). Calls add up until
        `settle` or `undo`. Returns False, with nothing changed, if the pool cannot serve them all.
        """
        if not chunks:
            return True
        need = self._need(chunks)
        if need.blocks > self.pool.num_free:
            return False
        for i in need.writers.tolist():
            chunk = chunks[i]
            self._copy_on_write(chunk, chunk.seq.row, chunk.start // self.block_size)
        ends, lacking = need.have + need.missing, np.flatnonzero(need.missing > 0).tolist()
        pages = [(i, at) for i in lacking for at in range(need.have[i], ends[i])]
        # Those of drafts come last, so that `rollback` leaves no trace of them.
        for i, at in sorted(pages, key=lambda p: p[1] >= self.blocks_for(chunks[p[0]].seq.num_tokens)):
            self._append(chunks[i], int(at))
        self._chunks.extend(chunks)
        self._slots = None
        return True

    def place(self, layer: int = 0, ids: np.ndarray | None = None) -> np.ndarray:
        """Slot (block · block_size + offset) of every token of the reserved chunks, in order, int64 [T].

        `layer` and `ids` (the layer's routes) matter only to caches with tables per layer and expert.
        """
        return self._positions_and_slots()[1]

    def positions(self) -> np.ndarray:
        """Position of every token of the reserved chunks, in order, int64 [T]."""
        return self._positions_and_slots()[0]

    def settle(self, *, index: bool = True) -> None:
        """The forward pass is done, or nothing can overtake it: tokens up to each chunk's stop are computed, and full
        blocks enter the prefix index (unless that has to wait until the token ids are known: see `index`)."""
        for seq, _, stop, _ in self._chunks:
            if seq.row >= 0:  # it may have ended while its next token was on its way
                seq.num_computed_tokens = stop
        if index:
            self.index(self._chunks)
        self._end_step()

    def index(self, chunks: Seq[Chunk]) -> None:
        """Blocks that these settled chunks have filled enter the prefix index; all their token ids must be known."""
        for seq, start, stop, _ in chunks if self.prefix is not None else ():
            if stop // self.block_size > start // self.block_size and seq.row >= 0:
                self._index_blocks(seq, start // self.block_size, stop // self.block_size)

    def rollback(self, kept: dict[int, int]) -> None:
        """Drafts were rejected: of the sequence with this id only tokens before kept[id] stay. Blocks of this step that hold
        none of them go back, newest first, as if never taken. `settle` then counts its own token, `advance` the drafts."""
        goes = [e[1] >= self.blocks_for(kept.get(e[0].seq_id, 1 << 62)) for e in self._log]
        for entry, gone in zip(reversed(self._log), reversed(goes)):
            if gone:
                self._undo(*entry)
        self._log = [entry for entry, gone in zip(self._log, goes) if not gone]
        for i, (seq, start, stop, samples) in enumerate(self._chunks):
            if (keep := kept.get(seq.seq_id)) is not None:
                self._chunks[i] = Chunk(seq, start, seq.num_tokens, samples)
                if self.trace.on and keep < stop:
                    src = f"{__name__}:BlockManager.rollback#draft-rejected"
                    self.trace.emit("undo", src, seq=seq.seq_id, start=keep, stop=stop)

    def advance(self, seq: Sequence, count: int) -> None:
        """So many tokens of `seq` before its newest were accepted drafts: they have been computed already."""
        computed = seq.num_computed_tokens
        seq.num_computed_tokens += count
        self.index([Chunk(seq, computed, computed + count, True)])

    def undo(self) -> None:
        """Take back every block of this step, newest first: tables, counts and free list are as before `reserve`."""
        for entry in reversed(self._log):
            if entry[0].row >= 0:  # else it has given everything up since
                self._undo(*entry)
        for seq, start, stop, _ in self._chunks if self.trace.on else ():
            src = f"{__name__}:BlockManager.undo#forward-failed"
            self.trace.emit("undo", src, seq=seq.seq_id, start=start, stop=stop)
        self._end_step()

    def _undo(self, seq: Sequence, index: int, old: int, new: int) -> None:
        self.pool.release(new)
        self.tables[seq.row, index] = old
        if old == -1:
            self.lengths[seq.row] -= 1
            return
        refs = self.pool.share(old)
        if self.trace.on:
            src = f"{__name__}:BlockManager._undo#own-copy-given-up"
            self.trace.emit("share", src, seq=seq.seq_id, index=index, block=old, refs=refs)

    def _end_step(self) -> None:
        self._chunks, self._log, self.copies, self._slots = [], [], [], None

    def _need(self, chunks: Seq[Chunk]) -> Need:
        rows, starts, stops = _spans(chunks)
        first, have = starts // self.block_size, self.lengths[rows]
        missing = np.maximum(-(-stops // self.block_size) - have, 0)
        writes_old = np.flatnonzero(first < have)
        old = self.tables[rows[writes_old], first[writes_old]]
        shared = self.pool.refs[old] > 1
        count = int(missing.sum())
        if shared.any():
            # Each writer of a shared block copies it, except the last of its owners, which may keep it.
            blocks, writers = np.unique(old[shared], return_counts=True)
            count += int(np.minimum(writers, self.pool.refs[blocks] - 1).sum())
        return Need(count, have, missing, writes_old[shared])

    def _copy_on_write(self, chunk: Chunk, row: int, index: int) -> None:
        old = int(self.tables[row, index])
        if self.pool.refs[old] == 1:  # earlier writers of this step have left it to us
            return
        new = self.pool.take()
        self.pool.release(old)
        self.tables[row, index] = new
        self.drafted[new] = 0
        self.copies.append((old, new))
        self._log.append((chunk.seq, index, old, new))
        if self.trace.on:
            src = f"{__name__}:BlockManager._copy_on_write#others-own-it-too"
            self.trace.emit("cow", src, seq=chunk.seq.seq_id, index=index, old=old, new=new)

    def _append(self, chunk: Chunk, index: int) -> None:
        row, block = chunk.seq.row, self.pool.take()
        self.tables[row, index] = block
        self.drafted[block] = 0
        self.lengths[row] = index + 1
        self._log.append((chunk.seq, index, -1, block))
        if self.trace.on:
            src = f"{__name__}:BlockManager._append#table-is-full"
            self.trace.emit("alloc", src, seq=chunk.seq.seq_id, index=index, block=block)

    def _positions_and_slots(self) -> tuple[np.ndarray, np.ndarray]:
        if self._slots is None:
            rows, starts, stops = _spans(self._chunks)
            counts = stops - starts
            before = np.cumsum(counts) - counts
            positions = np.arange(counts.sum()) + np.repeat(starts - before, counts)
            blocks = self.tables[np.repeat(rows, counts), positions // self.block_size].astype(np.int64)
            self._slots = positions, blocks * self.block_size + positions % self.block_size
        return self._slots

    def _extend_keys(self, seq: Sequence, num_blocks: int) -> None:
        size, keys = self.block_size, seq.block_keys
        for i in range(len(keys), num_blocks):
            parent = keys[-1] if keys else root_key(seq.request.cache_salt)
            keys.append(block_key(parent, seq.token_ids[i * size : (i + 1) * size]))

    def _index_blocks(self, seq: Sequence, start: int, stop: int) -> None:
        assert self.prefix is not None
        self._extend_keys(seq, stop)
        for index in range(start, stop):
            block, key = int(self.tables[seq.row, index]), seq.block_keys[index]
            if self.prefix.add(key, block) and self.trace.on:
                src = f"{__name__}:BlockManager._index_blocks#block-is-full"
                parent = int(self.tables[seq.row, index - 1]) if index else -1
                salt = short(root_key(seq.request.cache_salt))
                self.trace.emit("hash", src, block=block, parent=parent, key=short(key), salt=salt)


def _spans(chunks: Seq[Chunk]) -> tuple[np.ndarray, ...]:
    # Lists, not generators: one that is left before its end is closed by the collector, which would swallow a Ctrl-C.
    columns = [c.seq.row for c in chunks], [c.start for c in chunks], [c.stop for c in chunks]
    return tuple(np.array(column, dtype=np.int64) for column in columns)
