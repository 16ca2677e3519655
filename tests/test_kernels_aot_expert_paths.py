"""The dense-masked and block-sparse kernels, compiled for sm_90 where no GPU is, from what their launchers pass."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 leaves nothing to compile", allow_module_level=True)
pytest.importorskip("triton")

from aot import build, record, vectors, wgmma

from tinymoe.kernels import blocked_sparse, combine, dense_masked, sort_tokens

SHAPES = {"mixtral": (8, 2, 4096, 14336), "qwen3": (128, 8, 2048, 768), "trace16": (16, 2, 2048, 768)}
COMBINE = (combine, ("combine_kernel",))
SORT = (sort_tokens, ("count_kernel", "sort_kernel"))


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, device="meta", dtype=dtype)


def launched(way, shape, tokens, module, kernels, dtype=torch.bfloat16, **options):
    """The launches of one layer: (kernel, arguments, options) of each of `kernels`."""
    E, k, H, I = SHAPES[shape]

    def run():
        way(
            meta(tokens, H, dtype=dtype), meta(tokens, k, dtype=torch.int32), meta(tokens, k, dtype=torch.float32),
            meta(E, 2 * I, H, dtype=dtype), meta(E, H, I, dtype=dtype), **options,
        )  # fmt: skip

    quiet = lambda: record(*SORT, lambda: record(*COMBINE, run))  # noqa: E731
    return record(module, kernels, quiet)


@pytest.mark.parametrize(("shape", "tokens"), [("trace16", 16), ("trace16", 256), ("mixtral", 16), ("qwen3", 300)])  # fmt: skip
def test_dense_masked(shape, tokens, tmp_path):
    kernels = ("dense_up_kernel", "dense_down_kernel")
    for [call] in launched(dense_masked.dense_masked, shape, tokens, dense_masked, kernels):
        made = build(call, tmp_path)
        assert made.spilled == 0
        assert vectors(made.ptx)
        if tokens == 16:
            assert wgmma(made.ptx) == {"m64n16k16"}
            assert 2 * (made.shared + 1024) <= 228 * 1024, "two programs must fit on a multiprocessor"
        else:
            assert wgmma(made.ptx)
            assert made.shared <= 227 * 1024


@pytest.mark.parametrize("block", blocked_sparse.BLOCKS)
def test_blocked_sparse(block, tmp_path):
    kernels = ("topology_kernel", "sdd_kernel", "dsd_kernel")
    way = blocked_sparse.blocked_sparse
    [topology], [sdd], [dsd] = launched(way, "qwen3", 1000, blocked_sparse, kernels, block=block)
    assert build(topology, tmp_path).spilled == 0
    for call in (sdd, dsd):
        made = build(call, tmp_path)
        assert made.spilled == 0
        assert made.shared <= 227 * 1024
        assert vectors(made.ptx)
        assert bool(wgmma(made.ptx)) == (block >= 64), (
            "64 rows are the least that the tensor core takes whole"
        )


@pytest.mark.parametrize("way", ["dense", "blocked"])
def test_float32_keeps_its_bits(way, tmp_path):
    module, run, kernels = {
        "dense": (dense_masked, dense_masked.dense_masked, ("dense_up_kernel", "dense_down_kernel")),
        "blocked": (blocked_sparse, blocked_sparse.blocked_sparse, ("sdd_kernel", "dsd_kernel")),
    }[way]
    quiet = [] if way == "dense" else ["topology_kernel"]
    for calls in launched(run, "trace16", 64, module, (*kernels, *quiet), dtype=torch.float32)[:2]:
        made = build(calls[0], tmp_path)
        assert "tf32" not in made.ptx
        assert made.spilled == 0
        assert made.shared <= 227 * 1024


def test_the_same_kernels_serve_every_number_of_tokens():
    """What a launcher fixes at compile time depends on the tile, not on the tokens."""
    seen = {"dense": set(), "blocked": set()}
    for tokens in (1, 7, 31, 33, 100, 1000, 4097):
        for way, module, kernels in (
            (dense_masked.dense_masked, dense_masked, ("dense_up_kernel", "dense_down_kernel")),
            (blocked_sparse.blocked_sparse, blocked_sparse, ("topology_kernel", "sdd_kernel", "dsd_kernel")),
        ):
            for calls in launched(way, "qwen3", tokens, module, kernels):
                name = "dense" if way is dense_masked.dense_masked else "blocked"
                seen[name] |= {(call[0].fn.__name__, str(sorted(call[2].items()))) for call in calls}
    assert {name: len(found) for name, found in seen.items()} == {"dense": 4, "blocked": 3}
