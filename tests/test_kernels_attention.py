"""Attention-side kernels against loops in float64: under TRITON_INTERPRET=1 on a CPU, or compiled on a GPU.

What must not be read holds NaN, what must not be written holds a canary.
"""

# ruff: noqa: E402 (nothing is imported where nothing can run)

import math
import os

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a CUDA device", allow_module_level=True)

from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tinymoe import ops
from tinymoe.kernels import paged_attention as paged
from tinymoe.kernels.paged_attention import Tile, paged_attention
from tinymoe.kernels.rms_norm import add_rms_norm, rms_norm
from tinymoe.kernels.rope import rope
from tinymoe.kernels.store_kv import store_kv

DEVICE = "cpu" if INTERPRETED else "cuda"
CANARY = 12345.0


@pytest.fixture
def small_tiles(monkeypatch):
    """16 positions a tile and at most 16 rows, so that short contexts have many tiles, splits and row tiles."""
    for name in ("short_tile", "chunk_tile"):
        monkeypatch.setattr(paged, name, lambda *_: Tile(16, 16, 4, 2))


@pytest.fixture
def same_dot_for_each_row(monkeypatch):
    """The interpreter multiplies with BLAS, whose sums depend on a row's place in the matrix; tensor cores' do not."""
    if INTERPRETED:

        def create_dot(_, a, b, d, *_options):
            return TensorHandle((a.data[:, None, :] * b.data.T[None]).sum(-1) + d.data, d.dtype.scalar)

        monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def fused_multiply_add(monkeypatch):
    """The interpreter rounds the product, a GPU does not: then -1e30 times the scale is not exactly what is added."""
    if INTERPRETED:

        def create_fma(_, x, y, z):
            exact = x.data.astype(np.float64) * y.data + z.data
            return TensorHandle(exact.astype(np.float32), z.dtype.scalar)

        monkeypatch.setattr(InterpreterBuilder, "create_fma", create_fma)


