"""Drafts of a model: a small dense one with KV of its own in the same pages, or the target itself with fewer experts."""

import copy
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tinymoe import ops
from tinymoe.cache.blocks import BlockManager
from tinymoe.cache.storage import KVStorage
from tinymoe.core.config import EngineConfig
from tinymoe.core.sequence import Sequence
from tinymoe.engine.forward.batch import Span
from tinymoe.engine.forward.graphs import Inputs, Rows, buckets_up_to
from tinymoe.engine.forward.passes import DraftGraphs, Pending
from tinymoe.engine.forward.runner import PagedAttend, can_capture
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
Parts = list[tuple[Sequence, int, list[int]]]  # sequence, position of the first token, tokens


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
        self.graphs: DraftGraphs | None = None

    @torch.inference_mode()
    def capture(self, config: EngineConfig, depth: int) -> None:
        """Record passes as CUDA graphs, where that can be; up to `depth` of them follow one another unseen."""
        if can_capture(self.model, config):
            width, device = self.blocks.tables.shape[1], self.storage.kv.device
            rows = min(
                2 * config.max_num_seqs, self.max_tokens
            )  # a draft that was kept whole leaves two to be read
            graphs = DraftGraphs(self._decode, buckets_up_to(rows), width, device, depth)
            graphs.capture(set(self.windows), width * self.blocks.block_size, self.model.invariant)
            self.graphs = graphs

    def _decode(self, x: Inputs, bucket: int, plans: dict) -> tuple[Tensor, None]:
        """What a graph records: one pass of `bucket` rows."""
        attend = PagedAttend(x.slots[:bucket], plans, self.storage, self.windows)
        return self.model(x.token_ids[:bucket], x.positions[:bucket], attend, None, None, x.num_valid), None

    def computed(self, seqs: Seq[Sequence]) -> list[int]:
        """How many leading tokens of each sequence have KV here; the newest token never counts."""
        newest = np.array([seq.num_tokens - 1 for seq in seqs])
        if not self.own:
            return newest.tolist()
        size = self.blocks.block_size
        most = (
            newest.max() // size + 1
        )  # what a shorter table holds behind its end, the minimum below cuts off
        filled = self.blocks.drafted[self.blocks.tables[[seq.row for seq in seqs], :most]]
        whole = (filled == size).cumprod(axis=1).sum(axis=1)
        part = filled[np.arange(len(seqs)), np.minimum(whole, most - 1)]
        return np.minimum(whole * size + part, newest).tolist()

    def mark(self, seqs: Seq[Sequence], counts: Seq[int]) -> None:
        """The first counts[i] tokens of seqs[i], all of them verified, have KV here."""
        if not self.own or not seqs:
            return
        full, rest = np.divmod(counts, self.blocks.block_size)
        tables = self.blocks.tables[[seq.row for seq in seqs], : full.max() + 1]
        drafted = self.blocks.drafted
        drafted[tables[np.arange(tables.shape[1]) < full[:, None]]] = self.blocks.block_size
        begun = np.flatnonzero(rest)
        at = tables[begun, full[begun]]
        drafted[at] = np.maximum(rest[begun], drafted[at])

    @torch.inference_mode()
    def draft(self, counts: dict[Sequence, int], choose: Choose, *, drawn: bool = False) -> Pending | None:
        """Append counts[seq] tokens to draft_token_ids of every sequence; their blocks are reserved. choose(seqs, logits
        [S, V]) picks one each; drawn: it would pick what a captured graph draws, so that nobody needs to look: the drafts
        may still be on their way then."""
        if not self.own:  # blocks that diverge in this step are read before the step itself copies them
            self.storage.copy_blocks(self.blocks.copies)
        at = dict(zip(counts, self.computed(list(counts))))
        self.caught_up = sum(seq.num_tokens - 1 - at[seq] for seq in counts)
        self._catch_up(at, self.max_tokens if self.graphs is None or not drawn else self.graphs.buckets[-1])
        parts = [(seq, at[seq], seq.token_ids[at[seq] :]) for seq in counts]
        if drawn and self._flies(parts):
            return self._chain(counts, parts)
        while parts:
            seqs = [seq for seq, _, _ in parts]
            tokens = choose(seqs, self._run(parts))
            parts = []
            for seq, token in zip(seqs, tokens):
                drafts = seq.draft_token_ids
                drafts.append(token)
                if len(drafts) < counts[seq]:
                    parts.append((seq, seq.num_tokens + len(drafts) - 1, [token]))
        return None

    def _flies(self, parts: Parts) -> bool:
        tokens = sum(len(tokens) for _, _, tokens in parts)
        return self.graphs is not None and self.graphs.bucket_for(tokens) is not None

    def _chain(self, counts: dict[Sequence, int], parts: Parts) -> Pending:
        """All passes at once: each takes its tokens where the one before has drawn them."""
        assert self.graphs is not None
        rows, last = self._rows(parts)
        seqs, size = list(counts), self.blocks.block_size
        wanted_S, newest_S = np.array(list(counts.values())), np.array([seq.num_tokens - 1 for seq in seqs])
        ahead_P1 = np.arange(1, wanted_S.max())[:, None]
        where_PS = newest_S + np.minimum(ahead_P1, wanted_S - 1)
        blocks_PS = self.blocks.tables[[seq.row for seq in seqs], where_PS // size].astype(np.int64)
        slots_PS = np.where(ahead_P1 < wanted_S, blocks_PS * size + where_PS % size, -1)
        if len(rows.positions) > len(seqs):  # the newest tokens come first, arrears behind them
            order = np.concatenate([last, np.setdiff1d(np.arange(len(rows.positions)), last)])
            rows = rows.ordered(order)
        return self.graphs.chain(seqs, wanted_S.tolist(), rows, where_PS, slots_PS, self.blocks.tables)

    def _rows(self, parts: Parts) -> tuple[Rows, list[int]]:
        """The tokens of these parts as rows, and which of them are the last of each."""
        token_ids, positions, slots, spans = self._flat(parts)
        seqs, lengths = [seq for seq, _, _ in parts], [span.stop - span.start for span in spans]
        rows = Rows.of(seqs, lengths, np.array(token_ids), np.array(positions), np.array(slots))
        return rows, [span.stop - 1 for span in spans]

    def _flat(self, parts: Parts) -> tuple[list[int], list[int], list[int], list[Span]]:
        """The tokens of these parts, their positions, their slots, and a span for each part. Lists: for the one token of most
        drafts, numpy would take longer."""
        size, token_ids, positions, slots, spans = self.blocks.block_size, [], [], [], []
        for seq, start, tokens in parts:
            begin, stop = len(token_ids), start + len(tokens)
            table = self.blocks.tables[seq.row, : self.blocks.blocks_for(stop)]
            token_ids += tokens
            positions += range(start, stop)
            slots += [int(table[at // size]) * size + at % size for at in range(start, stop)]
            spans.append(Span(begin, len(token_ids), stop, table))
        return token_ids, positions, slots, spans

    def _catch_up(self, at: dict[Sequence, int], most: int) -> None:
        """Leave no more than `most` tokens to be read by the first pass. Arrears come in steps of max_tokens, so that no draft
        takes more memory than a step of the engine."""
        while sum(seq.num_tokens - start for seq, start in at.items()) > most:
            room, parts = self.max_tokens, []
            for seq, start in at.items():
                stop = min(seq.num_tokens - 1, start + room)
                if stop > start:
                    parts.append((seq, start, seq.token_ids[start:stop]))
                    at[seq], room = stop, room - (stop - start)
            if not parts:
                return
            self._run(parts)

    def _run(self, parts: Parts) -> Tensor:
        """One forward pass; logits [S, V] of the last token of each part, on a GPU valid until the next one."""
        if self._flies(parts):
            assert self.graphs is not None
            rows, last = self._rows(parts)
            logits = self.graphs.launch(rows, self.blocks.tables).logits
            return logits if len(last) == len(logits) else logits[torch.tensor(last, device=logits.device)]
        size, device = self.blocks.block_size, self.storage.kv.device
        token_ids, positions, slots, spans = self._flat(parts)
        T, S = len(token_ids), len(spans)
        flat = torch.tensor(token_ids + positions + slots + [span.stop - 1 for span in spans], device=device)
        ids_T, positions_T, slots_T, last_S = flat.split_with_sizes((T, T, T, S))
        plans = {
            w: ops.plan_attention(spans, size, w, device, self.model.invariant) for w in set(self.windows)
        }
        attend = PagedAttend(slots_T, plans, self.storage, self.windows)
        return self.model(ids_T, positions_T, attend, None, None if S == T else last_S)
