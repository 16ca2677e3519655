"""The decoder: embeddings, layers (each dense or Mixture-of-Experts, as the config says), norm, output head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinymoe.core.model_config import ModelConfig
from tinymoe.model.attention import Attend, Attention
from tinymoe.model.layers import MLP, RMSNorm, Rotary, activation
from tinymoe.model.moe import MoE, RouteSink


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        layer = config.layers[index]
        act = activation(config.hidden_act)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, index)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if layer.moe is not None:
            self.mlp = MoE(layer.moe, config.hidden_size, index, act)
        else:
            self.mlp = MLP(config.hidden_size, layer.intermediate_size, act, config.mlp_bias)

    def forward(
        self, x_TD: Tensor, cos_TR: Tensor, sin_TR: Tensor, attend: Attend, sink: RouteSink | None
    ) -> Tensor:
        x_TD = x_TD + self.attention(self.attn_norm(x_TD), cos_TR, sin_TR, attend)
        h_TD = self.mlp_norm(x_TD)
        return x_TD + (self.mlp(h_TD, sink) if isinstance(self.mlp, MoE) else self.mlp(h_TD))


class Decoder(nn.Module):
    """A decoder-only transformer over flat tokens: no batch axis, sequences are told apart by `attend`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.rope, config.head_dim)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        sink: RouteSink | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """token ids [T] int64, positions [T] int64 -> logits [T, V] float32, or only those of `rows` [R] int64."""
        x_TD = self.embed(token_ids_T)
        cos_TR, sin_TR = self.rotary(positions_T)
        for layer in self.layers:
            x_TD = layer(x_TD, cos_TR, sin_TR, attend, sink)
        if rows is not None:
            x_TD = x_TD.index_select(0, rows)
        head = self.embed if self.lm_head is None else self.lm_head
        return F.linear(self.norm(x_TD), head.weight).float()

    @torch.no_grad()
    def init_weights(self, std: float = 0.02, seed: int = 0) -> "Decoder":
        """Fill every matrix with N(0, std²) noise of this seed; norms with 1, biases with 0. Returns self."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                noise = torch.randn(parameter.shape, generator=generator) * std
                parameter.copy_(noise)
        return self
