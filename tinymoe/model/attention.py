"""Attention: projections, norms and rotation here; where keys and values are kept is the caller's `attend`."""

from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinymoe import ops
from tinymoe.core.model_config import ModelConfig
from tinymoe.model.layers import Linear, RMSNorm


class Attend(Protocol):
    """Where keys and values are kept, and the attention over them."""

    def __call__(self, layer: int, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor) -> Tensor:
        """Keep this step's keys and values of `layer` and attend: q [T, N, H], k and v [T, G, H] -> [T, N, H]."""
        ...


@runtime_checkable
class PagedStore(Protocol):
    """An Attend that can take keys and values straight from the rotation's kernel."""

    def pages(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """k_cache and v_cache [num_blocks, block_size, G, H] and slots [T]."""
        ...

    def stored(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Attend when this step's keys and values are there already."""
        ...


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads and rotary positions."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        N, G, H = self.heads
        self.qkv = Linear(config.hidden_size, (N + 2 * G) * H, bias=config.qkv_bias)
        self.out = Linear(N * H, config.hidden_size, bias=config.attention_output_bias)
        self.qk_norm, self.eps = config.qk_norm, config.rms_norm_eps
        self.clip_qkv = config.clip_qkv
        if config.qk_norm is not None:
            widths = (H, H) if config.qk_norm == "head" else (N * H, G * H)
            self.q_norm, self.k_norm = (RMSNorm(width, config.rms_norm_eps) for width in widths)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """x [T, D] -> [T, D]. cos, sin: of model.layers.Rotary."""
        N, G, H = self.heads
        T = x_TD.shape[0]
        qkv = self.qkv(x_TD)
        if ops.gpu.serves(qkv) and isinstance(attend, PagedStore):
            weights = (None, None) if self.qk_norm is None else (self.q_norm.weight, self.k_norm.weight)
            clip, pages = self.clip_qkv, attend.pages(self.layer)
            q_TNH, _ = ops.rotate(qkv, cos, sin, self.heads, *weights, eps=self.eps, clip=clip, cache=pages)
            return self.out(attend.stored(self.layer, q_TNH).view(T, N * H))
        if self.qk_norm == "full":
            q, k, v = qkv.split((N * H, G * H, G * H), dim=-1)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1)
        if self.clip_qkv is not None:
            qkv = qkv.clamp(-self.clip_qkv, self.clip_qkv)
        per_head = (self.q_norm.weight, self.k_norm.weight) if self.qk_norm == "head" else (None, None)
        q_TNH, k_TGH = ops.rotate(qkv, cos, sin, self.heads, *per_head, eps=self.eps)
        v_TGH = qkv.view(T, N + 2 * G, H).narrow(1, N + G, G)
        o_TNH = attend(self.layer, q_TNH, k_TGH, v_TGH)
        return self.out(o_TNH.reshape(T, N * H))


class CausalAttend:
    """Attention without a cache over `batch` sequences of `length` tokens, flattened: for training and for judging.

    Differentiable. Pass `config` if the model has sliding windows.
    """

    def __init__(self, batch: int, length: int, config: ModelConfig | None = None):
        self.batch, self.length = batch, length
        self.windows = None if config is None else [layer.sliding_window for layer in config.layers]

    def __call__(self, layer: int, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor) -> Tensor:
        window = self.windows[layer] if self.windows else None
        mask = None
        if window is not None and window < self.length:
            mask = ops.causal_mask(self.length, self.length, window, q_TNH.device)
        q, k, v = (
            t.view(self.batch, self.length, *t.shape[1:]).transpose(1, 2) for t in (q_TNH, k_TGH, v_TGH)
        )
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).reshape(self.batch * self.length, *q_TNH.shape[1:])
