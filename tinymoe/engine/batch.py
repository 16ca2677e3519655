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
    chunk i are rows first_row[i] .. first_row[i + 1] - 1.
    """

    chunks: list[Chunk]
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    spans: list[Span]
    rows: Tensor
    first_row: list[int]

    @classmethod
    def build(cls, chunks: list[Chunk], blocks: BlockManager, device: torch.device | str = "cpu") -> "Batch":
        """Flatten reserved chunks. A chunk wants its last row if it samples, and all of them for prompt logprobs."""
        token_ids: list[int] = []
        spans: list[Span] = []
        rows: list[int] = []
        first_row = [0]
        for seq, start, stop, samples in chunks:
            begin = len(token_ids)
            token_ids += seq.token_ids[start:stop]
            end = begin + stop - start
            length = blocks.blocks_for(stop)
            spans.append(Span(begin, end, stop, blocks.tables[seq.row, :length]))
            if seq.request.params.prompt_logprobs is not None and start < seq.num_prompt_tokens:
                rows += range(begin, end)
            elif samples:
                rows.append(end - 1)
            first_row.append(len(rows))
        as_tensor = lambda x: torch.as_tensor(x, dtype=torch.int64).to(device)  # noqa: E731
        return cls(
            chunks,
            as_tensor(token_ids),
            as_tensor(blocks.positions()),
            as_tensor(blocks.place()),
            spans,
            as_tensor(rows),
            first_row,
        )
