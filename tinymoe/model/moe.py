"""The Mixture-of-Experts block: route, dispatch, run the experts, combine, add the shared expert."""

from typing import Protocol

import torch
from torch import Tensor, nn

from tinymoe.core.model_config import MoEConfig
from tinymoe.experts import paths
from tinymoe.experts.dispatch import LocalDispatch
from tinymoe.experts.router import Router
from tinymoe.model.layers import MLP, Activation


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
    """One Mixture-of-Experts block (dropless: every chosen expert runs)."""

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
                self.shared_gate = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, x_TD: Tensor, sink: RouteSink | None = None) -> Tensor:
        """x [T, D] -> [T, D]."""
        logits_TE, ids_TK, weights_TK = self.router(x_TD)
        if sink is not None:
            sink.route(self.layer, logits_TE, ids_TK, weights_TK)
        gate_up, down = self.experts.gate_up, self.experts.down
        if self.path == "adaptive" and x_TD.shape[0] == 1:
            y_TD = paths.lone(x_TD, ids_TK, weights_TK, gate_up, down, self.act)
        else:
            sent = self.dispatcher.dispatch(x_TD, ids_TK)
            y_PD = paths.run(self.path, sent.rows_PD, sent.counts_E, gate_up, down, self.act)
            y_TD = self.dispatcher.combine(y_PD, sent, weights_TK)
        if self.shared is None:
            return y_TD
        shared_TD = self.shared(x_TD)
        if self.shared_gate is not None:
            shared_TD = shared_TD * self.shared_gate(x_TD).sigmoid()
        return y_TD + shared_TD
