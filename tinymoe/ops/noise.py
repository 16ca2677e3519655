"""Random numbers without a generator: every draw is a pure function of (stream, seed, position, token id).

A generator hands out numbers in the order in which it is asked, so a request's tokens would depend on its
neighbours, on preemption and on how its prompt was chunked. Here they do not: the same four integers give the same
64 bits on every device and in every batch (the idea of counter-based generators: Salmon et al. 2011, "Parallel
random numbers: as easy as 1, 2, 3"). The mixing function is the finaliser of SplitMix64 (Steele et al. 2014).
"""

import torch
from torch import Tensor

TARGET, DRAFT = 0, 1  # streams: a draft model must never see the noise its target will use


def _signed(value: int) -> int:
    """The int64 with the bit pattern of an unsigned 64-bit integer."""
    return value - (1 << 64) if value >= 1 << 63 else value


_TOKEN_STEP = _signed(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, the increment of SplitMix64
_SEED_STEP = _signed(0xD1342543DE82EF95)  # three more odd constants without a small linear relation
_POSITION_STEP = _signed(0xAF251AF3B0F025B5)
_STREAM_STEP = _signed(0xF1357AEA2E62A9C5)
_MULTIPLY_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = _signed(0x94D049BB133111EB)


def _xor_shift_(z: Tensor, bits: int, scratch: Tensor) -> Tensor:
    """z ^= z >>> bits, in place. torch shifts arithmetically, so the copies of the sign bit are masked off."""
    torch.bitwise_right_shift(z, bits, out=scratch)
    return z.bitwise_xor_(scratch.bitwise_and_((1 << (64 - bits)) - 1))


def _mix_(z: Tensor) -> Tensor:
    """The SplitMix64 finaliser, a bijection on 64 bits, in place on int64 (multiplication wraps around)."""
    scratch = torch.empty_like(z)
    _xor_shift_(z, 30, scratch).mul_(_MULTIPLY_1)
    _xor_shift_(z, 27, scratch).mul_(_MULTIPLY_2)
    return _xor_shift_(z, 31, scratch)


def hash_bits(seeds_R: Tensor, positions_R: Tensor, token_ids_V: Tensor, stream: int = TARGET) -> Tensor:
    """64 hashed bits for each (row, token): int64 [R, V] from int64 seeds [R], positions [R] and token ids [V]."""
    key_R = _mix_(
        seeds_R * _SEED_STEP + positions_R * _POSITION_STEP + _signed((stream * _STREAM_STEP) % (1 << 64))
    )
    return _mix_(key_R[:, None] + (token_ids_V + 1) * _TOKEN_STEP)


def uniform(seeds_R: Tensor, positions_R: Tensor, token_ids_V: Tensor, stream: int = TARGET) -> Tensor:
    """float32 [R, V], uniform in the open interval (0, 1).

    53 bits are turned into a float, so small values keep a full mantissa (down to 2^-54) and none is 0; values that
    would round to 1 become the largest float32 below it.
    """
    bits = (
        hash_bits(seeds_R, positions_R, token_ids_V, stream)
        .bitwise_right_shift_(11)
        .bitwise_and_((1 << 53) - 1)
    )
    return bits.to(torch.float32).add_(0.5).mul_(2.0**-53).clamp_(max=1 - 2.0**-24)


def gumbel(seeds_R: Tensor, positions_R: Tensor, token_ids_V: Tensor, stream: int = TARGET) -> Tensor:
    """float32 [R, V] of standard Gumbel noise: argmax(logits + noise) is a draw from softmax(logits).

    With u uniform, -log(-log(1 - u)): large noise, which decides the draw, comes from small u, where float32 is
    fine-grained. The textbook -log(-log(u)) takes it from u near 1, where neighbouring floats are 2^-24 apart.
    """
    u = uniform(seeds_R, positions_R, token_ids_V, stream)
    return u.neg_().log1p_().neg_().log_().neg_()
