"""How many kernels a layer compiles: it does not grow with the numbers of tokens that come by.

Without a GPU, from what the launchers pass: the arguments that Triton compiles anew for are recorded. On a GPU, from the
caches of the compiled kernels.
"""

import os
import random

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 leaves nothing to compile", allow_module_level=True)
pytest.importorskip("triton")

from aot import record

from tinymoe.kernels import (
    blocked_sparse,
    combine,
    dense_masked,
    expert_paths,
    fused_moe,
    grouped_gemm,
    sort_tokens,
    topk_softmax,
)

KERNELS = {
    topk_softmax: ("topk_softmax_kernel",),
    sort_tokens: ("count_kernel", "sort_kernel"),
    grouped_gemm: ("up_kernel", "down_kernel", "up_tma_kernel", "down_tma_kernel", "gather_kernel"),
    combine: ("combine_kernel",),
    fused_moe: ("decode_up_kernel", "decode_down_kernel"),
    dense_masked: ("dense_up_kernel", "dense_down_kernel"),
    blocked_sparse: ("topology_kernel", "sdd_kernel", "dsd_kernel"),
}
SHAPES = {"qwen3": (128, 8, 2048, 768), "mixtral": (8, 2, 4096, 14336), "dsv2": (64, 6, 2048, 1408), "trace16": (16, 2, 2048, 768)}  # fmt: skip
RANDOM = [random.Random(0).randint(1, 9000) for _ in range(200)]
BUCKETS = [1 << bits for bits in range(15)]


def signature(call) -> tuple:
    """What Triton keys its cache by: dtypes, compile-time arguments, and of other integers whether they are 1 or a
    multiple of 16, unless the kernel says that it does not care."""
    kernel, args, options = call
    given = dict(zip(kernel.arg_names, args)) | options
    found = [kernel.fn.__name__]
    for name, parameter in zip(kernel.arg_names, kernel.params):
        value = given.pop(name)
        if isinstance(value, torch.Tensor):
            found.append((name, str(value.dtype)))
        elif parameter.is_constexpr or value is None:
            found.append((name, value))
        elif parameter.do_not_specialize:
            found.append((name, type(value).__name__))
        else:
            found.append((name, value == 1, value % 16 == 0))
    return (*found, *sorted(given.items()))


def compiled_for(way, shape, tokens) -> set[tuple]:
    E, K, H, I = SHAPES[shape]

    def meta(*sizes, dtype=torch.bfloat16):
        return torch.empty(*sizes, device="meta", dtype=dtype)

    calls = []

    def nested(left):
        if left:
            module, names = left[0]
            found = record(module, names, lambda: nested(left[1:]))
            calls.extend(call for each in found for call in each)
        else:
            arguments = (
                meta(tokens, H),
                meta(tokens, E, dtype=torch.float32),
                meta(E, 2 * I, H),
                meta(E, H, I),
                K,
            )
            way(*arguments)

    with pytest.MonkeyPatch.context() as patch:  # descriptors need addresses: a GPU counts their kernels
        patch.setattr(grouped_gemm, "takes_tma", lambda *_: False)
        nested(list(KERNELS.items()))
    return {signature(call) for call in calls}


WAYS = {"planned": fused_moe.fused_moe, "invariant": lambda *a: fused_moe.fused_moe(*a, invariant=True)} | {
    path: lambda *a, path=path: expert_paths.run(path, *a) for path in expert_paths.PATHS
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_random_numbers_of_tokens_compile_what_the_buckets_compile(way, shape):
    buckets = set().union(*(compiled_for(WAYS[way], shape, tokens) for tokens in BUCKETS))
    found = set().union(*(compiled_for(WAYS[way], shape, tokens) for tokens in RANDOM))
    assert found <= buckets, f"{len(found - buckets)} more kernels"
    gemms = [s for s in buckets if s[0] not in ("sort_kernel", "count_kernel")]
    assert 2 <= len(gemms) <= (14 if way == "planned" else 5)


def test_a_bucket_is_served_by_one_set_of_paths():
    for E, K, *_ in SHAPES.values():
        for tokens in RANDOM:
            bucket = 1 << (tokens - 1).bit_length()
            for path in expert_paths.PATHS:
                assert expert_paths.serves(path, tokens, E, K) == expert_paths.serves(path, bucket, E, K)
        for tokens in BUCKETS:
            assert expert_paths.serves(expert_paths.INVARIANT_PATH, tokens, E, K)


def test_a_kernel_that_cared_for_the_tokens_would_be_found(monkeypatch):
    """The number of tokens as a compile-time argument: each of them is a kernel of its own."""
    original = dense_masked._constants
    monkeypatch.setattr(dense_masked, "_constants", lambda *a: original(*a) | {"num_stages": 2 + random.randint(0, 99)})  # fmt: skip
    found = set().union(*(compiled_for(WAYS["dense16"], "trace16", tokens) for tokens in RANDOM[:20]))
    assert len(found) > 10


@pytest.mark.gpu
def test_the_caches_do_not_grow_on_a_gpu():
    E, K, H, I = 16, 2, 256, 1024  # wide enough for tensor descriptors
    x = torch.randn(9000, H, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(9000, E, device="cuda")
    weights = [torch.randn(E, 2 * I, H, device="cuda", dtype=torch.bfloat16) * H**-0.5]
    weights += [torch.randn(E, H, I, device="cuda", dtype=torch.bfloat16) * I**-0.5]

    def compiled():
        kernels = [getattr(module, name) for module, names in KERNELS.items() for name in names]
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    def serve(tokens):
        for way, run in WAYS.items():
            if way in ("planned", "invariant") or expert_paths.serves(way, tokens, E, K):
                run(x[:tokens], logits[:tokens], *weights, K)

    for tokens in (*BUCKETS[:14], 9000):
        serve(tokens)
    before = compiled()
    for tokens in RANDOM:
        serve(tokens)
    torch.cuda.synchronize()
    assert before > 10
    assert compiled() == before
