"""The rotation of queries and keys against complex numbers in float64, with the tables of a step and with those of a kernel."""

import pytest
import torch

from tinymoe import ops
from tinymoe.core.model_config import RopeConfig
from tinymoe.model.layers import Rotary, rope_frequencies
from tinymoe.ops import rotary

HEADS = (4, 2, 16)  # queries, keys, width
POSITIONS = torch.tensor([0, 1, 7, 300])
YARN = RopeConfig(theta=500.0, kind="yarn", factor=2.0, original_max_position_embeddings=16)
PARTIAL = RopeConfig(theta=1e4, rotary_fraction=0.5)


def turned(x_TNH, rope):
    """Components i and i + R are one complex number, turned by position * frequency and stretched by yarn's factor."""
    freq, factor = rope_frequencies(rope, x_TNH.shape[-1])
    R, x = len(freq), x_TNH.double()
    turn = torch.polar(torch.tensor(factor).double(), POSITIONS[:, None, None].double() * freq.double())
    y = torch.complex(x[..., :R], x[..., R : 2 * R]) * turn
    return torch.cat((y.real, y.imag, x[..., 2 * R :]), dim=-1)


def normed(x_TNH, weight_H):
    x = x_TNH.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight_H.double()


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("rope", [RopeConfig(theta=1e4), YARN, PARTIAL], ids=["whole", "yarn", "partial"])
def test_queries_and_keys_are_turned_by_their_position(rope, norms):
    N, G, H = HEADS
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(len(POSITIONS), (N + 2 * G) * H, generator=generator)
    q_weight, k_weight = torch.randn(2, H, generator=generator) if norms else (None, None)
    before, kept = qkv.clone(), qkv.view(-1, N + 2 * G, H)
    freq, factor = rope_frequencies(rope, H)
    angle_TR = POSITIONS[:, None] * freq
    for cos, sin in (Rotary(rope, H)(POSITIONS), (angle_TR.cos() * factor, angle_TR.sin() * factor)):
        got = ops.rotate(qkv, cos, sin, HEADS, q_weight, k_weight)
        parts = kept[:, :N], kept[:, N : N + G]
        for found, part, weight_H in zip(got, parts, (q_weight, k_weight)):
            wanted = turned(part if weight_H is None else normed(part, weight_H), rope)
            assert torch.allclose(found.double(), wanted, atol=1e-4)
    assert torch.equal(qkv, before)


def test_one_row_is_turned_as_among_others():
    x_TNH = torch.randn(len(POSITIONS), 4, 16, generator=torch.Generator().manual_seed(1))
    cos, sin = Rotary(RopeConfig(theta=1e4), 16)(POSITIONS)
    together = rotary.rope_pairs(x_TNH, cos, sin)
    for t in range(len(POSITIONS)):
        one = slice(t, t + 1)
        assert torch.equal(rotary.rope_pairs(x_TNH[one], cos[one], sin[one]), together[one])
