"""The keyed noise: its exact integers against a big-integer judge, and its statistics, which a weak hash must fail."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinymoe.ops import noise

MASK = (1 << 64) - 1
INT63 = st.integers(0, 2**63 - 1)


def judge(seed: int, position: int, token: int, stream: int) -> int:
    """The same hash on Python's unbounded integers."""

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    linear = seed * 0xD1342543DE82EF95 + position * 0xAF251AF3B0F025B5 + stream * 0xF1357AEA2E62A9C5
    return mix((mix(linear & MASK) + (token + 1) * 0x9E3779B97F4A7C15) & MASK)


def bits(seeds, positions, tokens, stream=noise.TARGET):
    return noise.hash_bits(torch.tensor(seeds), torch.tensor(positions), torch.tensor(tokens), stream)


@given(st.lists(st.tuples(INT63, st.integers(0, 2**31)), min_size=1, max_size=5), st.integers(0, 7))
@settings(max_examples=200, deadline=None)
def test_bits_equal_big_integers(keys, stream):
    tokens = [0, 1, 2, 4095, 151_935]
    got = bits([s for s, _ in keys], [p for _, p in keys], tokens, stream)
    want = [[judge(s, p, t, stream) for t in tokens] for s, p in keys]
    assert [[b & MASK for b in row] for row in got.tolist()] == want


def test_bits_never_change():
    """Seeded results are a promise across versions. The first is SplitMix64's published first output for seed 0."""
    assert bits([0], [0], [0])[0, 0].item() & MASK == 0xE220A8397B1DCDAF
    assert bits([7], [12], [345])[0, 0].item() & MASK == 0x570853E5B35DB16E
    assert bits([2**63 - 1], [4096], [50_256], noise.DRAFT)[0, 0].item() & MASK == 0x4D5C4A47A1A01C2B


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cpu_and_cuda_agree():
    seeds, positions, tokens = torch.arange(64) * 2**56, torch.arange(64), torch.arange(50_257)
    cpu = noise.hash_bits(seeds, positions, tokens, 1)
    assert torch.equal(cpu, noise.hash_bits(seeds.cuda(), positions.cuda(), tokens.cuda(), 1).cpu())
    u = noise.uniform(seeds, positions, tokens)
    assert torch.equal(u, noise.uniform(seeds.cuda(), positions.cuda(), tokens.cuda()).cpu())
    g = noise.gumbel(seeds, positions, tokens)
    torch.testing.assert_close(
        g, noise.gumbel(seeds.cuda(), positions.cuda(), tokens.cuda()).cpu(), atol=2e-6, rtol=2e-6
    )


# Statistics. Each returns the worst deviation in standard errors; a sound hash stays small, a weak one does not.

AXES = {"seed": 0, "position": 1, "token": 2}


def cube(hash_bits, n=96):
    """hash bits for seeds x positions x tokens, all consecutive: int64 [n, n, n]."""
    seeds, positions = torch.arange(n).repeat_interleave(n), torch.arange(n).repeat(n)
    return hash_bits(seeds, positions, torch.arange(n)).view(n, n, n)


