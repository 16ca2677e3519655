"""Draw a step's tokens: for each row of logits the best token, or a draw at its temperature, in two launches.

argmax(logits / temperature + noise) is a draw from softmax(logits / temperature) if the noise is Gumbel's (the
Gumbel-max trick), so a draw is one pass over the row, like a maximum: no sort, no sum, no probabilities. The noise is
hashed from (stream, seed, position, token id), as in tinymoe.ops.noise, bit for bit: a token does not depend on who
shares its batch.

A row is cut into splits, so that one row fills the device as well as many do; a second launch takes the best of the
splits' best. Best means the highest score and, among equals, the lowest id, an order without ties: the number of splits
cannot change the result. Scores are summed in float64, where even at a temperature of 1e-6 the noise is not rounded off.

Reference: tinymoe.ops.reference.sample.
"""

# A launch takes num_warps, too.
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl

from tinymoe.kernels.checks import FLOATS, INTEGERS, check

# The constants of tinymoe.ops.noise, unsigned.
TOKEN_STEP = tl.constexpr(0x9E3779B97F4A7C15)
SEED_STEP = tl.constexpr(0xD1342543DE82EF95)
POSITION_STEP = tl.constexpr(0xAF251AF3B0F025B5)
STREAM_STEP = 0xF1357AEA2E62A9C5
MULTIPLY_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MULTIPLY_2 = tl.constexpr(0x94D049BB133111EB)

INF = tl.constexpr(float("inf"))
NOBODY = tl.constexpr(0x7FFFFFFF)  # above every token id
BLOCK = 1024  # tokens at a time
PROGRAMS = 1024  # about as many as keep a large device busy
MAX_SPLITS = 128


@triton.jit
def mix(z):
    """The finaliser of SplitMix64, on uint64: right shifts bring in zeros."""
    z = (z ^ (z >> 30)) * MULTIPLY_1
    z = (z ^ (z >> 27)) * MULTIPLY_2
    return z ^ (z >> 31)


@triton.jit
def hash_bits(key, token):
    return mix(key + (token + 1).to(tl.uint64) * TOKEN_STEP)


@triton.jit
def uniform(bits):
    """float32 in the open interval (0, 1) from the upper 53 bits, small values with a full mantissa."""
    u = ((bits >> 11).to(tl.int64).to(tl.float32) + 0.5) * 1.1102230246251565e-16  # 2^-53
    return tl.minimum(u, 0.99999994)  # 1 - 2^-24


@triton.jit
def gumbel(u):
    """-log(-log(1 - u)) in float32."""
    rest = 1.0 - u
    # log1p: the rounding error of `rest` cancels in the quotient (Kahan; Goldberg 1991, theorem 4).
    quotient = tl.log(rest) * (u / tl.where(rest == 1.0, 1.0, 1.0 - rest))
    return -tl.log(tl.where(rest == 1.0, u, -quotient))


@triton.jit
def best_of(score, token):
    """The lowest token among those with the highest score."""
    top = tl.max(score, 0)
    return top, tl.min(tl.where(score == top, token, NOBODY), 0)


