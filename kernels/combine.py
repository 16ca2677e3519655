"""Combine: a token's answer is the sum of its pairs' rows. One program is one token and a block of features.

The sum runs over the K slots in the router's order, in float32, so it depends neither on who shared the batch nor on
which expert finished first. The residual and the shared expert's answer are added before the one rounding. Reading K rows
and writing one costs 7 to 9 % of a fine-grained layer at many tokens, so this pass should be the only one to touch them.

Reference: tinymoe.ops.reference.fused_moe.
"""

import torch
import triton
import triton.language as tl

from tinymoe.kernels.checks import FLOATS, INTEGERS, check


@triton.jit
def combine_kernel(
    y, ids, residual, shared, out, stride_r, stride_s,
    H: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < H
    acc = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        expert = tl.load(ids + token * K + j)
        served = (expert >= 0) & (expert < E)  # the row of a pair of nobody was never written
        acc += tl.load(y + (token * K + j) * H + n, mask=inside & served, other=0.0).to(tl.float32)
    if SHARED:
        acc += tl.load(shared + token * stride_s + n, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        acc += tl.load(residual + token * stride_r + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * H + n, acc.to(out.dtype.element_ty), mask=inside)


def combine(
    y_PH: torch.Tensor,
    ids_TK: torch.Tensor,
    num_experts: int,
    out_TH: torch.Tensor,
    residual_TH: torch.Tensor | None = None,
    shared_TH: torch.Tensor | None = None,
) -> None:
    """Writes out [T, H] = sum of y [T*K, H] over each token's slots, + shared, + residual; ids [T, K] int32 or int64.

    Raises ValueError for shapes, dtypes and layouts that do not fit.
    """
    check("out", out_TH, ("T", "H"))
    T, H = out_TH.shape
    check("ids", ids_TK, (T, "K"), INTEGERS)
    check("y", y_PH, (ids_TK.numel(), H))
    for name, t in (("residual", residual_TH), ("shared", shared_TH)):
        if t is not None:
            check(name, t, (T, H), FLOATS, "rows")
    if not T:
        return
    block = min(1024, triton.next_power_of_2(H))
    residual, shared = (out_TH if t is None else t for t in (residual_TH, shared_TH))
    combine_kernel[(T, triton.cdiv(H, block))](
        y_PH, ids_TK, residual, shared, out_TH, residual.stride(0), shared.stride(0),
        H=H, E=num_experts, K=ids_TK.shape[1], BLOCK=block, RESIDUAL=residual_TH is not None, SHARED=shared_TH is not None,
        num_warps=4,
    )  # fmt: skip
