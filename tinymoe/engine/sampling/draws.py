"""Which tokens a step has to draw: for which sequence, from which row of its logits, under which options."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch

from tinymoe.core.sequence import Sequence
from tinymoe.engine.batch import Batch
from tinymoe.engine.sampling.logits import Row
from tinymoe.engine.sampling.sampler import Sampled, Sampler


class Draw(NamedTuple):
    """One token to be sampled: for which sequence (index: which of the request's n), from which row of the logits."""

    seq: Sequence
    index: int
    logits_row: int


def draws_of(batch: Batch) -> list[Draw]:
    """One draw per sequence that has caught up; n of them where a prompt ends and its answers begin."""
    draws = []
    for i, chunk in enumerate(batch.chunks):
        if chunk.samples:
            seq, last = chunk.seq, batch.first_row[i + 1] - 1
            unforked = seq.index == 0 and len(seq.request.sequences) < seq.request.params.n
            indices = range(seq.request.params.n) if unforked else (seq.index,)
            draws += [Draw(seq, index, last) for index in indices]
    return draws


def sample_draws(
    sampler: Sampler, logits: torch.Tensor, draws: list[Draw], eos_token_ids: Seq[int]
) -> list[Sampled]:
    """One token per draw from logits [R, V] float32, in their order."""
    if not draws:
        return []
    rows = [
        Row(
            params=seq.request.params,
            seed=(seq.request.seed + index) % 2**63,
            position=seq.num_tokens,
            prompt_token_ids=seq.request.prompt_token_ids,
            output_token_ids=seq.output_token_ids,
            stop_ids=(*eos_token_ids, *seq.request.params.stop_token_ids),
            bad_word_ids=seq.request.bad_word_ids,
        )
        for seq, index, _ in draws
    ]
    picked = [draw.logits_row for draw in draws]
    if picked != list(range(logits.shape[0])):
        logits = logits[torch.tensor(picked, device=logits.device)]
    return sampler.sample(logits, rows)
