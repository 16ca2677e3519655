"""What each Hugging Face `model_type` means, as a ModelConfig; absent options are filled as transformers fills them.

An option that would change results and is not implemented is refused by name, never ignored.
Source of every default and rule: transformers 5.17, models/<model_type>/configuration_*.py and modeling_*.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from tinymoe.core.model_config import ConfigError, LayerConfig, ModelConfig, MoEConfig, brief, require
from tinymoe.model.hf_config import Options, refuse_unsupported, rope_from_hf
from tinymoe.model.layers import activation


def _dense(o: Options, index: int, window: int | None) -> LayerConfig:
    return LayerConfig(intermediate_size=o.int("intermediate_size"), sliding_window=window)


def _moe(o: Options, width: int, **more: Any) -> MoEConfig:
    return MoEConfig(
        num_experts=o.int("num_experts"),
        top_k=o.int("num_experts_per_tok"),
        intermediate_size=width,
        norm_topk_prob=o.bool("norm_topk_prob"),
        **more,
    )


def _every_layer(o: Options, index: int, window: int | None) -> LayerConfig:
    """Mixtral and OLMoE: `intermediate_size` is the width of an expert."""
    return LayerConfig(moe=_moe(o, o.int("intermediate_size")), sliding_window=window)


def _qwen_sparse(o: Options, index: int, window: int | None) -> LayerConfig:
    """Every decoder_sparse_step-th layer is MoE, unless it is listed in mlp_only_layers."""
    step, mlp_only = o.int("decoder_sparse_step"), o.get("mlp_only_layers")
    mlp_only = [] if mlp_only is None else mlp_only
    layers = o.int("num_hidden_layers")
    ok = isinstance(mlp_only, list | tuple) and all(type(n) is int and 0 <= n < layers for n in mlp_only)
    require(ok, f"mlp_only_layers must be a list of layers in 0..{layers - 1}, got {brief(mlp_only)}")
    require(step >= 1, f"decoder_sparse_step must be at least 1, got {step}")
    if index in mlp_only or o.int("num_experts") == 0 or (index + 1) % step != 0:
        return _dense(o, index, window)
    shared = o.int("shared_expert_intermediate_size")
    moe = _moe(o, o.int("moe_intermediate_size"), shared_intermediate_size=shared, shared_gate=shared > 0)
    return LayerConfig(moe=moe, sliding_window=window)


def _deepseek(o: Options, index: int, window: int | None) -> LayerConfig:
    """DeepSeek-V3's routing (arXiv 2412.19437): sigmoid scores, a bias for the choice only, groups of experts."""
    if index < o.int("first_k_dense_replace"):
        return _dense(o, index, window)
    experts, groups, shared = o.int("num_experts"), o.int("n_group"), o.int("n_shared_experts")
    # A group is ranked by the sum of its two best experts, so it must have two.
    require(
        1 <= groups <= experts // 2,
        f"n_group ({groups}) must leave at least two of the {experts} experts (n_routed_experts) in a group",
    )
    require(shared >= 1, f"n_shared_experts must be at least 1, got {shared}")
    moe = _moe(
        o,
        o.int("moe_intermediate_size"),
        scoring="sigmoid",
        selection_bias=True,
        n_group=groups,
        topk_group=o.int("topk_group"),
        routed_scaling_factor=o.float("routed_scaling_factor"),
        shared_intermediate_size=shared * o.int("moe_intermediate_size"),
    )
    return LayerConfig(moe=moe, sliding_window=window)


def _above(o: Options, index: int) -> bool:
    return index >= o.int("max_window_layers")


def _even_below(o: Options, index: int) -> bool:
    return index % 2 == 0 and index < o.int("max_window_layers")


def _all(o: Options, index: int) -> bool:
    return True


