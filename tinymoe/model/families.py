"""What each Hugging Face `model_type` means: its config.json, absent keys filled as transformers does, as a ModelConfig.

An option that would change results and is not implemented is refused by name, never ignored.
Source of every default and rule: transformers 5.17, models/<model_type>/configuration_*.py and modeling_*.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from tinymoe.core.model_config import ConfigError, LayerConfig, ModelConfig, MoEConfig, RopeConfig, require
from tinymoe.model.layers import ACTIVATIONS


class Options:
    """A config.json with the family's defaults behind it; each getter checks the type of what it returns."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]):
        self.config, self.defaults = config, defaults

    def get(self, name: str) -> Any:
        return self.config[name] if name in self.config else self.defaults.get(name)

    def int(self, name: str) -> int:
        value = self.get(name)
        require(
            isinstance(value, int) and not isinstance(value, bool), f"{name} must be an integer, got {value!r}"
        )
        return value

    def float(self, name: str) -> float:
        value = self.get(name)
        ok = isinstance(value, (int, float)) and not isinstance(value, bool)
        require(ok, f"{name} must be a number, got {value!r}")
        return float(value)

    def bool(self, name: str) -> bool:
        value = self.get(name)
        require(isinstance(value, bool), f"{name} must be true or false, got {value!r}")
        return value


LayerRule = Callable[[Options, int, int | None], LayerConfig]
Windows = Literal["none", "all", "switch", "upper", "upper_switch", "alternating"]


def _dense(o: Options, index: int, window: int | None) -> LayerConfig:
    return LayerConfig(intermediate_size=o.int("intermediate_size"), sliding_window=window)


def _every_layer(o: Options, index: int, window: int | None) -> LayerConfig:
    """Mixtral and OLMoE: `intermediate_size` is the width of an expert."""
    moe = MoEConfig(
        num_experts=o.int("num_experts"),
        top_k=o.int("num_experts_per_tok"),
        intermediate_size=o.int("intermediate_size"),
        norm_topk_prob=o.bool("norm_topk_prob"),
    )
    return LayerConfig(moe=moe, sliding_window=window)


def _qwen_sparse(o: Options, index: int, window: int | None) -> LayerConfig:
    """Every decoder_sparse_step-th layer is MoE, unless listed in mlp_only_layers."""
    step, dense_only = o.int("decoder_sparse_step"), o.get("mlp_only_layers") or []
    require(step >= 1, f"decoder_sparse_step must be at least 1, got {step}")
    if index in dense_only or o.int("num_experts") == 0 or (index + 1) % step != 0:
        return _dense(o, index, window)
    shared = o.int("shared_expert_intermediate_size")
    moe = MoEConfig(
        num_experts=o.int("num_experts"),
        top_k=o.int("num_experts_per_tok"),
        intermediate_size=o.int("moe_intermediate_size"),
        norm_topk_prob=o.bool("norm_topk_prob"),
        shared_intermediate_size=shared,
        shared_gate=shared > 0,
    )
    return LayerConfig(moe=moe, sliding_window=window)