@triton.jit
def sample_kernel(
    logits, temperatures, seeds, positions, scores, ids, bests, stride,
    V: tl.constexpr, STREAM: tl.constexpr, PER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program is one row and PER tokens. Writes their best score, its token, and the highest logit, at [row, split]."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row).to(tl.float32)
    random = temperature > 0
    factor = 1.0 / tl.where(random, temperature, 1.0).to(tl.float64)
    seed, position = tl.load(seeds + row).to(tl.uint64), tl.load(positions + row).to(tl.uint64)
    key = mix(seed * SEED_STEP + position * POSITION_STEP + STREAM)
    lane = split * PER + tl.arange(0, BLOCK)
    score = tl.full((BLOCK,), -INF, tl.float64)
    token = lane
    best = tl.full((BLOCK,), -INF, tl.float32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, PER, BLOCK):
        v = lane + start
        x = tl.load(logits + row * stride + v, mask=v < V, other=-INF).to(tl.float32)
        broken = tl.where(x == x, broken, 1)
        x = tl.where(x == x, x, INF)
        best = tl.maximum(best, x)
        here = x.to(tl.float64) * factor
        if random:
            here += gumbel(uniform(hash_bits(key, v))).to(tl.float64)
        token = tl.where(here > score, v, token)  # not for an equal: the token that it has is lower
        score = tl.maximum(score, here)
    top, chosen = best_of(score, token)
    highest = tl.where(tl.max(broken, 0) > 0, float("nan"), tl.max(best, 0))
    at = row * tl.num_programs(1) + split
    tl.store(scores + at, top)
    tl.store(ids + at, chosen)
    tl.store(bests + at, highest)


@triton.jit
def merge_kernel(scores, split_ids, split_bests, ids, bests, SPLITS: tl.constexpr):
    """One program is one row: the best of its splits."""
    row = tl.program_id(0).to(tl.int64)
    at = row * SPLITS + tl.arange(0, SPLITS)
    _, chosen = best_of(tl.load(scores + at), tl.load(split_ids + at))
    best = tl.load(split_bests + at)
    broken = tl.max(tl.where(best == best, 0, 1), 0)
    highest = tl.max(tl.where(best == best, best, -INF), 0)
    tl.store(ids + row, chosen)
    tl.store(bests + row, tl.where(broken > 0, float("nan"), highest))


def splits_for(num_rows: int, vocab: int) -> int:
    """Into how many splits a row is cut: a power of two."""
    wanted = max(1, min(PROGRAMS // max(1, num_rows), MAX_SPLITS))
    return min(1 << (wanted.bit_length() - 1), triton.next_power_of_2(triton.cdiv(vocab, BLOCK)))


def sample(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    seeds_R: torch.Tensor,
    positions_R: torch.Tensor,
    stream: int = 0,
    *,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [R, V] float16, bfloat16 or float32, temperature [R] float32 (0: greedy), seeds [R] int64, positions [R]
    int64 or int32 -> ids [R] int64, and the highest logit of each row [R] float32: NaN if one of them is NaN.

    A row whose highest logit is not finite has no token: its id lies in range and means nothing. splits: a power of two
    instead of `splits_for`'s. Raises ValueError for shapes, dtypes and layouts that do not fit.
    """
    check("logits", logits_RV, ("R", "V"), FLOATS, "rows")
    R, V = logits_RV.shape
    if not V:
        raise ValueError(f"logits must be [R, V] with V at least 1, got {[R, V]}")
    check("temperature", temperature_R, (R,), (torch.float32,))
    check("seeds", seeds_R, (R,), (torch.int64,))
    check("positions", positions_R, (R,), INTEGERS)
    if splits is not None and (type(splits) is not int or splits < 1 or splits & (splits - 1)):
        raise ValueError(f"splits must be a power of two of at least 1, or None, got {splits!r}")
    device, S = logits_RV.device, splits or splits_for(R, V)
    ids_R = torch.empty(R, dtype=torch.int64, device=device)
    best_R = torch.empty(R, dtype=torch.float32, device=device)
    if not R:
        return ids_R, best_R
    scores = torch.empty(R, S, dtype=torch.float64, device=device)
    ids, bests = ids_R, best_R
    if S > 1:
        ids = torch.empty(R, S, dtype=torch.int32, device=device)
        bests = torch.empty(R, S, dtype=torch.float32, device=device)
    sample_kernel[(R, S)](
        logits_RV, temperature_R, seeds_R, positions_R, scores, ids, bests, logits_RV.stride(0),
        V=V, STREAM=stream * STREAM_STEP % (1 << 64), PER=triton.cdiv(triton.cdiv(V, BLOCK), S) * BLOCK,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    if S > 1:
        merge_kernel[(R,)](scores, ids, bests, ids_R, best_R, SPLITS=S, num_warps=1)
    return ids_R, best_R
