"""The Mixture-of-Experts block: route, dispatch, run the experts, combine, add the shared expert."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinymoe import ops
from tinymoe.core.model_config import MoEConfig
from tinymoe.experts import paths
from tinymoe.experts.dispatch import LocalDispatch
from tinymoe.experts.router import Router
from tinymoe.model.layers import MLP, Activation, Linear


class RouteSink(Protocol):
    """Somebody who wants to know the routes: load counters, recorded experts, auxiliary losses."""

    def route(self, layer: int, logits_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None: ...


class Experts(nn.Module):
    """The weights of E gated MLPs, stacked: gate_up [E, 2F, D] (gate rows first), down [E, D, F]."""

    def __init__(self, num_experts: int, hidden_size: int, width: int):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * width, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, width))

    def lay_out_for_cpu(self) -> None:
        """Put input features outermost in memory (shapes stay): a product with few rows then needs no packing."""
        for weight in (self.gate_up, self.down):
            weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)


class MoE(nn.Module):
    """One Mixture-of-Experts block (dropless: every chosen expert runs).

    path: how the experts run, a name of experts.paths.PATHS, or "fused" (SwiGLU only): the whole block is one operation,
    which on a GPU means the fused kernels. invariant: see Decoder.
    """

    invariant = False

    def __init__(self, config: MoEConfig, hidden_size: int, layer: int, act: Activation):
        super().__init__()
        self.config, self.layer, self.act = config, layer, act
        self.path = "adaptive"
        self.router = Router(config, hidden_size)
        self.dispatcher = LocalDispatch(config.num_experts)
        self.experts = Experts(config.num_experts, hidden_size, config.intermediate_size)
        self.shared = self.shared_gate = None
        if config.shared_intermediate_size:
            self.shared = MLP(hidden_size, config.shared_intermediate_size, act)
            if config.shared_gate:
                self.shared_gate = Linear(hidden_size, 1, bias=False)

    def prepare(self, device: torch.device) -> None:
        """After loading, for serving: the weights' layout on a CPU, the fused kernels on a GPU that has them."""
        if device.type == "cpu":
            self.experts.lay_out_for_cpu()
        elif ops.gpu.AVAILABLE and device.type == "cuda" and self.act is F.silu:
            self.path = "fused"

    def forward(self, x_TD: Tensor, sink: RouteSink | None = None, num_valid: Tensor | None = None) -> Tensor:
        """x [T, D] -> [T, D]. num_valid (int32 [1], path "fused" only): tokens from there on visit no expert."""
        if self.path == "fused":
            return self._fused(x_TD, sink, num_valid)
        logits_TE, ids_TK, weights_TK = self.router(x_TD)
        if sink is not None:
            sink.route(self.layer, logits_TE, ids_TK, weights_TK)
        gate_up, down = self.experts.gate_up, self.experts.down
        if self.path == "adaptive" and x_TD.shape[0] == 1:
            y_TD = paths.lone(x_TD, ids_TK, weights_TK, gate_up, down, self.act)
        elif self.path == "adaptive" and 0 < ids_TK.numel() < paths.FEW and not torch.is_grad_enabled():
            y_TD = paths.few(x_TD, ids_TK, weights_TK, gate_up, down, self.act)
        else:
            sent = self.dispatcher.dispatch(x_TD, ids_TK)
            y_PD = paths.run(self.path, sent.rows_PD, sent.counts_E, gate_up, down, self.act)
            y_TD = self.dispatcher.combine(y_PD, sent, weights_TK)
        shared_TD = self._shared(x_TD)
        return y_TD if shared_TD is None else y_TD + shared_TD

    def _shared(self, x_TD: Tensor) -> Tensor | None:
        if self.shared is None:
            return None
        shared_TD = self.shared(x_TD)
        return shared_TD if self.shared_gate is None else shared_TD * self.shared_gate(x_TD).sigmoid()

    def _fused(self, x_TD: Tensor, sink: RouteSink | None, num_valid: Tensor | None) -> Tensor:
        """Routing, experts, combine and the shared expert's addition by one operation."""
        logits_TE = self.router.logits(x_TD)
        out_TD, ids_TK, weights_TK = ops.fused_moe(
            x_TD,
            logits_TE,
            self.experts.gate_up,
            self.experts.down,
            self.config.top_k,
            shared_TH=self._shared(x_TD),
            num_valid=num_valid,
            invariant=self.invariant,
            **self.router.options(),
        )
        if sink is not None:
            sink.route(self.layer, logits_TE, ids_TK, weights_TK)
        return out_TD
