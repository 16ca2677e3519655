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
    """One step, flat: the chunks one after another, in the order in which they were reserved in `blocks`.

    token_ids, positions, slots [T] int64. rows [R] int64: tokens whose logits are wanted; those of chunk i are rows
    first_row[i] .. first_row[i + 1] - 1. decodes: every token is a draft or the newest of its sequence, and one token is
    drawn behind each.
    """

    chunks: list[Chunk]
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    blocks: BlockManager
    rows: Tensor
    first_row: list[int]
    decodes: bool

    @classmethod
    def build(cls, chunks: list[Chunk], blocks: BlockManager) -> "Batch":
        """Flatten reserved chunks, on the CPU. A chunk wants its last row if it samples, one more for each draft, and all
        of them for prompt logprobs."""
        token_ids: list[int] = []
        rows: list[int] = []
        first_row = [0]
        decodes = True
        for seq, start, stop, samples in chunks:
            begin = len(token_ids)
            drafts = seq.draft_token_ids
            token_ids += seq.token_ids[start:stop]
            token_ids += drafts
            end = begin + stop - start
            if seq.request.params.prompt_logprobs is not None and start < seq.num_prompt_tokens:
                rows += range(begin, end)
            elif samples:
                rows += range(end - 1 - len(drafts), end)
            first_row.append(len(rows))
            decodes = decodes and samples and stop - start == 1 + len(drafts) and not seq.forks
        return cls(
            chunks,
            torch.tensor(token_ids, dtype=torch.int64),
            torch.from_numpy(blocks.positions()),
            torch.from_numpy(blocks.place()),
            blocks,
            torch.tensor(rows, dtype=torch.int64),
            first_row,
            decodes,
        )

    @property
    def spans(self) -> list[Span]:
        """One per chunk, with its table as it is now."""
        found, begin = [], 0
        for seq, start, stop, _ in self.chunks:
            table = self.blocks.tables[seq.row, : self.blocks.blocks_for(stop)]
            found.append(Span(begin, begin := begin + stop - start, stop, table))
        return found

    def to(self, device: torch.device) -> "Batch":
        """The same with its tensors on `device`, in one transfer."""
        if device.type == "cpu":
            return self
        parts = (self.token_ids, self.positions, self.slots, self.rows)
        there = torch.cat(parts).to(device).split([len(part) for part in parts])
        return self._replace(token_ids=there[0], positions=there[1], slots=there[2], rows=there[3])
