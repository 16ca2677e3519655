"""Attention-side kernels, compiled for sm_90 where no GPU is: every shipped configuration, from what its launcher passes."""

import os
import re

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 leaves nothing to compile", allow_module_level=True)
pytest.importorskip("triton")

from aot import build, record, vectors, wgmma

from tinymoe.kernels import paged_attention as paged
from tinymoe.kernels import rms_norm as norm
from tinymoe.kernels import rope as rotation
from tinymoe.kernels import store_kv as store


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def attention_calls(heads, kv_heads, head_dim, lengths, *, sequences=4, context=8192, **options):
    """What paged_attention launches: (attention, merge), each with its calls."""
    empty = {"device": "meta", "dtype": torch.bfloat16}
    rows = sequences * lengths
    qkv = torch.empty(rows, (heads + 2 * kv_heads) * head_dim, **empty)
    kv = torch.empty(2, 1024, 16, kv_heads, head_dim, **empty)
    ints = {"device": "meta", "dtype": torch.int32}
    return record(
        paged,
        ("attention_kernel", "merge_kernel"),
        lambda: paged.paged_attention(
            qkv[:, : heads * head_dim].view(rows, heads, head_dim),
            kv[0],
            kv[1],
            torch.empty(sequences, 512, **ints),
            torch.empty(sequences + 1, **ints),
            torch.empty(sequences, **ints),
            max_query_len=lengths,
            max_context=context,
            **options,
        ),
    )


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_decode(head_dim, tmp_path):
    for options in ({}, {"window": 128}, {"window": 1024}):
        [call], merges = attention_calls(32, 8, head_dim, 1, **options)
        assert call[2]["SPLIT"] == (options != {"window": 128})
        assert [build(merge, tmp_path).spilled for merge in merges] == [0] * call[2]["SPLIT"]
        assert call[2]["ROWS"] == 16
        made = build(call, tmp_path)
        assert made.spilled == 0
        assert made.registers <= 170, "at least three programs must fit on a multiprocessor"
        assert 3 * (made.shared + 1024) <= 228 * 1024
        assert "mma.sync" in made.ptx
        assert vectors(made.ptx)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_verification(head_dim, tmp_path):
    [call], [_] = attention_calls(32, 8, head_dim, 5)
    made = build(call, tmp_path)
    assert made.spilled == 0
    assert wgmma(made.ptx)
    assert 2 * (made.shared + 1024) <= 228 * 1024
    assert vectors(made.ptx)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_prefill(head_dim, tmp_path):
    for options in ({}, {"window": 128}):
        [call], [] = attention_calls(32, 8, head_dim, 2048, min_query_len=100, **options)
        assert call[2]["ROWS"] == 128
        assert not call[2]["SPLIT"]
        made = build(call, tmp_path)
        assert made.spilled == 0
        assert wgmma(made.ptx)
        assert vectors(made.ptx)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_invariant(head_dim, tmp_path):
    """Decodes and chunks use the same matrix instructions and the same tile."""
    (short, chunk), [_] = attention_calls(32, 8, head_dim, 2048, invariant=True)
    made = [build(call, tmp_path) for call in (short, chunk)]
    assert [m.spilled for m in made] == [0, 0]
    assert wgmma(made[0].ptx) == wgmma(made[1].ptx) != set()
    assert {name: short[2][name] for name in ("ROWS", "TILE", "num_warps")} == {
        name: chunk[2][name] for name in ("ROWS", "TILE", "num_warps")
    }


def test_large_groups(tmp_path):
    """Multi-query attention: 71 heads share one key/value head."""
    [decode], _ = attention_calls(71, 1, 64, 1)
    assert build(decode, tmp_path).spilled == 0


@pytest.mark.parametrize(("D", "add"), [(2048, True), (2880, True), (257, False)])
def test_rms_norm(D, add, tmp_path):
    x, weight = (torch.empty(*shape, D, device="meta", dtype=torch.bfloat16) for shape in ((4,), ()))
    launch = (
        (lambda: norm.add_rms_norm(x, x, weight, 1e-6)) if add else (lambda: norm.rms_norm(x, weight, 1e-6))
    )
    [[call]] = record(norm, ("rms_norm_kernel",), launch)
    made = build(call, tmp_path)
    assert made.spilled == 0
    assert bool(re.search(r"ld\.global\S*\.v4", made.ptx)) == (D % 8 == 0)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("pages", [False, True])
def test_rope(pages, full, tmp_path):
    N, G, H, T = (16, 16, 128, 4) if full else (32, 4, 128, 4)
    empty = {"device": "meta", "dtype": torch.bfloat16}
    kv = torch.empty(2, 64, 16, G, H, **empty)
    cos = torch.empty(T, H // 2, device="meta")
    cache = (kv[0], kv[1], torch.empty(T, device="meta", dtype=torch.int64)) if pages else None
    weights = [torch.empty(heads * H if full else H, **empty) for heads in (N, G)]
    qkv = torch.empty(T, (N + 2 * G) * H, **empty)
    [[call]] = record(
        rotation,
        ("rope_kernel",),
        lambda: rotation.rope(
            qkv,
            cos,
            cos,
            (N, G, H),
            q_weight=weights[0],
            k_weight=weights[1],
            clip=8.0 if full else None,
            cache=cache,
        ),
    )
    made = build(call, tmp_path)
    assert made.spilled == 0
    assert re.search(r"ld\.global\S*\.v[24]", made.ptx)
    assert re.search(r"st\.global\S*\.v[24]", made.ptx)


def test_store_kv(tmp_path):
    kv = torch.empty(2, 64, 16, 8, 128, device="meta", dtype=torch.bfloat16)
    k = torch.empty(4, 48, 128, device="meta", dtype=torch.bfloat16)[:, 32:40]
    slots = torch.empty(4, device="meta", dtype=torch.int64)
    [[call]] = record(store, ("store_kv_kernel",), lambda: store.store_kv(k, k, kv[0], kv[1], slots))
    made = build(call, tmp_path)
    assert made.spilled == 0
    assert re.search(r"ld\.global\S*\.v4", made.ptx)
    assert re.search(r"st\.global\S*\.v4", made.ptx)
