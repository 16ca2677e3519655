"""Which drafts stay: rejection sampling, as pure functions over tensors.

A draft x ~ q is kept with probability min(1, p(x) / q(x)); the first one that is not is replaced by a draw from the residual
(p - q)+, and behind drafts that were all kept one more token is drawn from p. So every token has the distribution p, whatever
q is (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). This holds only if p is the same function here
and in plain decoding: same options, with drafts counted as history, and a model without capacity limits.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from tinymoe.engine.sampling.logits import Row, apply_edits, restrict
from tinymoe.ops.noise import TARGET, gumbel, hash_bits

ACCEPT = 2  # stream of the uniforms; drafts are drawn from noise.DRAFT, replacements from noise.TARGET


def distribution(logits_RV: Tensor, rows: Seq[Row]) -> Tensor:
    """float64 [R, V]: what a token of each row is drawn from, after all its options. No row may be greedy."""
    return restrict(apply_edits(logits_RV, rows), rows).softmax(-1, dtype=torch.float64)


def uniforms(seeds_D: Tensor, positions_D: Tensor) -> Tensor:
    """float64 [D] in the open interval (0, 1), keyed by seed and position (int64 [D])."""
    bits_D = hash_bits(
        seeds_D, positions_D, torch.zeros(1, dtype=torch.int64, device=seeds_D.device), ACCEPT
    )[:, 0]
    return ((bits_D >> 11) & ((1 << 53) - 1)).double().add_(0.5).mul_(2.0**-53)


def leading(kept_SK: Tensor) -> Tensor:
    """int64 [S]: how many drafts stay, all up to the first that is rejected."""
    return kept_SK.long().cumprod(1).sum(1)


def leading_runs(kept_D: np.ndarray, counts_S: Seq[int]) -> list[int]:
    """The same for S sequences with counts_S[s] drafts, one after another in bool [D]."""
    counts_S1 = np.array(counts_S)[:, None]
    there_SK = np.arange(max(counts_S, default=0)) < counts_S1
    kept_SK = np.zeros(there_SK.shape, dtype=bool)
    kept_SK[there_SK] = kept_D
    return np.logical_and.accumulate(kept_SK, axis=1).sum(1).tolist()


def residual(p_SV: Tensor, q_SV: Tensor) -> Tensor:
    """(p - q)+, not normalised. Where nothing is left (p = q up to rounding, so that a rejection was one, too), p."""
    rest_SV = (p_SV - q_SV).clamp_(min=0)
    return torch.where(rest_SV.sum(-1, keepdim=True) > 0, rest_SV, p_SV)


def rejection_sample(
    p_RV: Tensor, q_DV: Tensor, drafts_D: Tensor, counts_S: Seq[int], seeds_S: Seq[int], positions_S: Seq[int]
) -> tuple[list[int], list[int]]:
    """For S sequences: how many of their drafts stay, and the one token that comes behind those.

    p_RV, q_DV: float64 distributions; sequence s has counts_S[s] = k drafts, k rows of q and k + 1 of p, one after another.
    drafts_D int64 [D]: tokens drawn from q_DV. positions_S: absolute index of the first draft. Everything random is a
    function of seed and position.
    """
    device, S = p_RV.device, len(counts_S)
    counts, seeds, positions = (
        torch.tensor(list(x), dtype=torch.int64) for x in (counts_S, seeds_S, positions_S)
    )
    first_draft, first_row = counts.cumsum(0) - counts, (counts + 1).cumsum(0) - counts - 1
    owner_D = torch.repeat_interleave(torch.arange(S), counts)
    place_D = torch.arange(len(owner_D)) - first_draft[owner_D]
    row_D = (first_row[owner_D] + place_D).to(device)
    chosen_D1 = drafts_D[:, None]
    p_D = p_RV[row_D].gather(1, chosen_D1)[:, 0]
    q_D = q_DV.gather(1, chosen_D1)[:, 0]
    u_D = uniforms(seeds[owner_D].to(device), (positions[owner_D] + place_D).to(device))
    kept_SK = torch.zeros(S, max([*counts_S, 1]), dtype=torch.bool)
    kept_SK[owner_D, place_D] = (u_D * q_D < p_D).cpu()
    accepted_S = leading(kept_SK)
    final_SV = p_RV[(first_row + accepted_S).to(device)]
    cut = (accepted_S < counts).nonzero()[:, 0]
    if len(cut):
        at = cut.to(device)
        final_SV[at] = residual(final_SV[at], q_DV[(first_draft + accepted_S)[cut].to(device)])
    noise_SV = gumbel(
        seeds.to(device),
        (positions + accepted_S).to(device),
        torch.arange(p_RV.shape[1], device=device),
        TARGET,
    )
    tokens_S = (final_SV.log() + noise_SV).argmax(-1)
    return accepted_S.tolist(), tokens_S.tolist()
