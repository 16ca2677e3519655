"""Top-k routing: each token chooses its experts. One program is one token.

Idea: an expert's score and its number are packed into one 64-bit key: the score's bits, turned so that integers order
like floats, above; the number, counted downwards, below. The k largest keys are the k best experts, ties go to the
lower number, and no two keys are equal, so no expert is chosen twice. NaN has been given the lowest score before.
Choosing and weighing are different things: a selection bias and groups (DeepSeek-V3, arXiv 2412.19437) take part in
choosing only; the weights are shares of the plain scores.

Reference: tinymoe.ops.reference.topk_softmax.
"""

import torch
import triton
import triton.language as tl

from tinymoe.kernels.checks import FLOATS, check

HUGE = tl.constexpr(
    3.4028234663852886e38
)  # the largest float32: stands for infinity, so that softmax stays finite
LOWEST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # below every key


@triton.jit
def pack(score, number, COUNT: tl.constexpr):
    """Scores float32 and their numbers in 0..COUNT-1 -> keys int64: larger is better, equal scores by lower number."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # + 0.0: -0.0 equals 0.0
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (order.to(tl.int64) << 32) | (COUNT - 1 - number).to(tl.int64)


@triton.jit
def score_of(key):
    order = (key >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def number_of(key, COUNT: tl.constexpr):
    return COUNT - 1 - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def largest(keys, KP: tl.constexpr):
    """The KP largest keys, best first."""
    if KP == 1:
        return tl.max(keys, 0, keep_dims=True)
    else:
        return tl.topk(keys, KP)


@triton.jit
def outside_best_groups(keys, e, E: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, TOP_G: tl.constexpr):
    """Which experts lie outside the TOP_G best of G groups; a group is worth the sum of its two best scores."""
    SIZE: tl.constexpr = E // G
    group = e // SIZE
    g = tl.arange(0, GP)
    worth_keys = tl.full((GP,), LOWEST, tl.int64)
    for i in tl.static_range(G):
        inside = group == i
        first = tl.max(tl.where(inside, keys, LOWEST), 0)
        worth = score_of(first)
        if SIZE > 1:
            worth += score_of(tl.max(tl.where(inside & (keys != first), keys, LOWEST), 0))
        worth_keys = tl.where(g == i, pack(worth, i + g * 0, GP), worth_keys)
    outside = e >= 0
    for _ in tl.static_range(TOP_G):
        top = tl.max(worth_keys, 0)
        outside = outside & (group != number_of(top, GP))
        worth_keys = tl.where(worth_keys == top, LOWEST, worth_keys)
    return outside


@triton.jit
def route(
    logits, bias, token, stride,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, TOP_G: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The route of one token: ids [KP] int32, best first, and weights [KP] float32. Entries from K on are padding."""
    e = tl.arange(0, EP)
    real = e < E
    x = tl.load(logits + token.to(tl.int64) * stride + e, mask=real, other=0.0).to(tl.float32)
    x = tl.minimum(tl.maximum(tl.where(x == x, x, -HUGE), -HUGE), HUGE)
    top_x = tl.max(tl.where(real, x, -HUGE), 0)
    if SIGMOID:
        share = 1.0 / (1.0 + tl.exp(-x))
        log_share = tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))
    else:
        share = tl.where(real, tl.exp(x - top_x), 0.0)
        share = share / tl.sum(share, 0)
        log_share = x  # but for a constant
    score = x  # two logits can share one float32 probability: choose by logit where nothing is added to it
    if SIGMOID or BIASED or G > 1:
        score = share
    if BIASED:
        score += tl.load(bias + e, mask=real, other=0.0).to(tl.float32)
    keys = tl.where(real, pack(score, e, EP), LOWEST)
    if G > 1:
        outside = outside_best_groups(keys, e, E, G, GP, TOP_G)
        keys = tl.where(real & outside, pack(e * 0.0 - HUGE, e, EP), keys)
    top = largest(keys, KP)
    ids = number_of(top, EP)
    live = tl.arange(0, KP) < K
    picked = ids[:, None] == e[None, :]
    if RENORMALIZE:
        # In logarithms: shares that have all become 0 still have a proportion.
        v = tl.sum(tl.where(picked, log_share[None, :], 0.0), 1)
        v = tl.where(live, v, -HUGE)
        weights = tl.where(live, tl.exp(v - tl.max(v, 0)), 0.0)
        weights = weights / tl.sum(weights, 0)
    else:
        weights = tl.where(live, tl.sum(tl.where(picked, share[None, :], 0.0), 1), 0.0)
    return ids, weights * SCALE


