"""Chunks -> the flat tensors of one forward pass."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinymoe.cache.blocks import BlockManager
from tinymoe.core.sequence import Chunk


class Span(NamedTuple):
    """Tokens start..stop-1 of the flat batch belong to one sequence that has `context` tokens after this step."""

    start: int
    stop: int
    context: int
    blocks: np.ndarray


class Batch(NamedTuple):
    """One step, flat: the chunks one after another, in the order in which they were reserved.

    token_ids, positions, slots [T] int64. spans: one per chunk. rows [R] int64: tokens whose logits are wanted; those of
    chunk i are rows first_row[i] .. first_row[i + 1] - 1. decodes: every token is a draft or the newest of its sequence, and
    one token is drawn behind each.
    """

    chunks: list[Chunk]
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    spans: list[Span]
    rows: Tensor
    first_row: list[int]
    decodes: bool

    @classmethod
    def build(cls, chunks: list[Chunk], blocks: BlockManager) -> "Batch":
        """Flatten reserved chunks, on the CPU. A chunk wants its last row if it samples, one more for each draft, and all
        of them for prompt logprobs."""
        token_ids: list[int] = []
        spans: list[Span] = []
        rows: list[int] = []
        first_row = [0]
        for seq, start, stop, samples in chunks:
            begin = len(token_ids)
            drafts = seq.draft_token_ids
            token_ids += seq.token_ids[start:stop]
            token_ids += drafts
            end = begin + stop - start
            length = blocks.blocks_for(stop)
            spans.append(Span(begin, end, stop, blocks.tables[seq.row, :length]))
            if seq.request.params.prompt_logprobs is not None and start < seq.num_prompt_tokens:
                rows += range(begin, end)
            elif samples:
                rows += range(end - 1 - len(drafts), end)
            first_row.append(len(rows))
        return cls(
            chunks,
            torch.tensor(token_ids, dtype=torch.int64),
            torch.from_numpy(blocks.positions()),
            torch.from_numpy(blocks.place()),
            spans,
            torch.tensor(rows, dtype=torch.int64),
            first_row,
            all(_decodes(chunk) for chunk in chunks),
        )

    def to(self, device: torch.device) -> "Batch":
        """The same with its tensors on `device`, in one transfer."""
        if device.type == "cpu":
            return self
        parts = (self.token_ids, self.positions, self.slots, self.rows)
        there = torch.cat(parts).to(device).split([len(part) for part in parts])
        return self._replace(token_ids=there[0], positions=there[1], slots=there[2], rows=there[3])


def _decodes(chunk: Chunk) -> bool:
    seq, start, stop, samples = chunk
    return samples and stop - start == 1 + len(seq.draft_token_ids) and not seq.forks
