"""The products of kernels/linear.py. Judge: float64."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 (make kernels)", allow_module_level=True)

from tinymoe.kernels.linear import FEW, linear, linear_few

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, *([torch.bfloat16] if GPU else [])]  # interpreted, bf16 products are garbage


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(got, x, w, bias=None):
    K = x.shape[1]
    wanted = x.double() @ w.double().T + (0 if bias is None else bias.double())
    scale = 1e-5 if got.dtype is torch.float32 else 1e-2
    torch.testing.assert_close(got.double(), wanted, rtol=scale, atol=scale * K**0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "N", "K"), [(1, 3, 5), (4, 32, 32), (33, 7, 70), (0, 4, 4), (40, 65, 33)])
def test_any_shape(T, N, K, dtype):
    x, w, bias = draw(T, K, dtype=dtype), draw(N, K, dtype=dtype, seed=1), draw(N, dtype=dtype, seed=2)
    close(linear(x, w, bias), x, w, bias)
    wide = linear(x, w, out_dtype=torch.float32)
    assert wide.dtype is torch.float32
    close(wide, x, w)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "N", "K"), [(1, 5, 16), (FEW, 3, 33), (2, 8, 1030), (0, 4, 4)])
def test_few_rows(T, N, K, dtype):
    x, w = draw(T, K, dtype=dtype), draw(N, K, dtype=dtype, seed=1)
    close(linear_few(x, w, torch.float32), x, w)


def test_rows_with_strides_and_nan_neighbours():
    x, w = draw(6, 80)[:, :40], draw(9, 64, seed=1)[:, :40]
    x[3] = torch.nan
    for product in (linear(x, w), linear_few(x, w, torch.float32)):
        good = [0, 1, 2, 4, 5]
        close(product[good], x[good], w)
        assert product[3].isnan().all()


@pytest.mark.skipif(
    not GPU, reason="numpy's own product, by which the interpreter multiplies, is not invariant"
)
def test_a_row_does_not_know_its_batch():
    x, w = draw(70, 48, dtype=DTYPES[-1]), draw(40, 48, dtype=DTYPES[-1], seed=1)
    whole = linear(x, w)
    for rows in (slice(0, 1), slice(17, 18), slice(3, 40), slice(64, 70)):
        assert torch.equal(linear(x[rows].contiguous(), w), whole[rows])


def test_refusals():
    with pytest.raises(ValueError, match=r"weight must be \[N, 8\] with .*got float32 \[3, 9\]"):
        linear(draw(2, 8), draw(3, 9))
    with pytest.raises(ValueError, match=r"x must be \[T, K\] with contiguous rows .* with strides \[1, 2\]"):
        linear(draw(8, 2).T, draw(3, 8))
    with pytest.raises(ValueError, match=r"weight must be \[N, 8\] with contiguous rows .* strides \[1, 3\]"):
        linear_few(draw(2, 8), draw(8, 3).T, torch.float32)