def _deepseek(o: Options, index: int, window: int | None) -> LayerConfig:
    """DeepSeek-V3's routing: sigmoid scores, a bias for the choice only, groups, scaling, shared experts."""
    if index < o.int("first_k_dense_replace"):
        return _dense(o, index, window)
    experts, groups, width = o.int("n_routed_experts"), o.int("n_group"), o.int("moe_intermediate_size")
    # A group is ranked by the sum of its two best scores, so it must have two.
    require(
        1 <= groups <= experts // 2,
        f"n_group ({groups}) must leave at least two of n_routed_experts ({experts}) in a group",
    )
    require(o.int("n_shared_experts") >= 1, f"n_shared_experts must be at least 1, got {o.int('n_shared_experts')}")
    moe = MoEConfig(
        num_experts=experts,
        top_k=o.int("num_experts_per_tok"),
        intermediate_size=width,
        norm_topk_prob=o.bool("norm_topk_prob"),
        scoring="sigmoid",
        selection_bias=True,
        n_group=groups,
        topk_group=o.int("topk_group"),
        routed_scaling_factor=o.float("routed_scaling_factor"),
        shared_intermediate_size=o.int("n_shared_experts") * width,
    )
    return LayerConfig(moe=moe, sliding_window=window)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model_type. qkv_bias and output_bias: fixed, or the name of the option that says so.

    windows: which layers slide: none; all, if sliding_window is set; all, if use_sliding_window says so ("switch");
    those from max_window_layers on ("upper", with a switch or without); even ones below max_window_layers.
    """

    defaults: dict[str, Any]
    layer: LayerRule = _dense
    windows: Windows = "none"
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    qk_norm: Literal["head", "full"] | None = None
    rope_theta: float = 10_000.0
    aliases: dict[str, str] = field(default_factory=dict)


def _sizes(vocab: int, width: int, mlp: int, layers: int, heads: int, kv: int | None, positions: int) -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {
        **dict(zip(names, (vocab, width, mlp, layers, heads))),
        "num_key_value_heads": kv,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
    }


_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_QWEN_SPARSE = {"decoder_sparse_step": 1, "norm_topk_prob": False}
_BIAS = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(defaults={**_sizes(32000, 4096, 11008, 32, 32, None, 2048), "mlp_bias": False}, **_BIAS),
        "mistral": Family(
            defaults={**_sizes(32000, 4096, 14336, 32, 32, 8, 131072), "sliding_window": 4096}, windows="all"
        ),
        "qwen2": Family(
            defaults={**_sizes(151936, 4096, 22016, 32, 32, 32, 32768), **_QWEN_WINDOW},
            windows="upper_switch",
            qkv_bias=True,
        ),
        "qwen3": Family(
            defaults={**_sizes(151936, 4096, 22016, 32, 32, 32, 32768), **_QWEN_WINDOW, "head_dim": 128},
            windows="upper_switch",
            qk_norm="head",
            **_BIAS,
        ),
        "mixtral": Family(
            defaults={
                **_sizes(32000, 4096, 14336, 32, 32, 8, 131072),
                **{"rms_norm_eps": 1e-5, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
            },
            layer=_every_layer,
            windows="all",
            rope_theta=1_000_000.0,
            aliases={"num_local_experts": "num_experts"},
        ),
        "qwen2_moe": Family(
            defaults={
                **_sizes(151936, 2048, 5632, 24, 16, 16, 32768) | _QWEN_WINDOW | _QWEN_SPARSE,
                **{"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
                **{"shared_expert_intermediate_size": 5632, "qkv_bias": True},
            },
            layer=_qwen_sparse,
            windows="alternating",
            qkv_bias="qkv_bias",
        ),
        "qwen3_moe": Family(
            defaults={
                **_sizes(151936, 2048, 6144, 24, 32, 4, 32768) | _QWEN_WINDOW | _QWEN_SPARSE,
                **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
                "shared_expert_intermediate_size": 0,
            },
            layer=_qwen_sparse,
            windows="switch",
            qk_norm="head",
            aliases={"num_local_experts": "num_experts"},
            **_BIAS,
        ),
        "olmoe": Family(
            defaults={
                **_sizes(50304, 2048, 2048, 16, 16, None, 4096),
                **{"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
            },
            layer=_every_layer,
            qk_norm="full",
            aliases={"num_local_experts": "num_experts"},
            **_BIAS,
        ),
        "dots1": Family(
            defaults={
                **_sizes(152064, 4608, 10944, 62, 32, 32, 2048),
                **{"moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
                **{"norm_topk_prob": False, "routed_scaling_factor": 1.0},
                **{"sliding_window": 4096, "max_window_layers": 62},
            },
            layer=_deepseek,
            windows="upper",
            qk_norm="head",
            aliases={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
            **_BIAS,
        ),
    }
)