def as_uniform(z):
    return ((z >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def bin_deviation(z):
    counts = torch.bincount((as_uniform(z) * 256).long().flatten(), minlength=256).double()
    expected = z.numel() / 256
    return (((counts - expected) ** 2 / expected).sum().item() - 255) / math.sqrt(2 * 255)


def bit_deviation(z):
    share = torch.stack([((z >> b) & 1).double().mean() for b in range(64)])
    return ((share - 0.5).abs().max() * 2 * math.sqrt(z.numel())).item()


def neighbour_deviation(z, axis):
    u = as_uniform(z) - 0.5
    n = u.shape[axis]
    product = (u.narrow(axis, 0, n - 1) * u.narrow(axis, 1, n - 1)).mean() * 12  # correlation of neighbours
    return (product.abs() * math.sqrt(z.numel())).item()


def avalanche_deviation(hash_bits, axis):
    """Flip one input bit: each output bit should flip half the time."""
    inputs = [torch.arange(512) * 7919, torch.arange(512) * 31, torch.arange(4)]
    before, worst = hash_bits(*inputs), 0.0
    for bit in range(2 if axis == 2 else 16):
        changed = [x ^ (1 << bit) if i == axis else x for i, x in enumerate(inputs)]
        flips = before ^ hash_bits(*changed)
        share = torch.stack([((flips >> b) & 1).double().mean() for b in range(64)])
        worst = max(worst, ((share - 0.5).abs().max() * 2 * math.sqrt(flips.numel())).item())
    return worst


def sound(seeds, positions, tokens):
    return noise.hash_bits(seeds, positions, tokens)


def linear(seeds, positions, tokens):
    """The same key without its finaliser."""
    key = seeds * noise._SEED_STEP + positions * noise._POSITION_STEP
    return key[:, None] + (tokens + 1) * noise._TOKEN_STEP


def arithmetic(seeds, positions, tokens):
    """SplitMix64 with torch's own arithmetic shift, the mistake the masks are there for."""
    z = linear(seeds, positions, tokens)
    z = (z ^ (z >> 30)) * noise._MULTIPLY_1
    z = (z ^ (z >> 27)) * noise._MULTIPLY_2
    return z ^ (z >> 31)


def test_sound_hash_is_uniform():
    z = cube(sound)
    assert abs(bin_deviation(z)) < 4
    assert bit_deviation(z) < 4.5
    assert all(neighbour_deviation(z, axis) < 4.5 for axis in AXES.values())


@pytest.mark.parametrize("axis", AXES.values(), ids=AXES)
def test_one_input_bit_changes_half_of_the_output(axis):
    assert avalanche_deviation(sound, axis) < 5.5  # the worst of 16 x 64 shares
    assert avalanche_deviation(linear, axis) > 40


def test_weak_hashes_are_found_out():
    assert abs(bin_deviation(cube(linear))) > 10
    assert neighbour_deviation(cube(linear), AXES["token"]) > 100
    assert bit_deviation(cube(arithmetic)) > 100


def test_streams_are_unrelated():
    keys = torch.arange(256)
    target, draft = (
        as_uniform(noise.hash_bits(keys, keys, torch.arange(256), s)) - 0.5
        for s in (noise.TARGET, noise.DRAFT)
    )
    assert not torch.equal(target, draft)
    assert ((target * draft).mean() * 12).abs() * math.sqrt(target.numel()) < 4


def test_uniform_never_reaches_its_ends(monkeypatch):
    """All bits zero and all bits one are the extremes of every later step."""
    extremes = torch.tensor([[0, -1, 1 << 11, ~(1 << 11)]])
    monkeypatch.setattr(noise, "hash_bits", lambda *_: extremes.clone())
    u = noise.uniform(None, None, None)
    assert u.dtype == torch.float32
    assert (u > 0).all()
    assert (u < 1).all()
    assert u[0, 0].item() == 2.0**-54
    assert noise.gumbel(None, None, None).isfinite().all()


def test_gumbel_distribution():
    """Kolmogorov-Smirnov against exp(-exp(-x)); the same test rejects normal noise of equal mean and variance."""
    keys = torch.arange(64)
    x = noise.gumbel(keys, keys * 5, torch.arange(4096)).double().flatten().sort().values

    def ks(x):
        n = len(x)
        cdf = (-(-x).exp()).exp()
        steps = torch.arange(n + 1, dtype=torch.float64) / n
        return torch.maximum((steps[1:] - cdf).max(), (cdf - steps[:-1]).max()).item() * math.sqrt(n)

    assert ks(x) < 1.95  # p = 0.001
    normal = torch.randn(len(x), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert ks((normal * math.pi / math.sqrt(6) + 0.5772).sort().values) > 20


def test_upper_tail_is_fine_grained():
    """Large noise decides draws: no two of the largest values may share a cell (they would at 2^-24 steps)."""
    keys = torch.arange(256)
    largest = noise.gumbel(keys, keys, torch.arange(16_384)).flatten().topk(2000).values
    assert largest.unique().numel() >= 1998
