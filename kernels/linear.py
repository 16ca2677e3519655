"""Matrix products that a library does not have: in one order whatever the batch, and for few rows of a small weight.

Idea: a library picks another algorithm for another number of rows (more splits for few rows, wider tiles for many), each of
which adds in another order, so a token's bits would depend on who shares its batch (He et al. 2025, "Defeating
nondeterminism in LLM inference"). Here one tile serves every number of rows, and K is walked from front to back: row 0
alone is row 0 of any batch. It costs speed, so it is used only where invariance is asked for. A router's product, on
the other hand, is so small that starting it is most of its time: `linear_few` spreads it over many programs.

Reference: torch.nn.functional.linear.
"""

# A launch takes num_warps and num_stages, too.
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl

from tinymoe.kernels.checks import FLOATS, check, short

BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 64
FEW = 16  # rows that `linear_few` takes
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


@triton.jit
def few_kernel(
    x,
    w,
    out,
    stride_x,
    stride_w,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program is one row of x and BLOCK_N outputs: for few rows, where reading the weights is all there is to do."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        left = k < K - start
        x_K = tl.load(x + row * stride_x + start + k, mask=left, other=0.0).to(tl.float32)
        w_at = w + n[:, None].to(tl.int64) * stride_w + start + k[None, :]
        acc += tl.load(w_at, mask=(n[:, None] < N) & left[None, :], other=0.0).to(tl.float32) * x_K[None, :]
    tl.store(out + row * N + n, tl.sum(acc, 1).to(out.dtype.element_ty), mask=n < N)


def linear_few(x_TK: torch.Tensor, weight_NK: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """x [T, K] @ weight.T [K, N] -> [T, N] for at most FEW rows and a small weight, such as a router's.

    K is at least 1. Raises ValueError for shapes, dtypes and layouts that do not fit.
    """
    T, K, N = _sizes(x_TK, weight_NK, out_dtype)
    if T > FEW or not K:
        raise ValueError(f"x must be [T, K] with T at most {FEW} and K at least 1, got {[T, K]}: take linear")
    out_TN = torch.empty(T, N, dtype=out_dtype, device=x_TK.device)
    if T:
        few_kernel[(triton.cdiv(N, 2), T)](
            x_TK, weight_NK, out_TN, x_TK.stride(0), weight_NK.stride(0), N=N, K=K, BLOCK_N=2,
            BLOCK_K=min(1024, triton.next_power_of_2(K)), num_warps=4,
        )  # fmt: skip
    return out_TN


def linear(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [T, K] @ weight.T [K, N] + bias [N] -> [T, N] in out_dtype (x's, if None); sums in float32. float32, bfloat16 or
    float16; x and weight share one.

    Raises ValueError for shapes, dtypes and layouts that do not fit.
    """
    T, K, N = _sizes(x_TK, weight_NK, out_dtype)
    if bias_N is not None:
        check("bias", bias_N, (N,))
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


def _sizes(x_TK, weight_NK, out_dtype: torch.dtype | None) -> tuple[int, int, int]:
    """T, K and N of arguments that fit each other."""
    check("x", x_TK, ("T", "K"), FLOATS, "rows")
    T, K = x_TK.shape
    check("weight", weight_NK, ("N", K), (x_TK.dtype,), "rows")
    if out_dtype is not None and out_dtype not in FLOATS:
        raise ValueError(f"out_dtype must be one of {', '.join(map(short, FLOATS))}, got {out_dtype}")
    return T, K, weight_NK.shape[0]
