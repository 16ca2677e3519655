"""The seam to the kernels: one name per operation. On a CUDA device Triton runs, elsewhere the torch reference (see gpu)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinymoe.ops import gpu, reference, rotary
from tinymoe.ops import paged_attention as paged
from tinymoe.ops.noise import TARGET
from tinymoe.ops.paged_attention import AttentionPlan
from tinymoe.ops.reference import causal_attention, causal_mask, gather_pages
from tinymoe.ops.rotary import rope

__all__ = [
    "AttentionPlan",
    "add_rms_norm",
    "blocked_sparse",
    "causal_attention",
    "causal_mask",
    "count_routes",
    "dense_masked",
    "fused_moe",
    "gather_pages",
    "linear",
    "linear_float32",
    "paged_attention",
    "plan_attention",
    "rms_norm",
    "rope",
    "rotate",
    "run_path",
    "sample",
    "topk_softmax",
]


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, invariant: bool = False) -> Tensor:
    """x [T, I] @ weight.T + bias. invariant: on a GPU by our own kernel, whose order of summation no batch changes."""
    if invariant and gpu.serves(x):
        return gpu.matmul.linear(x, weight_OI, bias_O)
    return F.linear(x, weight_OI, bias_O)


def linear_float32(x: Tensor, weight_OI: Tensor, invariant: bool = False) -> Tensor:
    """x [T, I] @ weight.T with sums and result in float32, whatever the dtype of the two (products of 16-bit floats are
    exact there)."""
    if gpu.serves(x) and x.dtype is weight_OI.dtype is not torch.float32:
        if invariant:
            return gpu.matmul.linear(x, weight_OI, out_dtype=torch.float32)
        if x.shape[0] <= gpu.matmul.FEW:
            return gpu.matmul.linear_few(x, weight_OI, torch.float32)
        return torch.mm(x, weight_OI.t(), out_dtype=torch.float32)
    return linear(x.float(), weight_OI.float(), None, invariant)


def topk_softmax(logits_TE: Tensor, top_k: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Expert ids [T, K] int64, best first, and weights [T, K] float32: see reference.topk_softmax."""
    if gpu.serves(logits_TE):
        ids_TK, weights_TK = gpu.routing.topk_softmax(logits_TE, top_k, **options)
        return ids_TK.long(), weights_TK
    return reference.topk_softmax(logits_TE, top_k, **options)


def count_routes(ids_LTK: Tensor, load_LE: Tensor, distinct_L: Tensor, step_LE: Tensor | None = None) -> None:
    """Count a step's visits in place, waiting for nobody: see reference.count_routes."""
    count = gpu.counting.count_routes if gpu.serves(load_LE) else reference.count_routes
    count(ids_LTK, load_LE, distinct_L, step_LE)


