"""What sampling options do to logits, row by row, without one row touching another.

Order, as in vLLM: bans (allowed_token_ids, bad_words, min_tokens) and logit_bias; penalties (repetition, then
frequency and presence); for rows that are not greedy then temperature, min_p, top_k, top_p.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from tinymoe.core.params import SamplingParams

TOP_P_CANDIDATES = 256  # most nuclei are smaller; only rows whose nucleus is not pay for a full sort


class Row(NamedTuple):
    """What one row of logits belongs to.

    position: absolute index of the token that is being chosen. stop_ids: eos and stop ids, banned while there are
    fewer than params.min_tokens outputs. bad_word_ids: token sequences that must not be completed.
    Ids must be in range: engine.intake checks them once per request.
    """

    params: SamplingParams
    seed: int
    position: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    stop_ids: Seq[int] = ()
    bad_word_ids: Seq[list[int]] = ()


def apply_edits(logits_RV: Tensor, rows: Seq[Row]) -> Tensor:
    """Bans, logit_bias and penalties: a changed copy, or logits_RV itself if no row asks for any."""
    banned: tuple[list[int], list[int]] = ([], [])  # row, token id
    biased: tuple[list[int], list[int], list[float]] = ([], [], [])
    allowed, penalised = [], []
    for r, row in enumerate(rows):
        params = row.params
        if params.allowed_token_ids is not None:
            allowed.append(r)
        ids = [word[-1] for word in row.bad_word_ids if _ends_with(row.output_token_ids, word[:-1])]
        if len(row.output_token_ids) < params.min_tokens:
            ids += row.stop_ids
        banned[0].extend([r] * len(ids))
        banned[1].extend(ids)
        if params.logit_bias:
            biased[0].extend([r] * len(params.logit_bias))
            biased[1].extend(params.logit_bias.keys())
            biased[2].extend(params.logit_bias.values())
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            penalised.append(r)
    if not (allowed or banned[0] or biased[0] or penalised):
        return logits_RV
    x_RV, device = logits_RV.clone(), logits_RV.device
    if allowed:
        ids = [list(rows[r].params.allowed_token_ids or ()) for r in allowed]
        x_RV[allowed] = x_RV[allowed].masked_fill(_counts(ids, x_RV.shape[1], device) == 0, -torch.inf)
    if banned[0]:
        x_RV[banned] = -torch.inf
    if biased[0]:
        x_RV[biased[:2]] += torch.tensor(biased[2], device=device)  # ids of a dict: no pair occurs twice
    if penalised:
        x_RV[penalised] = _penalise(x_RV[penalised], [rows[r] for r in penalised])
    return x_RV


def _ends_with(ids: list[int], tail: list[int]) -> bool:
    return not tail or ids[-len(tail) :] == tail


def _counts(ids_per_row: Seq[Seq[int]], vocab: int, device: torch.device) -> Tensor:
    """float32 [R, V]: how often each token id occurs in each list."""
    flat = [r * vocab + i for r, ids in enumerate(ids_per_row) for i in ids]
    flat = torch.tensor(flat, dtype=torch.int64, device=device)
    return flat.bincount(minlength=len(ids_per_row) * vocab).view(-1, vocab).float()


def _column(rows: Seq[Row], name: str, device: torch.device) -> Tensor:
    """One sampling option of every row, as a column: float64 [R, 1]."""
    values = [[getattr(row.params, name)] for row in rows]
    return torch.tensor(values, device=device, dtype=torch.float64)


def _penalise(x_RV: Tensor, rows: Seq[Row]) -> Tensor:
    """Repetition (Keskar et al. 2019) over prompt and output; frequency and presence over the output only."""
    output_RV = _counts([row.output_token_ids for row in rows], x_RV.shape[1], x_RV.device)
    seen_RV = output_RV + _counts([row.prompt_token_ids for row in rows], x_RV.shape[1], x_RV.device)
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    repetition, frequency, presence = (_column(rows, name, x_RV.device).float() for name in names)
    x_RV = torch.where(seen_RV > 0, torch.where(x_RV > 0, x_RV / repetition, x_RV * repetition), x_RV)
    return x_RV - frequency * output_RV - presence * (output_RV > 0)


def restrict(x_RV: Tensor, rows: Seq[Row]) -> Tensor:
    """Temperature, then min_p, top_k and top_p: float32 [R, V], 0 for the best token, -inf for what is cut.

    softmax of a row is the distribution its token is drawn from. All rows must have a positive temperature.
    """
    vocab, device = x_RV.shape[1], x_RV.device
    # The maximum is subtracted first: a tiny temperature then keeps full precision where it matters, near 0.
    x_RV = (x_RV - x_RV.amax(-1, keepdim=True)).div_(_column(rows, "temperature", device).float())
    if any(row.params.min_p > 0 for row in rows):
        x_RV.masked_fill_(x_RV < _column(rows, "min_p", device).log_().float(), -torch.inf)
    limited = [r for r, row in enumerate(rows) if 0 < row.params.top_k < vocab]
    if limited:
        top_k, part_LV = [rows[r].params.top_k for r in limited], x_RV[limited]
        kth_L1 = part_LV.topk(max(top_k)).values.gather(1, torch.tensor(top_k, device=device)[:, None] - 1)
        x_RV[limited] = part_LV.masked_fill_(part_LV < kth_L1, -torch.inf)  # all that tie with the k-th stay
    nuclei = [r for r, row in enumerate(rows) if row.params.top_p < 1]
    for candidates in (min(TOP_P_CANDIDATES, vocab), vocab):
        if nuclei:
            p_R1 = _column([rows[r] for r in nuclei], "top_p", device)
            x_RV[nuclei], finished = _top_p(x_RV[nuclei], p_R1, candidates)
            nuclei = [r for r, done in zip(nuclei, finished.tolist()) if not done]
    return x_RV


def _top_p(x_RV: Tensor, p_R1: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
    """Keep the fewest most likely tokens whose probabilities add up to at least p (Holtzman et al. 2019).

    Only the `candidates` most likely tokens are sorted. Returns x and bool [R]: whether that was enough; a row where
    it was not is returned as it came. Of tokens that tie at the border, those with the lowest ids are kept.
    """
    top_RC = x_RV.topk(candidates).values
    weight_RC = top_RC.double().exp()
    before_RC = weight_RC.cumsum(-1) - weight_RC
    wanted_R1 = p_R1 * x_RV.exp().sum(-1, keepdim=True, dtype=torch.float64)
    count_R1 = (before_RC < wanted_R1).sum(-1, keepdim=True).clamp_(min=1)
    finished_R1 = count_R1 < (candidates if candidates < x_RV.shape[1] else candidates + 1)
    border_R1 = top_RC.gather(1, count_R1 - 1)
    ties_R1 = count_R1 - (top_RC > border_R1).sum(-1, keepdim=True)
    tied_RV = x_RV == border_R1
    keep_RV = (
        (x_RV > border_R1) | (tied_RV & (tied_RV.cumsum(-1, dtype=torch.int32) <= ties_R1)) | ~finished_R1
    )
    return x_RV.masked_fill(~keep_RV, -torch.inf), finished_R1[:, 0]
