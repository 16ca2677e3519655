"""A matrix product whose order of summation depends on nothing but its width. One program is one tile of the result.

Idea: a library picks another algorithm for another number of rows (more splits for few rows, wider tiles for many), each of
which adds in another order, so a token's bits would depend on who shares its batch (He et al. 2025, "Defeating
nondeterminism in LLM inference"). Here one tile serves every number of rows, and K is walked from front to back: row 0
alone is row 0 of any batch. It costs speed, so it is used only where invariance is asked for.

Reference: torch.nn.functional.linear.
"""

# A launch takes num_warps and num_stages, too.
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl

BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 64
WIDE = (32, 32, 32)  # float32: twice the room, and no tensor cores


@triton.jit(do_not_specialize=["T"])
def linear_kernel(
    x, w, bias, out, T, stride_x, stride_w,
    N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x + m[:, None] * stride_x + k[None, :]
    w_at = w + n[None, :] * stride_w + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        left = k < K - start
        a = tl.load(x_at + start, mask=(m[:, None] < T) & left[None, :], other=0.0)
        b = tl.load(w_at + start, mask=(n[None, :] < N) & left[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    inside = (m[:, None] < T) & (n[None, :] < N)
    tl.store(out + m[:, None] * N + n[None, :], acc.to(out.dtype.element_ty), mask=inside)


def linear(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [T, K] @ weight.T [K, N] + bias -> [T, N] in out_dtype (x's, if None); sums in float32.

    Raises ValueError for shapes, dtypes and layouts that do not fit.
    """
    (T, K), (N, wide) = x_TK.shape, weight_NK.shape
    if wide != K or x_TK.dtype is not weight_NK.dtype:
        raise ValueError(
            f"x [T, K] and weight [N, K] must share K and dtype, got {list(x_TK.shape)} {x_TK.dtype} and "
            f"{list(weight_NK.shape)} {weight_NK.dtype}"
        )
    if x_TK.stride(1) != 1 or weight_NK.stride(1) != 1:
        raise ValueError("rows of x and weight must be contiguous: call .contiguous()")
    out_TN = torch.empty(T, N, dtype=out_dtype or x_TK.dtype, device=x_TK.device)
    if T:
        full = x_TK.dtype is torch.float32
        block_m, block_n, block_k = WIDE if full else (BLOCK_M, BLOCK_N, BLOCK_K)
        linear_kernel[(triton.cdiv(N, block_n), triton.cdiv(T, block_m))](
            x_TK, weight_NK, x_TK if bias_N is None else bias_N, out_TN, T, x_TK.stride(0), weight_NK.stride(0),
            N=N, K=K, BIAS=bias_N is not None, PRECISION="ieee" if full else "tf32", BLOCK_M=block_m,
            BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, num_stages=2 if full else 4,
        )  # fmt: skip
    return out_TN
