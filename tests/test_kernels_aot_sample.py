"""The kernels at the end of a step, compiled for sm_90 where no GPU is, from what their launchers pass."""

import os
import re

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 leaves nothing to compile", allow_module_level=True)
pytest.importorskip("triton")

from aot import build, record

from tinymoe.kernels import count_routes as counting
from tinymoe.kernels import sample as sampling


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def meta(*shape, dtype=torch.int64):
    return torch.empty(*shape, device="meta", dtype=dtype)


@pytest.mark.parametrize(("R", "V"), [(1, 151_936), (64, 50_257), (512, 151_936), (3, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sample(R, V, dtype, tmp_path):
    arguments = meta(R, V, dtype=dtype), meta(R, dtype=torch.float32), meta(R), meta(R), 1
    draws, merges = record(sampling, ("sample_kernel", "merge_kernel"), lambda: sampling.sample(*arguments))
    assert (len(draws), len(merges)) == (1, int(V > 1024))
    for call in (*draws, *merges):
        made = build(call, tmp_path)
        assert made.spilled == 0
        assert made.registers <= 128, "four programs must fit on a multiprocessor"
        if call in draws:
            assert not re.search(r"lg2\.approx", made.ptx), "logarithms must be exact to the last bits"
            assert bool(re.search(r"ld\.global\S*\.v4", made.ptx)) == (V % 16 == 0)


@pytest.mark.parametrize(("T", "K", "E"), [(64, 8, 128), (512, 4, 60), (8192, 8, 512)])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_count_routes(T, K, E, dtype, tmp_path):
    for more in ((), (meta(48, E, dtype=torch.int32),)):
        arguments = meta(48, T, K, dtype=dtype), meta(48, E), meta(48), *more
        [[call]] = record(
            counting,
            ("count_routes_kernel",),
            lambda: counting.count_routes(*arguments),  # noqa: B023
        )
        made = build(call, tmp_path)
        assert made.spilled == 0
        assert not re.search(r"atom\.global|red\.global", made.ptx), "sums must not depend on an order"