_PLAIN = MappingProxyType({"mlp_bias": False, "clip_qkv": None})


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model_type. See hf_config.Options for defaults, aliases and fixed.

    layer: builds one layer. slides: whether a layer has the sliding window, where there is one (None: never).
    reads_layer_types: an explicit `layer_types` overrules `slides`.
    bias: whether q, k and v have biases, or the option that says so ("attention_bias": for the output as well).
    """

    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=lambda: _PLAIN)
    aliases: Mapping[str, str] = field(default_factory=dict)
    layer: Callable[[Options, int, int | None], LayerConfig] = _dense
    slides: Callable[[Options, int], bool] | None = None
    reads_layer_types: bool = False
    bias: bool | Literal["qkv_bias", "attention_bias"] = False
    qk_norm: Literal["head", "full"] | None = None
    rope_theta: float = 10_000.0


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SIZES += ("num_key_value_heads", "max_position_embeddings")
_COMMON = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False}


def _defaults(*sizes: int | None, **more: Any) -> dict[str, Any]:
    return {**dict(zip(_SIZES, sizes)), **_COMMON, **more}


_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_SPARSE = {"decoder_sparse_step": 1, "norm_topk_prob": False}
_LOCAL = {"num_local_experts": "num_experts"}

_QWEN_DENSE = _defaults(151936, 4096, 22016, 32, 32, 32, 32768, **_WINDOW)
_MIXTRAL = {"num_experts": 8, "num_experts_per_tok": 2}
_QWEN2_MOE = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
_QWEN3_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_OLMOE = {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "clip_qkv": None}
_DOTS1 = {
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 0,
    "sliding_window": 4096,
    "max_window_layers": 62,
}
_GROUPS = {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            defaults=_defaults(32000, 4096, 11008, 32, 32, None, 2048, mlp_bias=False),
            fixed={"clip_qkv": None},
            bias="attention_bias",
        ),
        "mistral": Family(
            defaults=_defaults(32000, 4096, 14336, 32, 32, 8, 131072, sliding_window=4096),
            slides=_all,
        ),
        "qwen2": Family(defaults=_QWEN_DENSE, slides=_above, reads_layer_types=True, bias=True),
        "qwen3": Family(
            defaults={**_QWEN_DENSE, "head_dim": 128},
            slides=_above,
            reads_layer_types=True,
            qk_norm="head",
            bias="attention_bias",
        ),
        "mixtral": Family(
            defaults=_defaults(32000, 4096, 14336, 32, 32, 8, 131072, **_MIXTRAL) | {"rms_norm_eps": 1e-5},
            fixed={**_PLAIN, "norm_topk_prob": True},
            aliases=_LOCAL,
            layer=_every_layer,
            slides=_all,
            rope_theta=1_000_000.0,
        ),
        "qwen2_moe": Family(
            defaults=_defaults(151936, 2048, 5632, 24, 16, 16, 32768, **_QWEN2_MOE, **_SPARSE, **_WINDOW)
            | {"shared_expert_intermediate_size": 5632, "qkv_bias": True},
            layer=_qwen_sparse,
            slides=_even_below,
            reads_layer_types=True,
            bias="qkv_bias",
        ),
        "qwen3_moe": Family(
            defaults=_defaults(151936, 2048, 6144, 24, 32, 4, 32768, **_QWEN3_MOE, **_SPARSE, **_WINDOW),
            fixed={**_PLAIN, "shared_expert_intermediate_size": 0},
            aliases=_LOCAL,
            layer=_qwen_sparse,
            slides=_all,
            qk_norm="head",
            bias="attention_bias",
        ),
        "olmoe": Family(
            defaults=_defaults(50304, 2048, 2048, 16, 16, None, 4096, **_OLMOE) | {"rms_norm_eps": 1e-5},
            fixed={"mlp_bias": False},
            aliases=_LOCAL,
            layer=_every_layer,
            qk_norm="full",
            bias="attention_bias",
        ),
        "dots1": Family(
            defaults=_defaults(152064, 4608, 10944, 62, 32, 32, 2048, **_DOTS1, **_GROUPS),
            aliases={"n_routed_experts": "num_experts", **_LOCAL},
            layer=_deepseek,
            slides=_above,
            reads_layer_types=True,
            qk_norm="head",
            bias="attention_bias",
        ),
    }
)


def _windows(o: Options, family: Family, layers: int) -> list[int | None]:
    """The sliding window of each layer, None for full attention."""
    size, switch = o.get("sliding_window"), o.get("use_sliding_window")
    slides = family.slides
    require(slides is not None or not size, f"sliding_window={size!r} is not supported for this model_type")
    require(
        "use_sliding_window" in family.defaults or switch is not False or size is None,
        f"use_sliding_window=False has no meaning for this model_type: set sliding_window ({size!r}) to null",
    )
    on = slides is not None and size is not None and switch is not False
    chosen = [slides is not None and on and slides(o, i) for i in range(layers)]
    types = o.get("layer_types")
    if types is not None:
        names = {"full_attention": False, "sliding_attention": True}
        require(
            len(types) == layers and set(types) <= set(names),
            f"layer_types must name {layers} layers, each one of {sorted(names)}, got {types}",
        )
        told = [names[name] for name in types]
        require(
            family.reads_layer_types or told == chosen,
            f"layer_types {types} contradicts sliding_window={size!r}, which this model_type gives to every layer or none",
        )
        require(
            on or not any(told),
            "layer_types has sliding_attention, but use_sliding_window or sliding_window is off",
        )
        chosen = told
    return [o.int("sliding_window") if slides_here else None for slides_here in chosen]


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Translate the content of a config.json.

    Raises ConfigError (a ValueError) for an unknown model_type, a quantised checkpoint, an option of the wrong type,
    and every option that changes results and is not implemented.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(f"model_type {model_type!r} is not known; known: {', '.join(sorted(FAMILIES))}")
    refuse_unsupported(config)
    family = FAMILIES[model_type]
    o = Options(config, family.defaults, family.aliases, family.fixed)

    width, heads, layers = o.int("hidden_size"), o.int("num_attention_heads"), o.int("num_hidden_layers")
    require(layers >= 1, f"num_hidden_layers must be positive, got {layers}")
    head_dim = o.get("head_dim")
    require(
        head_dim is not None or (heads > 0 and width % heads == 0),
        f"hidden_size ({width}) must be a multiple of num_attention_heads ({heads}), or head_dim must be given",
    )
    head_dim = width // heads if head_dim is None else o.int("head_dim")
    require(
        family.qk_norm != "full" or heads * head_dim == width,
        f"{model_type} normalises hidden_size numbers per query: head_dim ({head_dim}) must be hidden_size / heads",
    )
    activation(o.get("hidden_act"))
    positions = o.int("max_position_embeddings")
    windows = _windows(o, family, layers)
    return ModelConfig(
        model_type=model_type,
        vocab_size=o.int("vocab_size"),
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=heads if o.get("num_key_value_heads") is None else o.int("num_key_value_heads"),
        head_dim=head_dim,
        layers=tuple(family.layer(o, i, windows[i]) for i in range(layers)),
        max_position_embeddings=positions,
        rms_norm_eps=o.float("rms_norm_eps"),
        rope=rope_from_hf(config, family.rope_theta, positions),
        hidden_act=o.get("hidden_act"),
        tie_word_embeddings=o.bool("tie_word_embeddings"),
        qkv_bias=family.bias is True or (family.bias is not False and o.bool(family.bias)),
        attention_output_bias=family.bias == "attention_bias" and o.bool("attention_bias"),
        mlp_bias=o.bool("mlp_bias"),
        qk_norm=family.qk_norm,
        clip_qkv=None if o.get("clip_qkv") is None else o.float("clip_qkv"),
    )
