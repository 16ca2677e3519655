"""Muon for the matrices inside the layers, AdamW for the rest; float32 master weights under bfloat16 parameters.

Muon (Jordan et al. 2024): momentum, then the nearest orthogonal matrix by a few Newton-Schulz steps. All matrices of
one shape are orthogonalised in one batch, experts included: an expert's gate is one matrix among many. Update size
and decoupled weight decay as in Moonlight (Liu et al. 2025, arXiv 2502.16982), so that both parts share a learning
rate. AdamW: Loshchilov & Hutter 2019.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# The fused list operations have no public name yet, though torch.optim is built on them.
# pyright: reportPrivateImportUsage=false
import torch
from torch import Tensor, nn

from tinymoe.core.model_config import require

_NEWTON_SCHULZ = (
    3.4445,
    -4.7750,
    2.0315,
)  # quintic that drives singular values to about 1 (Jordan et al. 2024)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """name: "muon" (AdamW for embeddings, norms and routers) or "adamw" for everything. lr: peak learning rate.

    clip: largest global gradient norm. rms: root mean square of a Muon update at lr 1.
    """

    name: Literal["muon", "adamw"] = "muon"
    lr: float = 4e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-10
    clip: float = 1.0
    rms: float = 0.2

    def __post_init__(self):
        require(self.name in ("muon", "adamw"), f"optimizer must be 'muon' or 'adamw', got {self.name!r}")
        require(self.lr > 0, f"lr must be positive, got {self.lr}")


def orthogonalize(matrices_NRC: Tensor, steps: int = 5) -> Tensor:
    """[N, R, C] -> [N, R, C], each about U Vᵀ of its singular value decomposition (singular values 0.7 to 1.2)."""
    a, b, c = _NEWTON_SCHULZ
    x = matrices_NRC / (matrices_NRC.norm(dim=(1, 2), keepdim=True) + 1e-7)
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


def matrices_of(name: str, parameter: Tensor, heads: tuple[int, int, int]) -> list[Tensor]:
    """Views of a fused parameter as the matrices it is made of, each [n, R, C]. heads: N, G, H of attention."""
    N, G, H = heads
    if name.endswith("qkv.weight"):
        return [part[None] for part in parameter.split((N * H, G * H, G * H))]
    if "gate_up" in name:  # [2F, D] or [E, 2F, D], gate rows first
        return [parameter.unflatten(-2, (2, -1)).reshape(-1, parameter.shape[-2] // 2, parameter.shape[-1])]
    return [parameter if parameter.dim() == 3 else parameter[None]]


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Inside a layer and a matrix, but not a router: those pick, and have one row per expert."""
    return (
        name.startswith("layers.")
        and parameter.dim() >= 2
        and "router" not in name
        and "shared_gate" not in name
    )


class Optimizer:
    """step(scale) updates every parameter that has a gradient, with learning rate lr · scale. See OptimizerConfig."""

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], heads: tuple[int, int, int], config: OptimizerConfig
    ):
        self.config, self.heads = config, heads
        named = [(n, p) for n, p in named if p.requires_grad]
        muon = config.name == "muon"
        self.muon = [(n, p) for n, p in named if muon and is_hidden_matrix(n, p)]
        self.adam = [(n, p) for n, p in named if not (muon and is_hidden_matrix(n, p))]
        self.parameters = [p for _, p in self.muon + self.adam]
        # A float32 parameter is its own master.
        self.master = {n: p.detach() if p.dtype == torch.float32 else p.detach().float() for n, p in named}
        self.momentum = {n: torch.zeros_like(self.master[n]) for n, _ in named}
        self.square = {n: torch.zeros_like(self.master[n]) for n, _ in self.adam}
        self.steps = 0

    @torch.no_grad()
    def step(self, scale: float) -> Tensor:
        """Returns the gradient norm before clipping, a scalar on the device."""
        grads = [p.grad.float() for p in self.parameters if p.grad is not None]
        if len(grads) != len(self.parameters):
            missing = [n for n, p in self.muon + self.adam if p.grad is None]
            raise RuntimeError(
                f"no gradient for {missing}: every trained parameter must take part in the loss"
            )
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        torch._foreach_mul_(grads, (self.config.clip / (norm + 1e-6)).clamp(max=1.0))
        self.steps += 1
        lr = self.config.lr * scale
        if self.muon:
            self._muon_step(grads[: len(self.muon)], lr)
        if self.adam:
            self._adam_step(grads[len(self.muon) :], lr)
        copies = [
            (p, self.master[n]) for n, p in self.muon + self.adam if p.data_ptr() != self.master[n].data_ptr()
        ]
        if copies:
            torch._foreach_copy_([p.detach() for p, _ in copies], [m for _, m in copies])
        return norm

    def _muon_step(self, grads: list[Tensor], lr: float) -> None:
        c = self.config
        momentum = [self.momentum[n] for n, _ in self.muon]
        torch._foreach_lerp_(momentum, grads, 1 - c.momentum)
        nesterov = torch._foreach_lerp(grads, momentum, c.momentum)
        masters = [self.master[n] for n, _ in self.muon]
        torch._foreach_mul_(masters, 1 - lr * c.weight_decay)
        groups: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for (name, _), update, master in zip(self.muon, nesterov, masters):
            parts = zip(matrices_of(name, update, self.heads), matrices_of(name, master, self.heads))
            for part, target in parts:
                groups.setdefault((part.shape[1], part.shape[2]), []).append((part, target))
        for (rows, columns), members in groups.items():
            batch = torch.cat([part for part, _ in members])
            batch = orthogonalize(batch.bfloat16() if batch.is_cuda else batch).float()
            pieces = batch.split([part.shape[0] for part, _ in members])
            size = -lr * c.rms * max(rows, columns) ** 0.5
            torch._foreach_add_([target for _, target in members], list(pieces), alpha=size)

    def _adam_step(self, grads: list[Tensor], lr: float) -> None:
        c = self.config
        first, second = c.betas
        momentum, square = ([s[n] for n, _ in self.adam] for s in (self.momentum, self.square))
        torch._foreach_lerp_(momentum, grads, 1 - first)
        torch._foreach_mul_(square, second)
        torch._foreach_addcmul_(square, grads, grads, 1 - second)
        scale = torch._foreach_div(square, 1 - second**self.steps)
        torch._foreach_sqrt_(scale)
        torch._foreach_add_(scale, c.eps)
        masters = [self.master[n] for n, _ in self.adam]
        decayed = [m for m in masters if m.dim() >= 2]
        if decayed:
            torch._foreach_mul_(decayed, 1 - lr * c.weight_decay)
        torch._foreach_addcdiv_(masters, momentum, scale, -lr / (1 - first**self.steps))

    def state(self) -> dict[str, Tensor]:
        """All tensors of the optimizer's state, by name. The number of steps is `steps`."""
        parts = {"master": self.master, "momentum": self.momentum, "square": self.square}
        return {
            f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()
        }

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], steps: int) -> None:
        """Set state and parameters from what `state` gave."""
        for name, tensor in self.state().items():
            tensor.copy_(tensors[name])
        for name, parameter in self.muon + self.adam:
            parameter.copy_(self.master[name])
        self.steps = steps
