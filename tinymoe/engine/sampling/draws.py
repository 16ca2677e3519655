"""Which tokens a step has to draw: for which sequence, from which row of its logits, under which options."""

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch

from tinymoe import ops
from tinymoe.core.sequence import Sequence
from tinymoe.engine.forward.batch import Batch
from tinymoe.engine.forward.runner import Forward
from tinymoe.engine.sampling.logits import Row
from tinymoe.engine.sampling.sampler import BROKEN, Sampled, Sampler


class Draw(NamedTuple):
    """One token to be sampled: for which sequence (index: which of the request's n), from which row of the logits, behind how
    many of the sequence's drafts."""

    seq: Sequence
    index: int
    logits_row: int
    ahead: int = 0

    @property
    def position(self) -> int:
        """Absolute index of the token."""
        return self.seq.num_tokens + self.ahead

    def row(self, eos_token_ids: Seq[int]) -> Row:
        """What the logits belong to; drafts count as history."""
        seq = self.seq
        request, params = seq.request, seq.request.params
        return Row(
            params=params,
            seed=(request.seed + self.index) % 2**63,
            position=self.position,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=seq.output_token_ids + seq.draft_token_ids[: self.ahead],
            stop_ids=(*eos_token_ids, *params.stop_token_ids),
            bad_word_ids=request.bad_word_ids,
        )


def draws_of(batch: Batch) -> list[Draw]:
    """One draw per sequence that has caught up; n of them where a prompt ends and its answers begin; one more behind every
    draft."""
    draws = []
    for i, chunk in enumerate(batch.chunks):
        if chunk.samples:
            seq, drafts = chunk.seq, len(chunk.seq.draft_token_ids)
            first = batch.first_row[i + 1] - 1 - drafts
            indices = range(seq.request.params.n) if seq.forks else (seq.index,)
            draws += [Draw(seq, index, first) for index in indices]
            draws += [Draw(seq, seq.index, first + ahead, ahead) for ahead in range(1, drafts + 1)]
    return draws


def drawn_tokens(batch: Batch, forward: Forward) -> list[int] | None:
    """The tokens of a step that a captured graph has drawn, one a row, if they are all that is wanted and all is well."""
    if forward.flight is None or not all(chunk.seq.request.params.plain for chunk in batch.chunks):
        return None
    ids, best = forward.flight.wait()
    return ids.astype(np.int64).tolist() if np.isfinite(best).all() else None


@torch.inference_mode()
def sample_draws(
    sampler: Sampler, forward: Forward, draws: list[Draw], eos_token_ids: Seq[int]
) -> list[Sampled]:
    """One token per draw from the rows of the step's logits, in their order."""
    if not draws:
        return []
    if all(draw.seq.request.params.plain for draw in draws):
        drawn = _drawn_there(forward, draws)
        if drawn is not None and (forward.logits is None or np.isfinite(drawn[1]).all()):
            return [_checked(draw, *one) for draw, one in zip(draws, drawn.T.tolist())]
    rows = [draw.row(eos_token_ids) for draw in draws]
    assert forward.logits is not None  # only plain draws are followed
    return sampler.sample(_picked(forward.logits, draws), rows)


def _checked(draw: Draw, token: float, best: float) -> Sampled:
    if math.isfinite(best):
        return Sampled(int(token))
    what = "NaN" if math.isnan(best) else "infinity"
    return Sampled(-1, error=f"logits contain {what} at position {draw.position}: {BROKEN}")


def _picked(logits_RV: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    """The rows that are drawn from."""
    picked = [draw.logits_row for draw in draws]
    if picked == list(range(logits_RV.shape[0])):
        return logits_RV
    return logits_RV[torch.tensor(picked, device=logits_RV.device)]


def _drawn_there(forward: Forward, draws: list[Draw]) -> np.ndarray | None:
    """Token ids and largest logits, float64 [2, draws], drawn where the logits are; None on a CPU."""
    if forward.flight is not None:
        return forward.flight.wait()
    if forward.logits is None or not ops.gpu.serves(forward.logits):
        return None
    params = [draw.seq.request.params for draw in draws]
    heat_R = torch.tensor([one.heat for one in params], dtype=torch.float32)
    seeds = [(draw.seq.request.seed + draw.index) % 2**63 for draw in draws]
    keys_2R = torch.tensor([seeds, [draw.position for draw in draws]])
    device = forward.logits.device
    seeds_R, positions_R = keys_2R.to(device)
    ids_R, best_R = ops.sample(_picked(forward.logits, draws), heat_R.to(device), seeds_R, positions_R)
    return torch.stack((ids_R.double(), best_R.double())).cpu().numpy()