def fused_moe(
    x_TH: Tensor, logits_TE: Tensor, gate_up_E2IH: Tensor, down_EHI: Tensor, top_k: int, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """One Mixture-of-Experts layer with SwiGLU: out [T, H], ids [T, K], weights [T, K]: see reference.fused_moe.

    invariant: on a GPU, the same bits for a token whoever shares its batch. ids are int64, int32 from the kernel.
    """
    if gpu.serves(x_TH):
        return gpu.moe.fused_moe(x_TH, logits_TE, gate_up_E2IH, down_EHI, top_k, **options)
    options.pop("invariant", None)
    return reference.fused_moe(x_TH, logits_TE, gate_up_E2IH, down_EHI, top_k, **options)


def run_path(
    path: str,
    x_TH: Tensor,
    logits_TE: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    top_k: int,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """fused_moe by a named way (see kernels/expert_paths.py), as experts.selection chooses it; one answer for all."""
    if gpu.serves(x_TH):
        return gpu.expert_paths.run(path, x_TH, logits_TE, gate_up_E2IH, down_EHI, top_k, **options)
    return reference.fused_moe(x_TH, logits_TE, gate_up_E2IH, down_EHI, top_k, **options)


def dense_masked(
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    *more: Tensor | None,
) -> Tensor:
    """The layer for known routes, every expert on every token: ids [T, K], weights [T, K], more: residual and shared
    [T, H] -> [T, H]: see reference.dense_masked."""
    if gpu.serves(x_TH):
        return gpu.dense.dense_masked(x_TH, ids_TK.int(), weights_TK, gate_up_E2IH, down_EHI, *more)
    return reference.dense_masked(x_TH, ids_TK, weights_TK, gate_up_E2IH, down_EHI, *more)


def blocked_sparse(
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up_E2IH: Tensor,
    down_EHI: Tensor,
    *more: Tensor | None,
    block: int = 128,
) -> Tensor:
    """As dense_masked, the activations stored as blocks of `block` rows and columns: see reference.blocked_sparse."""
    if gpu.serves(x_TH):
        return gpu.blocked.blocked_sparse(
            x_TH, ids_TK.int(), weights_TK, gate_up_E2IH, down_EHI, *more, block=block
        )
    return reference.blocked_sparse(x_TH, ids_TK, weights_TK, gate_up_E2IH, down_EHI, *more, block=block)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight: see reference.rms_norm."""
    if gpu.serves(x) and weight.dim() == 1:
        return gpu.norm.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, and rms_norm of that."""
    if gpu.serves(x) and weight.dim() == 1:
        normed, summed = gpu.norm.add_rms_norm(x, delta, weight, eps)
        return summed, normed
    summed = x + delta
    return summed, reference.rms_norm(summed, weight, eps)


def rotate(
    qkv: Tensor, cos_TR: Tensor, sin_TR: Tensor, heads: tuple[int, int, int],
    q_weight: Tensor | None = None, k_weight: Tensor | None = None, eps: float = 1e-6,
    *, clip: float | None = None, cache: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """From rows of the qkv projection to q [T, N, H] and k [T, G, H], normed, clamped and rotated; with a cache, keys
    and values go there and k is None: see rotary.rotate."""
    if gpu.serves(qkv):
        weights = {"q_weight": q_weight, "k_weight": k_weight}
        return gpu.rotary.rope(qkv, cos_TR, sin_TR, heads, **weights, eps=eps, clip=clip, cache=cache)
    return rotary.rotate(qkv, cos_TR, sin_TR, heads, q_weight, k_weight, eps, clip=clip, cache=cache)


def plan_attention(
    spans: list,
    block_size: int,
    window: int | None,
    device: torch.device | str = "cpu",
    invariant: bool = False,
) -> AttentionPlan | gpu.PagePlan:
    """How the tokens of one step attend, made once a step: spans (start, stop, context, block table). invariant: on a
    GPU, the same bits for a sequence whoever shares its batch."""
    if gpu.AVAILABLE and torch.device(device).type == "cuda":
        return gpu.plan_pages(spans, window, device, invariant)
    return paged.plan_attention(spans, block_size, window, device)


def paged_attention(
    q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan | gpu.PagePlan
) -> Tensor:
    """q [T, N, H] over caches [num_blocks, block_size, G, H] -> [T, N, H]; the step's own keys and values are in them."""
    if isinstance(plan, gpu.PagePlan):
        return gpu.attend(q_TNH, k_cache, v_cache, plan)
    return paged.paged_attention(q_TNH, k_cache, v_cache, plan)


def sample(
    logits_RV: Tensor, temperature_R: Tensor, seeds_R: Tensor, positions_R: Tensor, stream: int = TARGET
) -> tuple[Tensor, Tensor]:
    """A token for each row, ids [R] int64, and each row's highest logit [R] float32: see reference.sample."""
    if gpu.serves(logits_RV):
        return gpu.sampling.sample(logits_RV, temperature_R, seeds_R, positions_R, stream)
    return reference.sample(logits_RV, temperature_R, seeds_R, positions_R, stream)
