"""What every kernel means, in plain torch: slow, readable, the definition of correct."""

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinymoe.ops import noise

# Stands for infinity, so that softmax stays finite and infinities still win or lose.
_HUGE = torch.finfo(torch.float32).max


def topk_softmax(
    logits_TE: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    selection_bias_E: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    num_valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose `top_k` experts per token.

    Scores are softmax over experts, or sigmoid of each (DeepSeek-V3, arXiv 2412.19437). The selection bias takes part
    in choosing only. With groups, a group is worth the sum of its two best (biased) scores, and experts outside the
    best `topk_group` groups cannot be chosen. Equal scores go to the lower expert. NaN and -inf logits
    count as the lowest float, +inf as the largest: ids are always distinct and in range. Rows from num_valid (one
    int32) on are padding: ids -1, weights 0.

    Returns ids [T, K] int64, best first, and weights [T, K] float32 (of unbiased scores; divided by their sum if
    `renormalize`, then times `scale`).
    """
    logits_TE = torch.nan_to_num(logits_TE.float(), nan=-_HUGE, posinf=_HUGE, neginf=-_HUGE)
    if scoring == "softmax":
        # Choose by logit where nothing is added: two logits can share one float32 probability.
        shares_TE, log_shares_TE = logits_TE.softmax(-1), logits_TE  # the latter but for a constant
        scores_TE = logits_TE if selection_bias_E is None and n_group == 1 else shares_TE
    else:
        scores_TE = shares_TE = logits_TE.sigmoid()
        log_shares_TE = F.logsigmoid(logits_TE)
    if selection_bias_E is not None:
        scores_TE = scores_TE + selection_bias_E.float()
    if n_group > 1:
        T, E = scores_TE.shape
        grouped = scores_TE.view(T, n_group, E // n_group)
        worth = grouped.topk(min(2, E // n_group), dim=-1).values.sum(-1)
        best = worth.sort(dim=-1, descending=True, stable=True).indices[:, :topk_group]
        allowed = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
        scores_TE = grouped.masked_fill(~allowed[..., None], -torch.inf).view(T, E)
    ids_TK = scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    if renormalize:  # in logarithms: shares that have all become 0 still have a proportion
        weights_TK = log_shares_TE.gather(1, ids_TK).softmax(-1)
    else:
        weights_TK = shares_TE.gather(1, ids_TK)
    if num_valid is not None:
        padding_T1 = torch.arange(len(ids_TK), device=ids_TK.device)[:, None] >= num_valid
        ids_TK, weights_TK = ids_TK.masked_fill(padding_T1, -1), weights_TK.masked_fill(padding_T1, 0)
    return ids_TK, weights_TK * scale if scale != 1.0 else weights_TK


def sort_tokens(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Pairs t * K + j sorted by expert, stable: order [<= T * K] int64, offsets [E + 1] int64 (expert e has rows
    offsets[e] .. offsets[e + 1] - 1). Ids outside 0..E-1 belong to nobody and are left out."""
    flat_P = ids_TK.reshape(-1).long()
    pairs = ((flat_P >= 0) & (flat_P < num_experts)).nonzero()[:, 0]
    order = pairs[flat_P[pairs].sort(stable=True).indices]
    counts_E = torch.bincount(flat_P[pairs], minlength=num_experts)
    return order, F.pad(counts_E.cumsum(0), (1, 0))


def count_routes(ids_LTK: Tensor, load_LE: Tensor, distinct_L: Tensor, step_LE: Tensor | None = None) -> None:
    """Add to load int64 [L, E] how often each expert occurs in ids [L, T, K], and to distinct int64 [L] how many occur.

    Ids outside 0..E-1 belong to nobody. step int32 [L, E] is set to the counts of this call alone.
    """
    L, E = load_LE.shape
    known = (ids_LTK >= 0) & (ids_LTK < E)
    places = torch.where(known, ids_LTK.long() + torch.arange(L)[:, None, None].to(ids_LTK.device) * E, L * E)
    counts_LE = torch.bincount(places.reshape(-1), minlength=L * E + 1)[:-1].view(L, E)
    load_LE += counts_LE
    distinct_L += (counts_LE > 0).sum(1)
    if step_LE is not None:
        step_LE.copy_(counts_LE)


def fused_moe(
    x_TH: Tensor,
    logits_TE: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    top_k: int,
    *,
    residual_TH: Tensor | None = None,
    shared_TH: Tensor | None = None,
    num_valid: Tensor | None = None,
    **routing: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """One Mixture-of-Experts layer: x [T, H], router logits [T, E] -> out [T, H], ids [T, K] int64, weights [T, K].

    gate_up [E, 2I, H] (gate rows first), down [E, H, I]; an expert is down(silu(gate(x)) * up(x)). Its answers are
    rounded to x's dtype, summed over the router's slots in float32, plus `shared` and `residual`, and rounded once.
    num_valid (int32 [1]): tokens from there on are padding, visit no expert and get ids -1.
    """
    ids_TK, weights_TK = topk_softmax(logits_TE, top_k, num_valid=num_valid, **routing)
    order, offsets = sort_tokens(ids_TK, gate_up_E2IH.shape[0])
    y_PH = x_TH.new_zeros(ids_TK.numel(), x_TH.shape[1])
    for expert, (start, stop) in enumerate(pairwise(offsets.tolist())):
        if stop > start:
            pairs = order[start:stop]
            gate, up = F.linear(x_TH[pairs // top_k], gate_up_E2IH[expert]).chunk(2, dim=-1)
            y_PH[pairs] = F.linear(F.silu(gate) * up, down_EHI[expert])
    out_TH = (y_PH.view(*ids_TK.shape, x_TH.shape[1]).float() * weights_TK[..., None]).sum(1)
    for more in (shared_TH, residual_TH):
        out_TH = out_TH if more is None else out_TH + more.float()
    return out_TH.to(x_TH.dtype), ids_TK, weights_TK


def dense_masked(
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    residual_TH: Tensor | None = None,
    shared_TH: Tensor | None = None,
) -> Tensor:
    """The layer for routes that are known: every expert on every token, its weight 0 where it was not chosen -> [T, H].

    Ids outside 0..E-1 are nobody's. Summed over experts in float32, plus `shared` and `residual`, and rounded once.
    """
    out_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    for expert in range(down_EHI.shape[0]):
        chosen_TK = ids_TK == expert
        weight_T = torch.where(chosen_TK, weights_TK, 0).sum(1)
        gate, up = F.linear(x_TH, gate_up_E2IH[expert]).chunk(2, dim=-1)
        y_TH = F.linear(F.silu(gate) * up, down_EHI[expert]).float() * weight_T[:, None]
        out_TH += torch.where(chosen_TK.any(1)[:, None], y_TH, 0)  # 0 · NaN is NaN
    for more in (shared_TH, residual_TH):
        out_TH = out_TH if more is None else out_TH + more.float()
    return out_TH.to(x_TH.dtype)


def bcsr_topology(counts_E: Tensor, width: int, block: int) -> tuple[Tensor, Tensor]:
    """Which blocks of the activations [rows, E * width] are needed, in blocked-CSR (MegaBlocks, arXiv 2211.15841):
    row_offsets [R + 1] and column_indices int64, each expert's rows and its columns filled up to whole blocks."""
    per_expert = -(-width // block)
    rows_E = (counts_E + block - 1) // block
    expert_R = torch.repeat_interleave(torch.arange(len(counts_E), device=counts_E.device), rows_E)
    own = torch.arange(per_expert, device=counts_E.device)
    columns = (expert_R[:, None] * per_expert + own).reshape(-1)
    return torch.arange(len(expert_R) + 1, device=counts_E.device) * per_expert, columns


def bcsr_to_dense(values: Tensor, row_offsets: Tensor, column_indices: Tensor, columns: int) -> Tensor:
    """values [entries, B, B] -> [R * B, columns * B], zero where no block is."""
    B, R = values.shape[1], len(row_offsets) - 1
    dense = values.new_zeros(R, B, columns, B)
    rows = torch.repeat_interleave(torch.arange(R, device=values.device), row_offsets.diff())
    dense[rows, :, column_indices[: len(rows)].long()] = values[: len(rows)]
    return dense.view(R * B, columns * B)


def blocked_sparse(
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    residual_TH: Tensor | None = None,
    shared_TH: Tensor | None = None,
    *,
    block: int = 128,
) -> Tensor:
    """As dense_masked, by two products with a block-sparse matrix of activations: SDD, then DSD. Needs E times the
    memory that the blocks need: it shows the layout, and judges the kernel."""
    (E, H, I), K = down_EHI.shape, ids_TK.shape[1]
    order, offsets = sort_tokens(ids_TK, E)
    counts_E = offsets.diff()
    row_offsets, columns = bcsr_topology(counts_E, I, block)
    rows_E = (counts_E + block - 1) // block * block
    first_E = rows_E.cumsum(0) - rows_E  # where the filled-up rows of each expert begin
    at = torch.arange(len(order), device=order.device) + (first_E - offsets[:-1]).repeat_interleave(counts_E)
    x_RH = x_TH.new_zeros((len(row_offsets) - 1) * block, H).index_copy(0, at, x_TH[order // K])
    wide = -(-I // block) * block
    gate_EIH, up_EIH = (F.pad(w, (0, 0, 0, wide - I)) for w in gate_up_E2IH.chunk(2, dim=1))
    mask = bcsr_to_dense(x_TH.new_ones(len(columns), block, block), row_offsets, columns, E * wide // block)
    h = F.silu(x_RH @ gate_EIH.reshape(-1, H).T) * (x_RH @ up_EIH.reshape(-1, H).T)
    h = torch.where(mask > 0, h, 0)  # SDD computes these blocks only
    y_RH = h @ F.pad(down_EHI, (0, wide - I)).transpose(1, 2).reshape(-1, H)
    y_PH = x_TH.new_zeros(ids_TK.numel(), H).index_copy(0, order, y_RH[at])
    out_TH = (y_PH.view(*ids_TK.shape, H).float() * weights_TK.nan_to_num()[..., None]).sum(1)
    for more in (shared_TH, residual_TH):
        out_TH = out_TH if more is None else out_TH + more.float()
    return out_TH.to(x_TH.dtype)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) over the last axis, in float32, times weight (Zhang & Sennrich 2019, arXiv 1910.07467)."""
    wide = x.float()
    # mean(x²) by the norm: on a CPU a third of the time that F.rms_norm takes for one row.
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(length.new_full((1,), eps), length, length, value=1 / x.shape[-1]).rsqrt_()
    # Narrow types round once before the weight, as the checkpoints were trained.
    normed = (wide * scale).type_as(x)
    return normed if weight is None else normed * weight


def causal_attention(
    q_TNH: Tensor,
    k_CGH: Tensor,
    v_CGH: Tensor,
    *,
    window: int | None = None,
    mask_TC: Tensor | None = None,
) -> Tensor:
    """Attention of one sequence's last T positions over all its C positions, each seeing itself and what came before.

    Query head n reads key/value head n // (N / G). With `window`, only the last `window` positions, itself included.
    What a position must not see cannot change it, not even NaN. mask_TC: causal_mask of these, if it is there already.
    Returns [T, N, H].
    """
    (T, N, H), (C, G, _) = q_TNH.shape, k_CGH.shape
    if T == 1:  # nothing is hidden: query heads that read the same keys are rows of one product
        if window is not None:
            k_CGH, v_CGH = k_CGH[-window:], v_CGH[-window:]
        q_GNH, k_GCH, v_GCH = q_TNH.view(1, G, N // G, H), k_CGH.transpose(0, 1), v_CGH.transpose(0, 1)
        return F.scaled_dot_product_attention(q_GNH, k_GCH[None], v_GCH[None]).view(1, N, H)
    whole = T == C and window is None  # a prompt from its start: no mask has to be built
    if whole:
        mask_TC = None
    elif mask_TC is None:
        mask_TC = causal_mask(T, C, window, q_TNH.device)
    out = F.scaled_dot_product_attention(
        q_TNH.transpose(0, 1)[None],
        k_CGH.transpose(0, 1)[None],
        v_CGH.transpose(0, 1)[None],
        attn_mask=mask_TC,
        is_causal=whole,
        enable_gqa=N != G,
    )
    if all_finite(out):
        return out[0].transpose(0, 1)
    # A mask multiplies by 0, and 0 · NaN is NaN: position by position, with nothing in sight that must not be seen.
    ends = range(C - T + 1, C + 1)
    rows = [
        causal_attention(q_TNH[t : t + 1], k_CGH[:end], v_CGH[:end], window=window)
        for t, end in enumerate(ends)
    ]
    return torch.cat(rows)


def all_finite(x: Tensor) -> bool:
    """Whether x holds no NaN and no infinity; a sum beyond float32 counts as infinite, too. Waits for a GPU."""
    return math.isfinite(x.sum(dtype=torch.float32).item())


def causal_mask(T: int, C: int, window: int | None, device) -> Tensor | None:
    """Boolean [T, C], True where position C - T + t may look; None if everything is visible."""
    if T == 1 and (window is None or window >= C):
        return None
    query = torch.arange(C - T, C, device=device)[:, None]
    key = torch.arange(C, device=device)[None, :]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)


def gather_pages(cache_SGH: Tensor, blocks: Tensor, block_size: int, length: int) -> Tensor:
    """The first `length` positions of one sequence, [length, G, H], from its block table `blocks` [B]."""
    pages = cache_SGH.view(-1, block_size, *cache_SGH.shape[1:]).index_select(0, blocks)
    return pages.flatten(0, 1)[:length]


def sample(
    logits_RV: Tensor, temperature_R: Tensor, seeds_R: Tensor, positions_R: Tensor, stream: int = noise.TARGET
) -> tuple[Tensor, Tensor]:
    """One token a row: argmax(logits / temperature + Gumbel noise), the noise keyed by (stream, seed, position, id); at
    temperature 0 the argmax alone. The lowest id wins a tie, and NaN counts as +inf.

    logits [R, V], temperature [R] float32, seeds [R] int64, positions [R] int64 or int32. Returns ids [R] int64 and the
    highest logit of each row [R] float32: NaN if the row holds one.
    """
    ids_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    drawn_R1 = temperature_R[:, None] > 0
    # In float64: at a tiny temperature, noise added to float32 would be rounded off.
    scores_RV = logits_RV.double() / torch.where(drawn_R1, temperature_R[:, None], 1).double()
    scores_RV += torch.where(drawn_R1, noise.gumbel(seeds_R, positions_R.long(), ids_V, stream), 0)
    return scores_RV.masked_fill_(scores_RV.isnan(), torch.inf).argmax(-1), logits_RV.float().amax(-1)
