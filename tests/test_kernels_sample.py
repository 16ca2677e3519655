"""The kernels at the end of a step, sampling and counting: interpreted on a CPU (TRITON_INTERPRET=1), or on a GPU."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1 (make kernels)", allow_module_level=True)

import triton
import triton.language as tl

from tinymoe.core.params import SamplingParams
from tinymoe.engine.sampling import Sampler
from tinymoe.engine.sampling.logits import Row
from tinymoe.kernels import sample as sampling
from tinymoe.kernels.count_routes import count_routes
from tinymoe.kernels.sample import sample
from tinymoe.ops import noise, reference

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
NAN, INF = float("nan"), float("inf")

# Sampling


@triton.jit
def noise_kernel(seeds, positions, bits_out, uniform_out, gumbel_out, STREAM: tl.constexpr, V: tl.constexpr):
    row, v = tl.program_id(0), tl.arange(0, V)
    seed, position = tl.load(seeds + row).to(tl.uint64), tl.load(positions + row).to(tl.uint64)
    linear = seed * sampling.SEED_STEP + position * sampling.POSITION_STEP + STREAM
    bits = sampling.hash_bits(sampling.mix(linear), v * 9973)
    u = sampling.uniform(bits)
    tl.store(bits_out + row * V + v, bits.to(tl.int64))
    tl.store(uniform_out + row * V + v, u)
    tl.store(gumbel_out + row * V + v, sampling.gumbel(u))


@pytest.mark.parametrize("stream", [noise.TARGET, noise.DRAFT, 7])
def test_noise_is_that_of_the_engine_bit_for_bit(stream):
    R, V = 40, 128
    generator = torch.Generator().manual_seed(stream)
    seeds = torch.randint(-(2**62), 2**62, (R,), generator=generator).to(DEVICE)
    seeds[:2] = torch.tensor([0, 2**63 - 1])
    positions = torch.randint(0, 2**31, (R,), generator=generator).to(DEVICE)
    bits = torch.zeros(R, V, dtype=torch.int64, device=DEVICE)
    u, g = torch.zeros(2, R, V, device=DEVICE)
    key = stream * sampling.STREAM_STEP % (1 << 64)
    noise_kernel[(R,)](seeds, positions, bits, u, g, STREAM=key, V=V)
    tokens = torch.arange(V, device=DEVICE) * 9973
    assert torch.equal(bits, noise.hash_bits(seeds, positions, tokens, stream))
    assert torch.equal(u, noise.uniform(seeds, positions, tokens, stream))
    exact = -(-(-u.double()).log1p()).log()
    torch.testing.assert_close(g.double(), exact, rtol=1e-6, atol=1e-6)


@triton.jit
def gumbel_kernel(u, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, sampling.gumbel(tl.load(u + at)))


def test_gumbel_is_exact_from_end_to_end():
    """Small u decide draws; there, 1 - u is 1 in float32."""
    u = torch.cat((2.0 ** -torch.linspace(1e-3, 54, 1022), torch.tensor([2.0**-54, 1 - 2.0**-24]))).to(DEVICE)
    out = torch.full_like(u, NAN)
    gumbel_kernel[(1,)](u, out, N=1024)
    torch.testing.assert_close(out.double(), -(-(-u.double()).log1p()).log(), rtol=1e-6, atol=1e-6)


def scores64(logits, temperature, seeds, positions, stream=0):
    """What is maximised, in float64, the noise from the exact logarithm of the float32 uniform."""
    u = noise.uniform(seeds, positions, torch.arange(logits.shape[1], device=DEVICE), stream).double()
    x, t = logits.double(), temperature.double()[:, None]
    return torch.where(t > 0, x / t - (-(-u).log1p()).log(), x)


def draw(R, V, temperatures, seed=0, scale=4.0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(R, V, generator=generator) * scale
    seeds = torch.randint(0, 2**63 - 1, (R,), generator=generator)
    positions = torch.randint(0, 40_000, (R,), generator=generator)
    temperature = torch.tensor([temperatures[r % len(temperatures)] for r in range(R)])
    return [t.to(DEVICE) for t in (logits, temperature, seeds, positions)]


TEMPERATURES = [0.0, 1.0, 0.3, 1e-6, 1.7, 1e4, 1e-30]
VOCABS = [1, 7, 1024, 2500] if not ON_GPU else [1, 7, 1024, 50_257, 151_936]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("V", VOCABS)
def test_ids_are_those_of_the_reference(V, dtype):
    R = 21 if not ON_GPU else 200
    logits, *keys = draw(R, V + 5, TEMPERATURES, seed=V)
    logits = logits.to(dtype)[:, 2 : V + 2]  # rows with a gap, not aligned
    poisoned = logits.clone()
    logits._base[:, :2], logits._base[:, V + 2 :] = NAN, INF
    ids, best = sample(logits, *keys, 1)
    assert (ids.dtype, best.dtype) == (torch.int64, torch.float32)
    assert torch.equal(best, poisoned.float().amax(-1))
    scores = scores64(logits, *keys, stream=1)
    if V > 1:
        top = scores.topk(2).values
        clear = (top[:, 0] - top[:, 1] > 1e-4) | (keys[0] == 0)
        assert clear.sum() >= 0.9 * R or V < 1000
    else:
        clear = torch.ones(R, dtype=torch.bool, device=DEVICE)
    assert torch.equal(ids[clear], scores.argmax(-1)[clear])
    again, wanted_best = reference.sample(logits, *keys, 1)
    assert torch.equal(again[clear], ids[clear])
    assert torch.equal(best, wanted_best)


@pytest.mark.parametrize("splits", [2, 4, 16])
def test_the_number_of_splits_changes_nothing(splits):
    """16 splits of 3000 tokens: some of them are empty."""
    logits, *keys = draw(14, 3000, TEMPERATURES)
    logits[0, [5, 1500, 2999]] = 40  # a tie between splits
    logits[7, :] = -INF
    logits[8, 2047] = NAN
    alone, many = sample(logits, *keys, splits=1), sample(logits, *keys, splits=splits)
    assert torch.equal(alone[0], many[0])
    assert torch.equal(alone[1].nan_to_num(nan=1e9), many[1].nan_to_num(nan=1e9))
    assert alone[0][0] == 5
    assert alone[0][7] == 0


def test_splits_fill_the_device_and_are_few():
    assert {sampling.splits_for(R, 151_936) for R in range(1, 600)} == {1, 2, 4, 8, 16, 32, 64, 128}
    assert sampling.splits_for(1, 151_936) == 128
    assert sampling.splits_for(512, 151_936) == 2
    assert {sampling.splits_for(R, 1000) for R in (1, 8, 512)} == {1}


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.zeros(4, 2100, device=DEVICE)
    logits[1, [700, 2050]] = 3
    logits[2, 0] = -0.0
    logits[3] = -5
    logits[3, 1024:] = -4
    zero = torch.zeros(4, device=DEVICE)
    for splits in (1, 2):
        ids, best = sample(logits, zero, zero.long(), zero.long(), splits=splits)
        assert ids.tolist() == [0, 700, 0, 1024]
        assert best.tolist() == [0, 3, 0, -4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("splits", [1, 2])
def test_broken_rows_are_seen_and_leave_the_others_alone(temperature, splits):
    logits, _, *keys = draw(6, 1500, [1.0])
    t = torch.full((6,), temperature, device=DEVICE)
    wanted = sample(logits, t, *keys)[0]
    logits[1, 3], logits[2, 1400], logits[3], logits[4, 1:] = NAN, INF, -INF, -INF
    logits[5, 7], logits[5, 8] = INF, NAN
    ids, best = sample(logits, t, *keys, splits=splits)
    assert ids[0] == wanted[0]
    assert ids[4] == 0  # the only one that is left
    assert best.isnan().tolist() == [False, True, False, False, False, True]
    assert best[2:4].tolist() == [INF, -INF]
    assert ((ids >= 0) & (ids < 1500)).all()
    again, wanted_best = reference.sample(logits, t, *keys)
    assert torch.equal(again, ids)
    assert torch.equal(best.nan_to_num(nan=1e9), wanted_best.nan_to_num(nan=1e9))


def test_draws_follow_the_softmax():
    """Chi-square at p = 0.001; the same draws do not fit another temperature."""
    R, V = (600, 5) if not ON_GPU else (100_000, 5)
    logits = torch.tensor([0.3, -1.0, 1.1, 0.0, -0.5], device=DEVICE).expand(R, V)
    keys = torch.full((R,), 11, device=DEVICE), torch.arange(R, device=DEVICE)
    ids, _ = sample(logits, torch.full((R,), 0.7, device=DEVICE), *keys)
    counts = torch.bincount(ids, minlength=V).double()

    def chi_square(temperature):
        expected = (logits[0].double() / temperature).softmax(0) * R
        return ((counts - expected) ** 2 / expected).sum().item()

    assert chi_square(0.7) < 18.47  # 4 degrees of freedom
    assert chi_square(1.4) > 40


def test_plain_requests_get_what_the_sampler_chooses():
    logits, _, seeds, positions = draw(24, 1300, [1.0], seed=3)
    temperature = [(0.0, 0.6, 1.0, 2.0)[r % 4] for r in range(24)]
    rows = [
        Row(SamplingParams(temperature=t), seed, position, [1], [])
        for t, seed, position in zip(temperature, seeds.tolist(), positions.tolist())
    ]
    for stream in (noise.TARGET, noise.DRAFT):
        wanted = [s.token for s in Sampler().sample(logits, rows, stream=stream)]
        given = torch.tensor(temperature, device=DEVICE), seeds, positions.int(), stream
        for draw_all in (sample, reference.sample):
            assert draw_all(logits, *given)[0].tolist() == wanted


def test_no_row_and_refusals():
    logits, *keys = draw(2, 8, [1.0])
    ids, best = sample(logits[:0], *(k[:0] for k in keys))
    assert ids.shape == best.shape == (0,)
    with pytest.raises(ValueError, match=r"seeds must be a contiguous \[2\] of int64; got int64 \[1\]"):
        sample(logits, keys[0], keys[1][:1], keys[2])
    with pytest.raises(ValueError, match=r"logits must be \[R, V\] with contiguous rows .* \[8, 2\]"):
        sample(logits.T, *keys)


# Counting

ROUTES = [
    (1, 1, 1, 1),
    (3, 7, 2, 5),
    (2, 0, 2, 4),
    (2, 300, 4, 60),
    (0, 3, 2, 4),
    (1, 700, 3, 15),
    (2, 5, 8, 16),
]
if ON_GPU:
    ROUTES += [(48, 512, 8, 128), (24, 8000, 4, 32), (2, 100, 2, 512)]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize(("L", "T", "K", "E"), ROUTES)
def test_visits_are_counted(L, T, K, E, dtype):
    """Against a loop. Rows of nobody, ids that no expert has, and the rows behind those of the step."""
    generator = torch.Generator().manual_seed(E)
    held = torch.randint(-2, E + 2, (L, T + 3, K), generator=generator).to(dtype)
    held[1:2, ::2] = -1
    ids = held.to(DEVICE)[:, :T]
    load = torch.randint(0, 2**40, (L, E), generator=generator)
    distinct = torch.randint(0, 2**40, (L,), generator=generator)
    wanted = torch.tensor(
        [[held[layer, :T].eq(e).sum().item() for e in range(E)] for layer in range(L)], dtype=torch.int64
    ).view(L, E)
    for count in (count_routes, reference.count_routes):
        for step in (None, torch.full((L, E), -7, dtype=torch.int32, device=DEVICE)):
            got, seen = load.to(DEVICE, copy=True), distinct.to(DEVICE, copy=True)
            count(ids, got, seen, step)
            assert torch.equal(got.cpu(), load + wanted)
            assert torch.equal(seen.cpu(), distinct + (wanted > 0).sum(1))
            assert step is None or torch.equal(step.cpu().long(), wanted)


def test_what_cannot_be_counted():
    ids = torch.zeros(2, 3, 4, dtype=torch.int32, device=DEVICE)
    load, distinct = (torch.zeros(*shape, dtype=torch.int64, device=DEVICE) for shape in ((2, 5), (2,)))
    with pytest.raises(
        ValueError, match=r"int16, int32 or int64 \[L, T, K\].* got torch.float32 \[2, 3, 4\]"
    ):
        count_routes(ids.float(), load, distinct)
    with pytest.raises(ValueError, match=r"contiguous in a layer.* strides \[12, 4, 1\]"):
        count_routes(ids[:, :, :2], load, distinct)
    with pytest.raises(ValueError, match=r"load must be a contiguous torch.int64 \[2, 5\], got torch.int32"):
        count_routes(ids, load.int(), distinct)
    with pytest.raises(
        ValueError, match=r"distinct must be a contiguous torch.int64 \[2\], got torch.int64 \[1\]"
    ):
        count_routes(ids, load, distinct[:1])
    with pytest.raises(ValueError, match=r"step must be a contiguous torch.int32 \[2, 5\], got torch.int64"):
        count_routes(ids, load, distinct, load)
