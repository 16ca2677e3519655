"""From logits to tokens: one call for all rows of a step, and no row can tell who its neighbours are.

Greedy rows take the argmax of the edited logits (the lowest id wins a tie). The others are drawn by the Gumbel-max
trick, argmax(logits + noise), whose noise is keyed by (seed, position, token id): see ops/noise.py. Logprobs are
those of the model, before any option.
"""

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from tinymoe.core.outputs import Logprob
from tinymoe.engine.sampling.logits import Row, apply_edits, restrict
from tinymoe.ops.noise import TARGET, gumbel

BROKEN = "the model's weights or activations are broken, or its dtype is too narrow; try dtype='float32'"


class Sampled(NamedTuple):
    """The chosen token, its raw logprob and the report of params.logprobs (None if not asked for).

    error: why this row has no token (token is -1 then); the other rows are not affected.
    """

    token: int
    logprob: float | None = None
    logprobs: dict[int, Logprob] | None = None
    error: str | None = None


class Sampler:
    """Chooses one token per row of logits. Stateless: equal arguments give equal results."""

    def sample(self, logits_RV: Tensor, rows: Seq[Row], *, stream: int = TARGET) -> list[Sampled]:
        """One Sampled per row, in order. logits_RV: float32 [R, V], left unchanged.

        stream: noise.TARGET, or noise.DRAFT when a draft model proposes. Raises ValueError for other shapes or dtypes.
        """
        if logits_RV.ndim != 2 or logits_RV.shape[0] != len(rows) or logits_RV.dtype != torch.float32:
            raise ValueError(
                f"logits must be float32 [R, V] with a row for each of the {len(rows)} sequences, got "
                f"{str(logits_RV.dtype).removeprefix('torch.')} {list(logits_RV.shape)}"
            )
        if not rows:
            return []
        raw_best_R, choice_R = logits_RV.max(-1)  # NaN wins every max, so this is the health check as well
        best_R, x_RV = raw_best_R, apply_edits(logits_RV, rows)
        if x_RV is not logits_RV:
            best_R, choice_R = x_RV.max(-1)
        random = [r for r, row in enumerate(rows) if not row.params.greedy]
        if random:
            index = torch.tensor(random, device=x_RV.device)
            part_RV = x_RV if len(random) == len(rows) else x_RV[index]
            choice_R = choice_R.index_copy(0, index, self._draw(part_RV, [rows[r] for r in random], stream))
        # One transfer for all three: ids below 2^53 are exact in float64.
        raw_best, best, choice = torch.stack([t.double() for t in (raw_best_R, best_R, choice_R)]).tolist()
        out = []
        for r, row in enumerate(rows):
            if math.isfinite(raw_best[r]) and math.isfinite(best[r]):
                out.append(Sampled(int(choice[r])))
            else:
                out.append(Sampled(-1, error=_explain(logits_RV[r], row, math.isfinite(raw_best[r]))))
        asked = [r for r, row in enumerate(rows) if row.params.logprobs is not None and out[r].error is None]
        if asked:
            tokens, counts = [out[r].token for r in asked], [rows[r].params.logprobs or 0 for r in asked]
            for r, report in zip(asked, gather_logprobs(logits_RV[asked], tokens, counts)):
                out[r] = Sampled(out[r].token, report[out[r].token].logprob, report)
        return out

    def _draw(self, x_RV: Tensor, rows: Seq[Row], stream: int) -> Tensor:
        """int64 [R]: one token per row of (edited) logits."""
        device, vocab = x_RV.device, x_RV.shape[1]
        seeds_R = torch.tensor([row.seed for row in rows], device=device)
        positions_R = torch.tensor([row.position for row in rows], device=device)
        ids_V = torch.arange(vocab, device=device)
        # Blocks of rows bound the scratch memory, and on a CPU keep it in the cache.
        block = max(1, (1 << 16 if device.type == "cpu" else 1 << 26) // vocab)
        drawn = []
        for start in range(0, len(rows), block):
            part = slice(start, start + block)
            noise = gumbel(seeds_R[part], positions_R[part], ids_V, stream)
            drawn.append(noise.add_(restrict(x_RV[part], rows[part])).argmax(-1))
        return torch.cat(drawn)


def gather_logprobs(logits_RV: Tensor, token_ids: Seq[int], num_top: Seq[int]) -> list[dict[int, Logprob]]:
    """For each row {id: Logprob} of its token, then of its num_top most likely ones. Raw: no option changes them.

    Ranks count from 1; equal logits rank by id, lowest first, so that the report never depends on a sort.
    """
    device, vocab = logits_RV.device, logits_RV.shape[1]
    block, ids_V, out = max(1, (1 << 25) // vocab), torch.arange(vocab, device=device), []
    for start in range(0, len(token_ids), block):
        part_RV, tops = logits_RV[start : start + block], num_top[start : start + block]
        token_R1 = torch.tensor(token_ids[start : start + block], device=device)[:, None]
        logprobs_RV = part_RV.log_softmax(-1)
        # One sortable integer per token: the bits of the logit, made monotone, above the reversed id.
        bits = (part_RV + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
        key_RV = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32) + (0x7FFFFFFF - ids_V)
        rank_R = (key_RV > key_RV.gather(1, token_R1)).sum(-1) + 1
        top_RK = 0x7FFFFFFF - (key_RV.topk(min(max(tops), vocab)).values & 0x7FFFFFFF)
        columns = (token_R1, logprobs_RV.gather(1, token_R1), rank_R, top_RK, logprobs_RV.gather(1, top_RK))
        for (token,), (logprob,), rank, ids, values, n in zip(*(c.tolist() for c in columns), tops):
            report = {token: Logprob(logprob, rank)}
            for place, (i, value) in enumerate(zip(ids[:n], values[:n]), 1):
                report.setdefault(i, Logprob(value, place))
            out.append(report)
    return out


def prompt_logprobs(logits_TV: Tensor, target_ids: Seq[int], num_top: int) -> list[dict[int, Logprob]]:
    """Logprobs of prompt tokens: row t of logits (float32 [T, V], at position t) scores target_ids[t], the token at t+1."""
    return gather_logprobs(logits_TV, target_ids, [num_top] * len(target_ids))


def _explain(logits_V: Tensor, row: Row, healthy: bool) -> str:
    """Why no token can be chosen from this row."""
    at = f"at position {row.position}"
    if healthy:
        params, outputs, causes = row.params, len(row.output_token_ids), []
        if params.allowed_token_ids is not None:
            causes.append(f"allowed_token_ids ({len(params.allowed_token_ids)} ids)")
        if row.bad_word_ids:
            causes.append("bad_words")
        if outputs < params.min_tokens:
            causes.append(
                f"min_tokens ({outputs} of {params.min_tokens} so far: eos and stop ids are banned)"
            )
        if bool((logits_V == -torch.inf).any()):
            causes.append("logits of -inf from the model")
        found = " and ".join(causes) or "logit_bias or penalties too large for float32"
        return f"every token is banned {at} by {found}: loosen one of them"
    nan, inf = int(logits_V.isnan().sum()), int((logits_V == torch.inf).sum())
    if nan:
        first = int(logits_V.isnan().nonzero()[0, 0])
        what = f"logits contain NaN {at} ({nan} of {len(logits_V)} values, the first at token id {first})"
    elif inf:
        what = f"logits contain +inf {at} ({inf} of {len(logits_V)} values)"
    else:
        what = f"all {len(logits_V)} logits are -inf {at}"
    return f"{what}: {BROKEN}"
