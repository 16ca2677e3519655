"""Kernels of vLLM, as peers in the same run. They must be importable; `--vllm` asks for them."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def vllm_moe() -> Any:
    """A function (x, logits, gate_up, down, top_k) -> out: one layer on vLLM's Triton kernels, routing included."""
    fused = import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    router = import_module("vllm.model_executor.layers.fused_moe.router.fused_topk_router")

    def layer(x_TH: Tensor, logits_TE: Tensor, gate_up: Tensor, down: Tensor, top_k: int) -> Tensor:
        weights, ids, *_ = router.fused_topk(x_TH, logits_TE, top_k, True)
        return fused.fused_experts(x_TH, gate_up, down, weights, ids)

    return layer


def flash_attention_3() -> Any:
    """A function (q, kv, block_tables, queries, context) -> out: FlashAttention-3 over pages, as vLLM ships it."""
    attend = import_module("vllm.vllm_flash_attn").flash_attn_varlen_func

    def paged(q: Tensor, kv: Tensor, tables: Tensor, queries: int, context: int) -> Tensor:
        sequences = len(tables)
        steps = torch.arange(sequences + 1, device=q.device, dtype=torch.int32) * queries
        used = torch.full((sequences,), context, device=q.device, dtype=torch.int32)
        return attend(
            q=q, k=kv[0], v=kv[1], out=torch.empty_like(q), cu_seqlens_q=steps, max_seqlen_q=queries,
            seqused_k=used, max_seqlen_k=context, causal=True, block_table=tables, fa_version=3,
        )  # fmt: skip

    return paged