@triton.jit(do_not_specialize=["stride"])
def topk_softmax_kernel(
    logits, bias, ids_out, weights_out, num_valid, stride,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, TOP_G: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    if num_valid is not None:  # noqa: SIM102 (decided when compiling)
        if token >= tl.load(num_valid):
            for j in tl.static_range(K):
                tl.store(ids_out + token.to(tl.int64) * K + j, -1)
                tl.store(weights_out + token.to(tl.int64) * K + j, 0.0)
            return
    ids, weights = route(
        logits, bias, token, stride, E, EP, K, KP, SIGMOID, BIASED, G, GP, TOP_G, RENORMALIZE, SCALE
    )
    k = tl.arange(0, KP)
    at = token.to(tl.int64) * K + k
    tl.store(ids_out + at, ids, mask=k < K)
    tl.store(weights_out + at, weights, mask=k < K)


def route_constants(
    num_experts: int,
    top_k: int,
    *,
    scoring: str = "softmax",
    biased: bool = False,
    n_group: int = 1,
    topk_group: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
) -> dict:
    """The compile-time arguments of `route`. Raises ValueError for numbers that no router has."""
    check_top_k(top_k, num_experts)
    if (
        not type(n_group) is type(topk_group) is int
        or not 1 <= topk_group <= n_group
        or num_experts % n_group
    ):
        raise ValueError(
            f"{num_experts} experts cannot form {n_group} groups of which {topk_group} are chosen"
        )
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring must be 'softmax' or 'sigmoid', got {scoring!r}")
    return {
        "E": num_experts,
        "EP": max(16, triton.next_power_of_2(num_experts)),
        "K": top_k,
        "KP": triton.next_power_of_2(top_k),
        "SIGMOID": scoring == "sigmoid",
        "BIASED": biased,
        "G": n_group,
        "GP": triton.next_power_of_2(n_group),
        "TOP_G": topk_group,
        "RENORMALIZE": renormalize,
        "SCALE": float(scale),
    }


def check_top_k(top_k: int, num_experts: int) -> None:
    if type(top_k) is not int or not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must lie in 1..{num_experts} (the number of experts), got {top_k!r}")


def check_num_valid(num_valid: torch.Tensor | None) -> None:
    if num_valid is None:
        return
    if not isinstance(num_valid, torch.Tensor):
        raise ValueError(f"num_valid must be one int32 on the device, got {num_valid!r}: make it a tensor")
    if num_valid.dtype is not torch.int32 or num_valid.numel() != 1:
        raise ValueError(
            f"num_valid must be one int32 on the device, got {num_valid.dtype} {list(num_valid.shape)}"
        )


def check_routing(
    logits_TE: torch.Tensor,
    top_k: int,
    selection_bias_E: torch.Tensor | None,
    num_valid: torch.Tensor | None,
) -> None:
    """What every launcher that routes asks for; its options are checked by route_constants."""
    check("logits", logits_TE, ("T", "E"), FLOATS, "rows")
    E = logits_TE.shape[1]
    check_top_k(top_k, E)
    if selection_bias_E is not None:
        check("selection_bias", selection_bias_E, (E,))
    check_num_valid(num_valid)


def topk_softmax(
    logits_TE: torch.Tensor,
    top_k: int,
    *,
    selection_bias_E: torch.Tensor | None = None,
    num_valid: torch.Tensor | None = None,
    **options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] float16, bfloat16 or float32 -> ids [T, K] int32 (best first), weights [T, K] float32.

    num_valid: one int32 on the device; rows from there on (the padding of a CUDA graph) get ids -1 and weights 0,
    whatever they hold. options: scoring, n_group, topk_group, renormalize, scale, as in the reference. Raises
    ValueError for shapes, dtypes and layouts (rows of logits are contiguous) that do not fit, and numbers that no router has.
    """
    check_routing(logits_TE, top_k, selection_bias_E, num_valid)
    T, E = logits_TE.shape
    constants = route_constants(E, top_k, biased=selection_bias_E is not None, **options)
    ids_TK = torch.empty(T, top_k, dtype=torch.int32, device=logits_TE.device)
    weights_TK = torch.empty(T, top_k, dtype=torch.float32, device=logits_TE.device)
    if T:
        bias = logits_TE if selection_bias_E is None else selection_bias_E
        topk_softmax_kernel[(T,)](
            logits_TE, bias, ids_TK, weights_TK, num_valid, logits_TE.stride(0), **constants, num_warps=1
        )
    return ids_TK, weights_TK
