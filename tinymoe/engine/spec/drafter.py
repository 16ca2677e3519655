"""Drafts of a model: a small dense one with KV of its own in the same pages, or the target itself with fewer experts."""

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tinymoe import ops
from tinymoe.cache.blocks import BlockManager
from tinymoe.cache.storage import KVStorage
from tinymoe.core.sequence import Sequence
from tinymoe.engine.forward.batch import Span
from tinymoe.engine.forward.runner import PagedAttend
from tinymoe.model.decoder import Decoder
from tinymoe.model.moe import MoE


def with_fewer_experts(model: Decoder, count: int) -> Decoder:
    """The same model, the same memory, but at most `count` experts a token. Attention and shared experts stay whole."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    fewer = copy.deepcopy(model, shared)
    for module in fewer.modules():
        if isinstance(module, MoE):
            top_k = min(count, module.config.top_k)
            module.config = module.router.config = replace(module.config, top_k=top_k)
    return fewer


Choose = Callable[[list[Sequence], Tensor], list[int]]


class ModelDrafter:
    """Runs a model over the block tables of the engine, on KV tensors `storage` whose blocks have the same numbers.

    own: the storage is the drafter's own, so a sequence has to catch up on what the draft has not computed; how far that is
    stands beside the blocks (BlockManager.drafted), so prefix hits, forks and preemption need no word here. Otherwise it is
    the target's: everything but the newest token is there, and what is drafted is overwritten by the verification.
    """

    def __init__(
        self, model: Decoder, storage: KVStorage, blocks: BlockManager, *, own: bool, max_tokens: int
    ):
        self.model = model
        self.storage = storage
        self.blocks = blocks
        self.own = own
        self.max_tokens = max_tokens
        self.windows = [layer.sliding_window for layer in model.config.layers]
        self.caught_up = 0  # tokens beyond the newest one that the last draft had to compute first

    def computed(self, seq: Sequence) -> int:
        """How many leading tokens of `seq` have KV here; the newest token never counts."""
        if not self.own:
            return seq.num_tokens - 1
        size = self.blocks.block_size
        filled = self.blocks.drafted[self.blocks.tables[seq.row, : self.blocks.blocks_for(seq.num_tokens)]]
        partial = np.flatnonzero(filled < size)
        count = len(filled) * size if not len(partial) else int(partial[0]) * size + int(filled[partial[0]])
        return min(count, seq.num_tokens - 1)

    def mark(self, seq: Sequence, num_tokens: int) -> None:
        """The first num_tokens tokens of `seq`, all of them verified, have KV here."""
        if self.own:
            size, table = self.blocks.block_size, self.blocks.tables[seq.row]
            full, rest = divmod(num_tokens, size)
            self.blocks.drafted[table[:full]] = size
            if rest:
                self.blocks.drafted[table[full]] = max(rest, self.blocks.drafted[table[full]])

    @torch.inference_mode()
    def draft(self, counts: dict[Sequence, int], choose: Choose) -> None:
        """Append counts[seq] tokens to draft_token_ids of every sequence; their blocks are reserved. choose(seqs, logits
        [S, V]) picks one each."""
        if not self.own:  # blocks that diverge in this step are read before the step itself copies them
            self.storage.copy_blocks(self.blocks.copies)
        at = {seq: self.computed(seq) for seq in counts}
        self.caught_up = sum(seq.num_tokens - 1 - at[seq] for seq in counts)
        self._catch_up(at)
        parts = [(seq, at[seq], seq.token_ids[at[seq] :]) for seq in counts]
        while parts:
            seqs = [seq for seq, _, _ in parts]
            tokens = choose(seqs, self._run(parts))
            parts = []
            for seq, token in zip(seqs, tokens):
                drafts = seq.draft_token_ids
                drafts.append(token)
                if len(drafts) < counts[seq]:
                    parts.append((seq, seq.num_tokens + len(drafts) - 1, [token]))

    def _catch_up(self, at: dict[Sequence, int]) -> None:
        """Long arrears in steps of max_tokens, so that no draft takes more memory than a step of the engine."""
        while sum(seq.num_tokens - start for seq, start in at.items()) > self.max_tokens:
            room, parts = self.max_tokens, []
            for seq, start in at.items():
                stop = min(seq.num_tokens - 1, start + room)
                if stop > start:
                    parts.append((seq, start, seq.token_ids[start:stop]))
                    at[seq], room = stop, room - (stop - start)
            if not parts:
                return
            self._run(parts)

    def _run(self, parts: list[tuple[Sequence, int, list[int]]]) -> Tensor:
        """One forward pass over (sequence, position of the first token, tokens); logits [S, V] of the last tokens."""
        ids, positions, slots, spans, rows = [], [], [], [], []
        size, device = self.blocks.block_size, self.storage.kv.device
        for seq, start, tokens in parts:
            stop = start + len(tokens)
            table = self.blocks.tables[seq.row, : self.blocks.blocks_for(stop)]
            where = np.arange(start, stop)
            spans.append(Span(len(ids), len(ids) + len(tokens), stop, table))
            ids += tokens
            positions.append(where)
            slots.append(table[where // size].astype(np.int64) * size + where % size)
            rows.append(len(ids) - 1)
        flat = np.concatenate(
            [np.array(ids, dtype=np.int64), *positions, *slots, np.array(rows, dtype=np.int64)]
        )
        T = len(ids)
        ids_T, positions_T, slots_T, rows_S = torch.from_numpy(flat).to(device).split([T, T, T, len(rows)])
        plans = {
            w: ops.plan_attention(spans, size, w, device, self.model.invariant) for w in set(self.windows)
        }
        attend = PagedAttend(slots_T, plans, self.storage, self.windows)
        return self.model(ids_T, positions_T, attend, None, rows_S)
