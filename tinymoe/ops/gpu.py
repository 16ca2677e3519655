"""The door to kernels/: imported only where a CUDA device can run them, so a CPU, macOS and Windows never need Triton.

Which of the two runs is decided by place, not by luck: on a CUDA device the kernels, on anything else, and wherever
gradients are wanted, the torch reference. A kernel that does not support its input says so; nothing falls back silently.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinymoe.core.model_config import ConfigError

AVAILABLE = torch.cuda.is_available() and find_spec("triton") is not None


def kernel(name: str) -> Any:
    """The module tinymoe.kernels.NAME, or None where it cannot run."""
    return import_module(f"tinymoe.kernels.{name}") if AVAILABLE else None


moe = kernel("fused_moe")
grouped_gemm = kernel("grouped_gemm")
sort_tokens = kernel("sort_tokens")
dense = kernel("dense_masked")
blocked = kernel("blocked_sparse")
expert_paths = kernel("expert_paths")
routing = kernel("topk_softmax")
norm = kernel("rms_norm")
matmul = kernel("linear")
counting = kernel("count_routes")
rotary = kernel("rope")
pages = kernel("paged_attention")
sampling = kernel("sample")


def serves(x: Tensor) -> bool:
    """Whether the kernels take x: on a CUDA device, nobody wants gradients, and torch.compile is not at work."""
    return AVAILABLE and x.is_cuda and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def check_head_dim(head_dim: int, device: torch.device) -> None:
    """Raises ConfigError, before anything runs, for a head dim that paged attention does not take."""
    if AVAILABLE and device.type == "cuda" and head_dim not in pages.HEAD_DIMS:
        raise ConfigError(
            f"on a GPU, head_dim must be one of {pages.HEAD_DIMS}, and this model's is {head_dim}: use device='cpu'"
        )


class PagePlan(NamedTuple):
    """How the tokens of one step attend: block_tables [S, B], query_start [S + 1], context_lens [S], int32 on the GPU."""

    block_tables: Tensor
    query_start: Tensor
    context_lens: Tensor
    max_query_len: int
    min_query_len: int
    max_context: int
    window: int | None
    invariant: bool = False


def plan_pages(
    spans: list, window: int | None, device: torch.device | str, invariant: bool = False
) -> PagePlan:
    """Spans (start, stop, context, block table) that follow one another -> the kernel's arguments, in one transfer."""
    S = len(spans)
    width = max((len(blocks) for *_, blocks in spans), default=0)
    packed = np.zeros(S * width + 2 * S + 1, dtype=np.int32)
    table = packed[: S * width].reshape(S, width)
    for row, (_, _, _, blocks) in enumerate(spans):
        table[row, : len(blocks)] = blocks
    contexts = [context for _, _, context, _ in spans]
    lengths = [stop - start for start, stop, _, _ in spans]
    packed[S * width : -S] = np.cumsum([0, *lengths])
    packed[S * width + S + 1 :] = contexts
    there = torch.from_numpy(packed).to(device)
    tables, starts, lens = there.split((S * width, S + 1, S))
    bounds = (max(lengths), min(lengths), max(contexts))
    return PagePlan(tables.view(S, width), starts, lens, *bounds, window, invariant)


def attend(q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, plan: PagePlan) -> Tensor:
    return pages.paged_attention(
        q_TNH,
        k_cache,
        v_cache,
        plan.block_tables,
        plan.query_start,
        plan.context_lens,
        max_query_len=plan.max_query_len,
        min_query_len=plan.min_query_len,
        max_context=plan.max_context,
        window=plan.window,
        invariant=plan.invariant,
    )
