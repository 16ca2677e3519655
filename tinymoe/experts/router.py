"""The router: which experts a token visits, and with what weights."""

from typing import Any

import torch
from torch import Tensor, nn

from tinymoe import ops
from tinymoe.core.model_config import MoEConfig


class Router(nn.Module):
    """A linear map from the hidden state to one logit per expert, then top-k (Shazeer et al. 2017, arXiv 1701.06538).

    Logits are computed in float32 whatever the model's dtype: the choice of experts is discrete, and a rounding error
    that is harmless elsewhere would send a token to another expert.
    """

    invariant = False  # see model.decoder.Decoder

    def __init__(self, config: MoEConfig, hidden_size: int):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.register_parameter("selection_bias", None)
        if config.selection_bias:
            self.selection_bias = nn.Parameter(torch.zeros(config.num_experts), requires_grad=False)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, D] -> logits [T, E] float32, expert ids [T, K] int64 (best first), weights [T, K] float32."""
        logits_TE = self.logits(x_TD)
        ids_TK, weights_TK = ops.topk_softmax(logits_TE, self.config.top_k, **self.options())
        return logits_TE, ids_TK, weights_TK

    def logits(self, x_TD: Tensor) -> Tensor:
        """x [T, D] -> [T, E] float32."""
        return ops.linear_float32(x_TD, self.weight, self.invariant)

    def options(self) -> dict[str, Any]:
        """How to choose, for ops.topk_softmax and ops.fused_moe."""
        c = self.config
        return {
            "scoring": c.scoring,
            "selection_bias_E": self.selection_bias,
            "n_group": c.n_group,
            "topk_group": c.topk_group,
            "renormalize": c.norm_topk_prob,
            "scale": c.routed_scaling_factor,
        }
