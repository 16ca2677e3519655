"""What the GPU benchmarks compute themselves; the measuring needs a GPU."""

import pytest
import torch

from tinymoe.__main__ import main
from tinymoe.bench.gpu import attention, moe

LIMITS = {"copy_bytes_per_s": 4e12, "bf16_flops": 8e14}


def test_roofline_is_bytes_or_multiplications():
    """Qwen3-30B-A3B's layer by hand: an expert is 3 * 2048 * 768 numbers of 2 bytes."""
    shape = moe.SHAPES["qwen3-30b-a3b"]
    one = (8 * 3 * 2048 * 768 + 2 * 2048) * 2 / 4e12 * 1e6
    assert moe.roofline_us(shape, 1, 8, LIMITS) == pytest.approx(one)
    many = 2 * 16384 * 8 * 3 * 2048 * 768 / 8e14 * 1e6
    assert moe.roofline_us(shape, 16384, 128, LIMITS) == pytest.approx(many)


def test_attention_bounds():
    row = {"kind": "decode", "heads": 32, "kv_heads": 8, "head_dim": 128, "batch": 64, "context": 4096}
    assert attention.bound_us(row, LIMITS) == pytest.approx(64 * 4096 * 4096 / 4e12 * 1e6)
    row = {"kind": "prefill", "heads": 32, "kv_heads": 8, "head_dim": 128, "batch": 1, "context": 8192}
    assert attention.bound_us(row, LIMITS) == pytest.approx(4 * 32 * 128 * 8192**2 / 2 / 8e14 * 1e6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("suite", ["kernels", "attention", "tiles"])
def test_without_a_gpu_it_says_so(suite):
    with pytest.raises(SystemExit, match=f"bench {suite} needs a CUDA device and Triton"):
        main(["bench", suite])
