"""What a decoder is made of: the one description that every Hugging Face family is translated into.

Legend of shape suffixes, used in the whole package: T tokens, D model width, F expert (or MLP) width,
E experts, K experts chosen per token, N query heads, G key/value heads, H head width, B pages (blocks),
V vocabulary, L layers, S sequences.
"""

import math
from dataclasses import dataclass
from typing import Literal


class ConfigError(ValueError):
    """An option is unknown, missing, or contradicts another; the message says what to change."""


def require(ok: bool, message: str) -> None:
    """Raise ConfigError(message) unless `ok`."""
    if not ok:
        raise ConfigError(message)


def brief(value: object, limit: int = 80) -> str:
    """repr(value) for a message: a long one is cut, and its length told."""
    try:
        text = repr(value)
    except Exception:  # whatever a stranger's __repr__ raises, and ints of more than 4300 digits
        return f"a {type(value).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its long-context variants.

    kind: "default", "linear" (position interpolation), "llama3" (Llama 3.1), "yarn" (Peng et al. 2023).
    rotary_fraction: share of the head width that is rotated (1.0 everywhere except GLM-like models).
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    rotary_fraction: float = 1.0

    def __post_init__(self):
        kinds = ("default", "linear", "llama3", "yarn")
        require(self.kind in kinds, f"rope kind must be one of {kinds}, got {self.kind!r}")
        require(self.theta > 0, f"rope theta must be positive, got {self.theta}")
        require(self.factor >= 1.0, f"rope factor must be at least 1, got {self.factor}")
        require(
            0 < self.rotary_fraction <= 1, f"rotary_fraction must be in (0, 1], got {self.rotary_fraction}"
        )
        if self.kind in ("llama3", "yarn"):
            require(
                self.original_max_position_embeddings is not None,
                f"rope kind {self.kind!r} needs original_max_position_embeddings",
            )


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """One Mixture-of-Experts block.

    scoring: "softmax" over all experts, or "sigmoid" per expert (DeepSeek-V3).
    norm_topk_prob: divide the K chosen weights by their sum.
    selection_bias: a bias per expert that takes part in *choosing* experts and never in weighting them.
    n_group, topk_group: experts are chosen only inside the best `topk_group` of `n_group` groups.
    shared_intermediate_size: width of the expert that every token visits (0: none).
    shared_gate: the shared expert's output is scaled by sigmoid(x · w) (Qwen2-MoE).
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool = True
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    selection_bias: bool = False
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    shared_intermediate_size: int = 0
    shared_gate: bool = False

    def __post_init__(self):
        require(self.num_experts >= 1, f"num_experts must be at least 1, got {self.num_experts}")
        require(
            1 <= self.top_k <= self.num_experts,
            f"top_k (num_experts_per_tok) must be in 1..{self.num_experts} (num_experts), got {self.top_k}",
        )
        require(
            self.scoring in ("softmax", "sigmoid"),
            f"scoring must be 'softmax' or 'sigmoid', got {self.scoring!r}",
        )
        require(
            self.intermediate_size >= 1, f"intermediate_size must be at least 1, got {self.intermediate_size}"
        )
        require(
            self.shared_intermediate_size >= 0,
            f"shared_intermediate_size must not be negative, got {self.shared_intermediate_size}",
        )
        require(
            self.shared_intermediate_size > 0 or not self.shared_gate,
            "shared_gate needs a shared expert: set shared_intermediate_size",
        )
        require(
            self.n_group >= 1 and self.num_experts % self.n_group == 0,
            f"n_group ({self.n_group}) must divide num_experts ({self.num_experts})",
        )
        require(
            1 <= self.topk_group <= self.n_group,
            f"topk_group must be in 1..{self.n_group} (n_group), got {self.topk_group}",
        )
        room = self.topk_group * (self.num_experts // self.n_group)
        require(self.top_k <= room, f"top_k ({self.top_k}) exceeds the {room} experts of topk_group groups")


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One decoder layer: a Mixture-of-Experts block if `moe` is set, else an MLP of `intermediate_size`."""

    intermediate_size: int = 0
    moe: MoEConfig | None = None
    sliding_window: int | None = None

    def __post_init__(self):
        require(
            self.moe is not None or self.intermediate_size > 0,
            "a dense layer needs intermediate_size > 0",
        )
        require(
            self.sliding_window is None or self.sliding_window > 0,
            f"sliding_window must be positive or None, got {self.sliding_window}",
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer, dense or Mixture-of-Experts layer by layer.

    qk_norm: None, "head" (RMSNorm over each head, Qwen3) or "full" (over all heads at once, OLMoE).
    clip_qkv: clamp q, k and v to ±clip_qkv (OLMoE), None for no clamp.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "full"] | None = None
    clip_qkv: float | None = None

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
            require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        require(
            self.max_position_embeddings > 0,
            f"max_position_embeddings must be positive, got {self.max_position_embeddings}",
        )
        require(
            self.qk_norm in (None, "head", "full"),
            f"qk_norm must be None, 'head' or 'full', got {self.qk_norm!r}",
        )
        require(len(self.layers) > 0, "num_hidden_layers must be positive, got 0")
        ok = 0 <= self.rms_norm_eps < math.inf
        require(ok, f"rms_norm_eps must be finite and not negative, got {self.rms_norm_eps}")
        ok = self.clip_qkv is None or 0 < self.clip_qkv < math.inf
        require(ok, f"clip_qkv must be None or a positive finite number, got {self.clip_qkv}")
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
            f"num_key_value_heads ({self.num_key_value_heads})",
        )
        require(self.head_dim % 2 == 0, f"head_dim must be even for rotary embedding, got {self.head_dim}")

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def is_moe(self) -> bool:
        return any(layer.moe is not None for layer in self.layers)

    @property
    def max_experts(self) -> int:
        """Largest number of experts in any layer, 0 for a dense model."""
        return max((layer.moe.num_experts for layer in self.layers if layer.moe), default=0)

    @property
    def max_top_k(self) -> int:
        """Largest number of experts a token visits in any layer, 0 for a dense model."""
        return max((layer.moe.top_k for layer in self.layers if layer.moe), default=0)

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers kept in the KV cache for one token, all layers together."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    def num_parameters(self, *, active: bool = False) -> int:
        """Parameters in all, or (active=True) those that one token's forward pass multiplies with.

        Active counts K of E experts and, for tied embeddings, the matrix once (as the output head).
        """
        d, n, g, h = self.hidden_size, self.num_attention_heads, self.num_key_value_heads, self.head_dim
        total = d + self.vocab_size * d * (1 if self.tie_word_embeddings or active else 2)
        for layer in self.layers:
            total += 2 * d + (n + 2 * g) * h * d + n * h * d
            total += (n + 2 * g) * h * self.qkv_bias + d * self.attention_output_bias
            total += {None: 0, "head": 2 * h, "full": (n + g) * h}[self.qk_norm]
            if layer.moe is None:
                total += 3 * d * layer.intermediate_size
                total += (2 * layer.intermediate_size + d) * self.mlp_bias
                continue
            moe = layer.moe
            total += moe.num_experts * d + moe.num_experts * moe.selection_bias
            total += 3 * d * moe.intermediate_size * (moe.top_k if active else moe.num_experts)
            total += 3 * d * moe.shared_intermediate_size + d * moe.shared_gate
        return total
