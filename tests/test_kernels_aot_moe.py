"""The MoE kernels, compiled for sm_90 where no GPU is: every planned tile, from what its launcher passes."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 leaves nothing to compile", allow_module_level=True)
pytest.importorskip("triton")

from aot import build, record, vectors, wgmma

from tinymoe.kernels import combine, fused_moe, grouped_gemm, sort_tokens, topk_softmax

SHAPES = {"mixtral": (8, 2, 4096, 14336), "qwen3": (128, 8, 2048, 768)}


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, device="meta", dtype=dtype)


def launched(shape, tokens, module, kernels, **options):
    E, k, H, I = SHAPES[shape]
    call = lambda: fused_moe.fused_moe(  # noqa: E731
        meta(tokens, H), meta(tokens, E, dtype=torch.float32), meta(E, 2 * I, H), meta(E, H, I), k, **options
    )
    others = {fused_moe: ("decode_up_kernel", "decode_down_kernel"), topk_softmax: ("topk_softmax_kernel",),
              sort_tokens: ("count_kernel", "sort_kernel"), combine: ("combine_kernel",),
              grouped_gemm: ("up_kernel", "down_kernel", "up_tma_kernel", "down_tma_kernel", "gather_kernel")}  # fmt: skip

    def nested(left):
        if not left:
            return call()
        other, names = left[0]
        return record(other, names, lambda: nested(left[1:]))

    return record(module, kernels, lambda: nested([(m, n) for m, n in others.items() if m is not module]))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_few_tokens_take_two_launches_without_a_sort(shape, padded, tmp_path):
    options = {"num_valid": meta(1, dtype=torch.int32)} if padded else {}
    up, down = launched(shape, 1, fused_moe, ("decode_up_kernel", "decode_down_kernel"), **options)
    for call in (*up, *down):
        made = build(call, tmp_path)
        assert made.spilled == 0
        assert made.registers <= 128, "four programs must fit on a multiprocessor"
        assert vectors(made.ptx)
    assert len(up) == len(down) == 1


@pytest.mark.parametrize(("shape", "tokens"), [("mixtral", 16), ("qwen3", 64)])
def test_some_tokens_swap_the_operands(shape, tokens, tmp_path):
    """16 tokens a tile fit the tensor core only as its narrow side."""
    for [call] in launched(shape, tokens, grouped_gemm, ("up_kernel", "down_kernel")):
        assert call[2]["SWAP"]
        made = build(call, tmp_path)
        assert made.spilled == 0
        assert wgmma(made.ptx) == {"m64n16k16"}
        assert 2 * (made.shared + 1024) <= 228 * 1024, "two programs must fit on a multiprocessor"
        assert vectors(made.ptx)


@pytest.mark.parametrize(("shape", "tokens"), [("mixtral", 64), ("mixtral", 4096), ("mixtral", 16384), ("qwen3", 256), ("qwen3", 4096)])  # fmt: skip
def test_many_tokens_use_wide_tiles(shape, tokens, tmp_path):
    kernels = ("up_kernel", "down_kernel", "up_tma_kernel", "down_tma_kernel", "gather_kernel")
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # descriptors need addresses: their kernels are tried on a GPU
        patch.setattr(grouped_gemm, "takes_tma", lambda *_: False)
        calls = [call for found in launched(shape, tokens, grouped_gemm, kernels) for call in found]
    assert [call[0].fn.__name__ for call in calls] == ["up_kernel", "down_kernel"]
    for call in calls:
        made = build(call, tmp_path)
        assert made.spilled == 0
        assert wgmma(made.ptx)
        assert made.shared <= 227 * 1024


def test_routing_takes_the_number_of_valid_rows_only_where_it_is_given(tmp_path):
    found = []
    for options in ({}, {"num_valid": meta(1, dtype=torch.int32)}):
        [[call]] = launched("qwen3", 64, topk_softmax, ("topk_softmax_kernel",), **options)
        made = build(call, tmp_path)
        assert made.spilled == 0
        found.append(made.ptx.count(".param .u64"))
    assert found[1] == found[0] + 1


@pytest.mark.parametrize("tokens", [16, 64, 5000])
def test_routing_sorting_and_combining(tokens, tmp_path):
    for module, kernels in (
        (topk_softmax, ("topk_softmax_kernel",)),
        (sort_tokens, ("count_kernel", "sort_kernel")),
        (combine, ("combine_kernel",)),
    ):
        for found in launched("qwen3", tokens, module, kernels):
            for call in found:
                assert build(call, tmp_path).spilled == 0