class Case:
    """A batch over a pool in which every slot that no one owns holds NaN; block 0 is nobody's and pads the tables."""

    def __init__(self, lengths, contexts, heads=(2, 1, 32), block_size=4, window=None, seed=0, gap=0):
        generator = torch.Generator().manual_seed(seed)
        self.heads, self.block_size, self.window = heads, block_size, window
        self.lengths, self.contexts = lengths, contexts
        N, G, H = heads
        counts = [math.ceil(c / block_size) for c in contexts]
        kv = torch.full((2, sum(counts) + 3, block_size, G, H), torch.nan)
        order = (torch.randperm(sum(counts) + 2, generator=generator) + 1).tolist()
        self.tables = torch.zeros(len(contexts), max([*counts, 1]) + 2, dtype=torch.int32)
        for s, (length, context, count) in enumerate(zip(lengths, contexts, counts)):
            self.tables[s, :count] = torch.tensor(order[:count])
            order = order[count:]
            seen_from = 0 if window is None else max(0, context - length - window + 1)
            for position in range(seen_from, context):
                block = int(self.tables[s, position // block_size])
                kv[:, block, position % block_size] = torch.randn(2, G, H, generator=generator)
        self.rows = sum(lengths) + gap  # `gap` rows at the end belong to nobody
        q = torch.randn(self.rows, N + 1, H, generator=generator)
        self.q, self.kv = q.to(DEVICE), kv.to(DEVICE)
        starts = [sum(lengths[:s]) for s in range(len(lengths) + 1)]
        self.starts = torch.tensor(starts, dtype=torch.int32)

    def run(self, only=None, **options):
        """Attention of the whole batch, or of one sequence alone. `out` begins as a canary."""
        N = self.heads[0]
        pick = slice(None) if only is None else slice(only, only + 1)
        starts, q = self.starts, self.q[:, :N]
        if only is not None:
            start, stop = starts[only : only + 2].tolist()
            starts, q = starts[only : only + 2] - start, q[start:stop]
        lengths, contexts = self.lengths[pick], self.contexts[pick]
        given = {
            "max_query_len": max(lengths),
            "max_context": max([1, *contexts]),
            "window": self.window,
            "out": torch.full(q.shape, CANARY, device=DEVICE),
        } | options
        return paged_attention(
            q,
            *self.kv,
            self.tables[pick].to(DEVICE),
            starts.to(DEVICE),
            torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
            **given,
        ).cpu()

    def expected(self):
        N, G, H = self.heads
        q, kv = self.q.double().cpu().numpy(), self.kv.double().cpu().numpy()
        out = np.full((self.rows, N, H), CANARY)
        for s, (length, context) in enumerate(zip(self.lengths, self.contexts)):
            for t in range(length if context else 0):
                position = context - length + t
                first = 0 if self.window is None else max(0, position - self.window + 1)
                places = [
                    (int(self.tables[s, p // self.block_size]), p % self.block_size)
                    for p in range(first, position + 1)
                ]
                for n in range(N):
                    k, v = (np.stack([kv[i, b, o, n // (N // G)] for b, o in places]) for i in (0, 1))
                    row = int(self.starts[s]) + t
                    scores = k @ q[row, n] / math.sqrt(H)
                    weights = np.exp(scores - scores.max())
                    out[row, n] = weights @ v / weights.sum()
        return torch.from_numpy(out)

    def check(self, **options):
        got = self.run(**options)
        torch.testing.assert_close(got.double(), self.expected(), rtol=1e-5, atol=2e-6)
        return got


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("heads", [(2, 2, 32), (3, 1, 32), (8, 2, 32)])
def test_mixed_batch(heads, block_size, small_tiles):
    """Decodes, a verification and a chunk together; canaries in rows of nobody."""
    Case([1, 3, 9, 1], [23, 17, 21, 1], heads, block_size, gap=2).check()


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_head_dims_at_shipped_tiles(head_dim):
    Case([1, 1, 2], [37, 150, 2], (2, 1, head_dim), 16).check()


def test_chunk_at_shipped_tiles():
    """More rows than a short tile takes, from an empty cache and after a cached prefix."""
    Case([7, 11, 1], [7, 45, 40], (16, 2, 32), 16).check()


def test_group_larger_than_a_tile():
    """17 heads share one key/value head: 32 rows, 17 of them used."""
    Case([1, 3], [9, 20], (17, 1, 32)).check()


def splits(monkeypatch, size):
    """Splits of `size` positions, which the public function refuses below 128."""
    monkeypatch.setattr(paged, "split_for", lambda *_: size)


@pytest.mark.parametrize("window", [None, 7, 40])
def test_splits(window, small_tiles, monkeypatch):
    """Many splits: contexts that fill one, some and all of them; a bound far above every context."""
    splits(monkeypatch, 16)
    case = Case([1, 1, 2, 5, 1], [1, 70, 33, 50, 16], (4, 2, 32), window=window, gap=1)
    case.check(max_context=100)


# What a row must not see may overflow before it is masked.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize("window", [1, 5, 100])
def test_window(window, head_dim, small_tiles):
    """What has left the window may belong to somebody else by now: it holds NaN."""
    Case([1, 9, 1, 18], [30, 21, 3, 40], (2, 1, head_dim), window=window).check()


def test_a_window_needs_few_splits(small_tiles, monkeypatch):
    """Splits are counted from the first that is seen, so their number depends on the window, not on the context."""
    splits(monkeypatch, 16)
    monkeypatch.setattr(paged, "SHORT_WINDOW", 0)
    kernel, grids = paged.attention_kernel, []

    class Watched:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(paged, "attention_kernel", Watched())
    for context in (90, 81, 80, 65):
        Case([1, 6], [context, 75], (4, 2, 32), window=20).check()
    assert {grid[1] for grid in grids} == {3}  # one tile; 27 positions touch at most 3 splits of 16


def test_padding_writes_nothing(small_tiles, monkeypatch):
    """Context 0 with a row of its own, and sequences without rows: both are padding of a captured graph."""
    case = Case([1, 1, 0, 0], [19, 0, 0, 5], gap=1)
    got = case.check()
    assert (got[1:] == CANARY).all()
    splits(monkeypatch, 16)
    assert torch.equal(case.run()[1:], got[1:])


def test_nothing_to_do():
    case = Case([1], [3])
    empty = torch.empty(0, 2, 32, device=DEVICE)
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out = paged_attention(empty, *case.kv, none[:0, None], none, none[:0], max_query_len=0, max_context=0)
    assert out.shape == (0, 2, 32)


def test_refusals():
    case = Case([1], [3])
    with pytest.raises(ValueError, match=r"head dims \(32, 64, 128\).*got 48"):
        Case([1], [3], (2, 1, 48)).run()
    with pytest.raises(ValueError, match="must be a multiple of key/value heads, got 3 and 2"):
        Case([1], [3], (3, 2, 32)).run()
    with pytest.raises(ValueError, match="multiple of 128 positions, got 100"):
        case.run(split=100)
    case.kv = case.kv.double()
    with pytest.raises(
        ValueError, match=r"must share float16, bfloat16 or float32; got torch.float32, torch.float64"
    ):
        case.run()


@pytest.mark.parametrize("invariant", [False, True])
def test_a_row_alone_is_the_row_in_a_batch(invariant, small_tiles, monkeypatch):
    """Bit for bit. Not invariant: as long as the split is the same."""
    splits(monkeypatch, 16)
    monkeypatch.setattr(paged, "INVARIANT_SPLIT", 32)
    case = Case([1, 2, 19, 1], [70, 33, 40, 5], (4, 2, 32), window=50)
    batch = case.run(invariant=invariant)
    for s in range(4):
        start, stop = case.starts[s : s + 2].tolist()
        assert torch.equal(case.run(only=s, invariant=invariant), batch[start:stop])


@pytest.mark.parametrize("window", [None, 21])
def test_invariant_rows_ignore_the_query_length(window, same_dot_for_each_row, monkeypatch):
    """The same positions as one chunk, as single decodes and in pieces: the same bits."""
    monkeypatch.setattr(paged, "invariant_tile", lambda *_: Tile(16, 16, 4, 2))
    monkeypatch.setattr(paged, "INVARIANT_SPLIT", 32)
    case = Case([30], [75], (4, 2, 32), window=window)
    whole = case.check(invariant=True)
    for pieces in ([1] * 3 + [27], [4, 5, 2, 19]):
        done = 0
        for length in pieces:
            part = Case.__new__(Case)
            part.__dict__ |= case.__dict__
            part.q = case.q[done : done + length]
            part.lengths, part.contexts = [length], [45 + done + length]
            part.starts = torch.tensor([0, length], dtype=torch.int32)
            done += length
            assert torch.equal(part.run(invariant=True), whole[done - length : done])


def far_cache(G=1, H=32, block_size=4):
    """Two caches of 3 blocks whose last one lies past 2^31 numbers; only touched pages exist."""
    stride = (1 << 30) + 64
    pool = torch.empty(2 * stride + 2 * block_size * G * H + 8, device=DEVICE)
    shape, strides = (3, block_size, G, H), (stride, G * H, H, 1)
    return [pool.as_strided(shape, strides, block_size * G * H * i) for i in (0, 1)]


def test_offsets_beyond_two_to_31(small_tiles):
    case = Case([2], [7])
    far_caches = far_cache()
    for near, far in zip(case.kv, far_caches):
        for new, old in enumerate(case.tables[0, :2].tolist(), start=1):
            far[new] = near[old]
    expected = case.expected()
    case.kv, case.tables = far_caches, torch.tensor([[1, 2]], dtype=torch.int32)
    torch.testing.assert_close(case.run().double(), expected, rtol=1e-5, atol=2e-6)


# ------------------------------------------------------------------------------------------------- store_kv


@pytest.mark.parametrize(("G", "H", "block_size"), [(1, 32, 4), (3, 48, 1), (2, 64, 16)])
def test_store_kv(G, H, block_size):
    qkv = torch.randn(5, 2 + 2 * G, H, device=DEVICE)
    k, v = qkv[:, 2 : 2 + G], qkv[:, 2 + G :]
    kv = torch.full((2, 2 * 5, block_size, G, H), CANARY, device=DEVICE)
    slots = torch.tensor([3, -1, 9, 0, -1], device=DEVICE)
    wanted = kv.clone()
    for t in (0, 2, 3):
        place = (int(slots[t]) // block_size, int(slots[t]) % block_size)
        wanted[0][place], wanted[1][place] = k[t], v[t]
    store_kv(k, v, *kv, slots)
    assert torch.equal(kv, wanted)
    store_kv(k[:0], v[:0], *kv, slots[:0])
    with pytest.raises(ValueError, match="must fit caches"):
        store_kv(k[..., 1:], v[..., 1:], *kv, slots)


def test_store_kv_beyond_two_to_31():
    k_cache, v_cache = far_cache()
    k, v = torch.randn(2, 1, 1, 32, device=DEVICE)
    store_kv(k, v, k_cache, v_cache, torch.tensor([10], device=DEVICE))
    assert torch.equal(k_cache[2, 2], k[0])
    assert torch.equal(v_cache[2, 2], v[0])


# ------------------------------------------------------------------------------------------------- rms_norm


def norm64(x, weight, eps):
    x = x.double().cpu()
    return x / (x * x).mean(-1, keepdim=True).add(eps).sqrt() * weight.double().cpu()


@pytest.mark.parametrize("D", [1, 64, 257, 2880])
def test_rms_norm(D):
    x, residual = torch.randn(2, 2, 3, D + 1, device=DEVICE)[
        ..., :D
    ]  # rows with a gap: a wrong mask would read it
    weight = torch.randn(D, device=DEVICE)
    for given in (x, x[0, 0], x[:0]):
        got = rms_norm(given, weight, 1e-5)
        torch.testing.assert_close(got.double().cpu(), norm64(given, weight, 1e-5), rtol=1e-5, atol=1e-6)
    got, summed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, x + residual)
    torch.testing.assert_close(got.double().cpu(), norm64(x + residual, weight, 1e-5), rtol=1e-5, atol=1e-6)


def test_rms_norm_of_zeros_and_refusals():
    x = torch.zeros(2, 8, device=DEVICE)
    assert torch.equal(rms_norm(x, x[0] + 1, 1e-6), x)
    with pytest.raises(ValueError, match=r"must be a contiguous \[8\]"):
        rms_norm(x, x[0, :7], 1e-6)
    with pytest.raises(ValueError, match="must be alike"):
        add_rms_norm(x, x[:1], x[0], 1e-6)


# ----------------------------------------------------------------------------------------------------- rope


def turned64(x, cos, sin):
    """Pairs (i, i + R) as complex numbers, one by one."""
    out, R = x.clone(), cos.shape[1]
    for t in range(x.shape[0]):
        for n in range(x.shape[1]):
            for i in range(R):
                z = complex(x[t, n, i], x[t, n, i + R]) * complex(cos[t, i], sin[t, i])
                out[t, n, i], out[t, n, i + R] = z.real, z.imag
    return out


@pytest.mark.parametrize("clip", [None, 0.6])
@pytest.mark.parametrize("norm", [None, "head", "full"])
@pytest.mark.parametrize(
    ("heads", "R"), [((4, 2, 32), 16), ((9, 3, 16), 4), ((3, 3, 20), 10), ((2, 1, 8), 3), ((6, 6, 12), 4)]
)
def test_rope(heads, R, norm, clip):
    N, G, H = heads
    T = 2
    qkv = torch.randn(T, (N + 2 * G) * H + 5, device=DEVICE)[:, :-5]
    angle = torch.rand(T, R, device=DEVICE) * 6
    cos, sin = angle.cos(), angle.sin()
    weights = {}
    if norm:
        widths = (H, H) if norm == "head" else (N * H, G * H)
        weights = {name: torch.randn(w, device=DEVICE) for name, w in zip(("q_weight", "k_weight"), widths)}
    wanted = []
    parts = qkv[:, : (N + G) * H].split((N * H, G * H), dim=1)
    for part, count, weight in zip(parts, (N, G), list(weights.values()) or (None, None)):
        if norm == "full":
            part = norm64(part, weight, 1e-5)
        part = part.reshape(T, count, H).double().cpu()
        if norm == "head":
            part = norm64(part, weight, 1e-5)
        part = part if clip is None else part.clamp(-clip, clip)
        wanted.append(turned64(part, cos.double().cpu(), sin.double().cpu()))
    v = qkv[:, (N + G) * H :].reshape(T, G, H)
    v = v if clip is None else v.clamp(-clip, clip)
    got = rope(qkv, cos, sin, heads, eps=1e-5, clip=clip, **weights)
    plain = ops.rotate(
        qkv, cos, sin, heads, eps=1e-5, clip=clip, **weights
    )  # the reference: gradients are wanted
    for have, other, want in zip(got, plain, wanted):
        torch.testing.assert_close(have.double().cpu(), want, rtol=1e-5, atol=3e-6)
        torch.testing.assert_close(other.double().cpu(), want, rtol=1e-5, atol=3e-6)

    kv = torch.full((2, 3, 4, G, H), CANARY, device=DEVICE)
    slots = torch.tensor([-1, 9], device=DEVICE)
    for turn, (q_wanted, k_wanted) in ((rope, got), (ops.rotate, plain)):
        mine, stored = kv.clone(), kv.clone()
        stored[0, 2, 1], stored[1, 2, 1] = k_wanted[1], v[1]
        q, nothing = turn(qkv, cos, sin, heads, eps=1e-5, clip=clip, cache=(*mine, slots), **weights)
        assert nothing is None
        assert torch.equal(q, q_wanted)
        assert torch.equal(mine, stored)


def test_a_clip_keeps_nan():
    """A clamp that hid it would hide it from the check of the logits, too."""
    qkv, cos = torch.full((1, 4 * 8), torch.nan, device=DEVICE), torch.ones(1, 4, device=DEVICE)
    kv = torch.zeros(2, 1, 1, 1, 8, device=DEVICE)
    q, _ = rope(
        qkv, cos, cos, (2, 1, 8), clip=1.0, cache=(*kv, torch.zeros(1, dtype=torch.int32, device=DEVICE))
    )
    assert q.isnan().all()
    assert kv.isnan().all()


def test_rope_of_nothing_and_refusals():
    qkv, cos = torch.zeros(2, 4 * 8, device=DEVICE), torch.zeros(2, 4, device=DEVICE)
    q, k = rope(qkv[:0], cos[:0], cos[:0], (2, 1, 8))
    assert q.shape == (0, 2, 8)
    assert k.shape == (0, 1, 8)
    with pytest.raises(ValueError, match=r"qkv must be \[T, 40\]"):
        rope(qkv, cos, cos, (3, 1, 8))
    with pytest.raises(ValueError, match="2 R <= 8"):
        rope(qkv, cos.repeat(1, 2), cos.repeat(1, 2), (2, 1, 8))
    with pytest.raises(ValueError, match=r"norm weights must be \[8\] both, or \[16\] and \[8\]"):
        rope(qkv, cos, cos, (2, 1, 8), q_weight=cos[0], k_weight=cos[0])
