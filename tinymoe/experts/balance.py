"""Keeping the experts equally busy during training: auxiliary loss, z-loss, selection bias, and how to measure it.

A load n_i counts the (token, slot) pairs that chose expert i. Serving never needs this room.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tinymoe.core.model_config import require

Mode = Literal["none", "aux", "aux-z", "bias"]
MODES: tuple[Mode, ...] = ("none", "aux", "aux-z", "bias")


def expert_counts(ids_TK: Tensor, num_experts: int) -> Tensor:
    """Loads of one layer: ids [T, K] int64 -> [E] int64. No data-dependent shape, so it never waits for a GPU."""
    flat = ids_TK.reshape(-1)
    return torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(
        0, flat, torch.ones_like(flat)
    )


def auxiliary_loss(logits_TE: Tensor, counts_E: Tensor) -> Tensor:
    """E · Σ f_i P_i of one layer, f_i = n_i / Σ n, P_i the mean router probability (Fedus et al. 2021, Switch, eq. 4).

    1 when all experts are equally loaded. f is a count and has no gradient; P carries it all.
    """
    probability_E = logits_TE.float().softmax(-1).mean(0)
    share_E = counts_E / counts_E.sum().clamp(min=1)
    return logits_TE.shape[-1] * (share_E * probability_E).sum()


def z_loss(logits_TE: Tensor) -> Tensor:
    """Mean of logsumexp(logits)², which keeps router logits small (Zoph et al. 2022, ST-MoE, eq. 5)."""
    return logits_TE.float().logsumexp(-1).square().mean()


@torch.no_grad()
def update_selection_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> None:
    """b_i += rate · sign(mean n - n_i), in place: a busy expert becomes harder to choose (Wang et al. 2024, 2408.15664).

    Over the last axis, so all layers [L, E] can go at once.
    """
    load_E = counts_E.to(bias_E.dtype)
    bias_E.add_((load_E.mean(-1, keepdim=True) - load_E).sign(), alpha=rate)


def max_violation(counts_E: Tensor) -> Tensor:
    """MaxVio = max n_i / mean n - 1 over the last axis (2408.15664): 0 is perfect, E/K - 1 is collapse."""
    load = counts_E.double()
    return load.amax(-1) / load.mean(-1).clamp(min=1e-12) - 1


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """How the trainer balances.

    mode: "none"; "aux" (auxiliary loss); "aux-z" (and z-loss); "bias" (selection bias, and the auxiliary loss with
        whatever weight it has: 0 for the bias alone).
    aux_weight, z_weight: factors of the losses, which are summed over layers.
    bias_rate: step u of the bias. bias_fade: the bias is frozen from bias_fade[0] of the run on and shrinks
        linearly to zero at bias_fade[1], because the saved model has none.
    """

    mode: Mode = "bias"
    aux_weight: float = 0.01
    z_weight: float = 0.001
    bias_rate: float = 0.001
    bias_fade: tuple[float, float] = (0.5, 0.8)

    def __post_init__(self):
        require(self.mode in MODES, f"balance must be one of {MODES}, got {self.mode!r}")
        for name in ("aux_weight", "z_weight", "bias_rate"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        start, end = self.bias_fade
        require(
            0 <= start < end <= 1,
            f"bias_fade must be two fractions 0 <= start < end <= 1, got {self.bias_fade}",
        )

    def bias_scale(self, progress: float) -> float:
        """Factor on the selection bias when `progress` (0 to 1) of the run is over."""
        start, end = self.bias_fade
        return min(1.0, max(0.0, (end - progress) / (end - start)))


class BalanceSink:
    """Given to Decoder.forward as `sink`: gathers each Mixture-of-Experts layer's losses and loads."""

    def __init__(self, config: BalanceConfig):
        self.config = config
        self.losses: list[Tensor] = []
        self.counts: list[Tensor] = []

    def route(self, layer: int, logits_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        counts_E = expert_counts(ids_TK, logits_TE.shape[-1])
        self.counts.append(counts_E)
        if self.config.mode != "none" and self.config.aux_weight:
            self.losses.append(self.config.aux_weight * auxiliary_loss(logits_TE, counts_E))
        if self.config.mode == "aux-z" and self.config.z_weight:
            self.losses.append(self.config.z_weight * z_loss(logits_TE))

    def loss(self, like: Tensor) -> Tensor:
        """Sum of the weighted losses of all layers; zero on `like`'s device if there are none."""
        return torch.stack(self.losses).sum() if self.losses else like.new_zeros(())
