"""The small parts of a decoder layer: norm, rotary angles, dense MLP, activations."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinymoe import ops
from tinymoe.core.model_config import ConfigError, RopeConfig
from tinymoe.experts.paths import Activation

ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def activation(name: str) -> Activation:
    """Raises ConfigError for an unknown name."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"hidden_act {name!r} is not known; known: {sorted(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class Linear(nn.Linear):
    """nn.Linear whose product can be asked to be the same bits for a row whoever shares its batch."""

    invariant = False

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(input, self.weight, self.bias, self.invariant)

    __call__ = forward  # called so often that nn.Module's search for hooks would cost more than it is worth: there are none


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + delta (x itself if there is nothing to add), and its norm: on a GPU one pass over memory."""
        if delta is None:
            return x, ops.rms_norm(x, self.weight, self.eps)
        return ops.add_rms_norm(x, delta, self.weight, self.eps)


class MLP(nn.Module):
    """Gated MLP of width F; gate and up live in one matrix [2F, D]."""

    def __init__(self, hidden_size: int, width: int, act: Activation, bias: bool = False):
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * width, bias=bias)
        self.down = Linear(width, hidden_size, bias=bias)
        self.act = act

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_TF, up_TF = self.gate_up(x_TD).chunk(2, dim=-1)
        return self.down(self.act(gate_TF) * up_TF)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Angle per position of each rotated pair, float32 [R], and the factor on cos and sin (1 except for yarn).

    Sources: linear interpolation (Chen et al. 2023, arXiv 2306.15595); llama3, the frequency bands of Llama 3.1;
    yarn (Peng et al. 2023, arXiv 2309.00071).
    """
    dim = int(head_dim * rope.rotary_fraction)
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    freq = 1.0 / rope.theta**exponent
    if rope.kind == "default":
        return freq, 1.0
    if rope.kind == "linear":
        return freq / rope.factor, 1.0
    original = rope.original_max_position_embeddings or 0
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / freq
        low, high = original / rope.low_freq_factor, original / rope.high_freq_factor
        blend = (original / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        mixed = (1 - blend) * freq / rope.factor + blend * freq
        return torch.where(
            wavelength > low, freq / rope.factor, torch.where(wavelength < high, freq, mixed)
        ), 1.0
    return _yarn_frequencies(rope, dim, freq, original)


def _yarn_frequencies(rope: RopeConfig, dim: int, freq: Tensor, original: int) -> tuple[Tensor, float]:
    def pair_with(rotations: float) -> float:
        """Index of the pair that turns this often over the original context."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # A span below zero (a very short original context) is kept, as in transformers: it scales nothing.
    ramp = ((torch.arange(dim // 2).float() - low) / ((high - low) or 0.001)).clamp(0, 1)
    freq = freq / rope.factor * ramp + freq * (1 - ramp)
    attention_factor = rope.attention_factor
    if attention_factor is None:
        scale = lambda m: 0.1 * m * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0  # noqa: E731
        if rope.mscale and rope.mscale_all_dim:
            attention_factor = scale(rope.mscale) / scale(rope.mscale_all_dim)
        else:
            attention_factor = scale(1.0)
    return freq, attention_factor


class Rotary(nn.Module):
    """cos and sin of each token's angles, computed once a step and shared by all layers."""

    def __init__(self, rope: RopeConfig, head_dim: int):
        super().__init__()
        self.rope, self.head_dim = rope, head_dim
        self._frequencies: dict[
            tuple[torch.device, bool], tuple[Tensor, float]
        ] = {}  # not a buffer: survives meta and dtype casts

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] int64 -> cos and sin, float32: [T, R] for the kernel, elsewhere [T, 1, 2R] as ops.rotary.rope_pairs
        takes them."""
        kernel = ops.gpu.serves(positions_T)
        key = (positions_T.device, kernel)
        if key not in self._frequencies:
            freq, factor = rope_frequencies(self.rope, self.head_dim)
            if not kernel:  # both components of each pair: sin(-a) = -sin(a), cos(-a) = cos(a)
                freq = torch.cat((-freq, freq))[None]
            self._frequencies[key] = (freq.to(positions_T.device), factor)
        freq, factor = self._frequencies[key]
        angle = positions_T.view(-1, *[1] * freq.dim()) * freq
        cos, sin = angle.cos(), angle.sin()
        return (cos, sin) if factor == 1 else (cos * factor, sin * factor)
