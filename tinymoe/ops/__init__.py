"""The seam to the kernels: one name per operation. Today each is the reference; Triton kernels take their place later."""

from tinymoe.ops.paged_attention import AttentionPlan, paged_attention, plan_attention
from tinymoe.ops.reference import causal_attention, causal_mask, gather_pages, rms_norm, rope, topk_softmax

__all__ = [
    "AttentionPlan",
    "causal_attention",
    "causal_mask",
    "gather_pages",
    "paged_attention",
    "plan_attention",
    "rms_norm",
    "rope",
    "topk_softmax",
]
