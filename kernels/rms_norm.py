"""RMSNorm, alone or together with the residual sum before it. One program is one row.

Idea: a row fits in registers (a block of the next power of two, masked), so it is read once, its mean square taken in
float32, and written once. With a residual, the sum is rounded to the row's dtype first: the next layer adds to those
bits, so they are what must be normalised.

Reference: tinymoe.ops.reference.rms_norm (Zhang & Sennrich 2019, arXiv 1910.07467).
"""

# A launch takes num_warps and num_stages, too.
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl

from tinymoe.kernels.checks import FLOATS, check, short


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, summed, eps,
    X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DP)
    real = d < D
    x_D = tl.load(x + row * X_STRIDE + d, mask=real, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    if ADD:
        r_D = tl.load(residual + row * RESIDUAL_STRIDE + d, mask=real, other=0.0).to(tl.float32)
        rounded = (x_D + r_D).to(dtype)
        tl.store(summed + row * D + d, rounded, mask=real)
        x_D = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x_D * x_D, 0) / D + eps)
    w_D = tl.load(weight + d, mask=real, other=0.0).to(tl.float32)
    normed = (x_D * scale).to(dtype).to(tl.float32) * w_D  # narrow types round once before the weight
    tl.store(out + row * D + d, normed.to(dtype), mask=real)


def launch_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float):
    D = x.shape[-1] if x.dim() else 0
    if not D or x.dtype not in FLOATS:
        raise ValueError(
            f"x must be [..., D] with D at least 1, of {', '.join(map(short, FLOATS))}; got {short(x.dtype)} {list(x.shape)}"
        )
    check("the weight, as wide as a row,", weight, (D,))
    rows = x.reshape(-1, D)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    other, summed = rows, out
    if residual is not None:
        if residual.shape != x.shape or residual.dtype != x.dtype:
            raise ValueError(
                f"x and residual must be alike; got {tuple(x.shape)} {x.dtype}, {tuple(residual.shape)} {residual.dtype}"
            )
        other = residual.reshape(-1, D)
        other = other if other.stride(1) == 1 else other.contiguous()
        summed = torch.empty_like(out)
    if len(rows):
        DP = triton.next_power_of_2(D)
        rms_norm_kernel[(len(rows),)](
            rows, other, weight, out, summed, float(eps),
            X_STRIDE=rows.stride(0), RESIDUAL_STRIDE=other.stride(0), D=D, DP=DP, ADD=residual is not None,
            num_warps=min(max(DP // 512, 1), 16),
        )  # fmt: skip
    return out, summed


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D] / sqrt(mean(x²) + eps), times weight [D]; sums in float32, result like x. Any D.

    float32, bfloat16 or float16. Raises ValueError if the weight does not fit.
    """
    return launch_norm(x, None, weight, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """rms_norm(x + residual) and x + residual itself, both [..., D] and like x, in one pass.

    Raises ValueError if the shapes or dtypes differ, or if the weight does not fit.
    """
    return launch_norm(x, residual, weight, eps)
