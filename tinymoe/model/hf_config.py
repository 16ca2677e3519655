"""A Hugging Face config.json, option by option: read with checked types, written back for the models we train.

Both spellings of rotary options are read: `rope_theta` with `rope_scaling`, and transformers 5's `rope_parameters`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tinymoe.core.model_config import ConfigError, ModelConfig, MoEConfig, RopeConfig, brief, require

# Options of other architectures and the values that leave results alone; any other value changes them.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_sinks": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None, []),
    "partial_rotary_factor": (None, 1.0),
    "num_kv_shared_layers": (None, 0),
    "per_layer_config": (None,),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "use_mrope": (None, False),
}
# Options that a kind of rotary embedding needs, those it may have, and those that other kinds leave lying about.
_ROPE_NEEDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_ROPE_MAY: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": (),
    "llama3": (),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
_ROPE_KNOWN = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
_ROPE_KNOWN |= {name for names in (*_ROPE_NEEDS.values(), *_ROPE_MAY.values()) for name in names}


class Options:
    """A config.json with a family's defaults behind it; each getter checks the type of what it returns.

    aliases: other spelling -> the name used here. fixed: what the family does whatever config.json says.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        defaults: Mapping[str, Any] = MappingProxyType({}),
        aliases: Mapping[str, str] = MappingProxyType({}),
        fixed: Mapping[str, Any] = MappingProxyType({}),
    ):
        given = dict(config)
        for other, name in aliases.items():
            value = given.pop(other, None)
            if value is not None:
                require(
                    given.get(name) in (None, value),
                    f"{other} ({value}) contradicts {name} ({given.get(name)}): keep one of them",
                )
                given[name] = value
        for name, value in fixed.items():
            require(
                given.get(name) in (None, value),
                f"{name}={given.get(name)!r} has no meaning in model_type {config.get('model_type')!r}, "
                f"which always takes {value!r}: remove the option",
            )
        self._values = {**defaults, **given, **fixed}

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def int(self, name: str) -> int:
        value = self.get(name)
        ok = isinstance(value, int) and not isinstance(value, bool)
        require(ok, f"{name} must be an integer, got {value!r}")
        return value

    def float(self, name: str) -> float:
        value = self.get(name)
        ok = isinstance(value, int | float) and not isinstance(value, bool)
        require(ok, f"{name} must be a number, got {value!r}")
        try:
            return float(value)
        except OverflowError as error:
            raise ConfigError(f"{name} must be a number that fits in 64 bits, got {brief(value)}") from error

    def bool(self, name: str) -> bool:
        value = self.get(name)
        require(isinstance(value, bool), f"{name} must be true or false, got {value!r}")
        return value


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a quantised checkpoint, for another head than a language model's, and for any option
    of _NEUTRAL that would change results."""
    if config.get("quantization_config") or config.get("compression_config"):
        quantization = config.get("quantization_config") or config.get("compression_config")
        method = (
            quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        )
        raise ConfigError(
            f"quantised checkpoint not supported (quantization_config, method {method!r}): "
            "use the checkpoint in bfloat16, float16 or float32"
        )
    heads = config.get("architectures") or []
    require(
        not heads or any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in heads),
        f"architectures is {list(heads)}: only language models (…ForCausalLM) can be loaded",
    )
    for name, neutral in _NEUTRAL.items():
        value = config.get(name)
        require(
            any(value is n or value == n for n in neutral),
            f"option {name}={value!r} changes results and is not supported; supported: {name} absent"
            + "".join(f" or {n!r}" for n in neutral if n is not None),
        )


def rope_from_hf(config: Mapping[str, Any], default_theta: float, max_position_embeddings: int) -> RopeConfig:
    """The rotary options of a config.json. Raises ConfigError for a kind or an option that is not implemented."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    require(isinstance(given, Mapping), f"rope_scaling must be an object, got {given!r}")
    nested = sorted(key for key, value in given.items() if isinstance(value, Mapping))
    require(
        not nested, f"rope_parameters per layer type ({nested}) are not supported: all layers must share one"
    )
    kind = given.get("rope_type", given.get("type", "default"))
    require(kind in _ROPE_NEEDS, f"rope_type {kind!r} is not supported; supported: {', '.join(_ROPE_NEEDS)}")
    unknown = sorted(set(given) - _ROPE_KNOWN)
    require(not unknown, f"rope options {unknown} of rope_type {kind!r} are not supported")
    fraction = given.get("partial_rotary_factor")
    require(fraction in (None, 1.0), f"partial_rotary_factor={fraction!r} is not supported; supported: 1.0")

    o = Options({"rope_theta": config.get("rope_theta", default_theta), **given})
    values: dict[str, Any] = {}
    if kind in ("llama3", "yarn"):
        # The top-level spelling wins, as in transformers.
        trained = config.get("original_max_position_embeddings") or given.get(
            "original_max_position_embeddings"
        )
        values["original_max_position_embeddings"] = trained or max_position_embeddings
    for name in _ROPE_NEEDS[kind]:
        require(o.get(name) is not None, f"rope_type {kind!r} needs {name}, which is missing")
        values[name] = o.float(name)
    for name in _ROPE_MAY[kind]:
        default = (
            (None, 0) if name.startswith("beta") else (None,)
        )  # transformers takes a beta of 0 for absent
        if o.get(name) not in default:
            values[name] = o.bool(name) if name == "truncate" else o.float(name)
    return RopeConfig(theta=o.float("rope_theta"), kind=kind, **values)


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """The spelling that transformers 4 and 5 and vLLM all read: rope_theta and rope_scaling (None if default)."""
    if rope.kind == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    names = (*_ROPE_NEEDS[rope.kind], *_ROPE_MAY[rope.kind], "original_max_position_embeddings")
    scaling = {name: getattr(rope, name) for name in names}
    scaling = {name: value for name, value in scaling.items() if value is not None}
    return {"rope_theta": rope.theta, "rope_scaling": {"rope_type": rope.kind, **scaling}}


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json (a dict) of a qwen3 or qwen3_moe model, as transformers and vLLM load it.

    Raises ConfigError for another model_type, and for anything that those two cannot express: a selection bias,
    shared experts, sigmoid scores, layers whose experts differ.
    """
    kind = config.model_type
    require(kind in ("qwen3", "qwen3_moe"), f"only qwen3 and qwen3_moe models can be saved, got {kind!r}")
    for name, wanted in (("qk_norm", "head"), ("mlp_bias", False), ("clip_qkv", None)):
        value = getattr(config, name)
        require(value == wanted, f"{kind} has {name}={wanted!r}, got {value!r}")
    require(
        config.qkv_bias == config.attention_output_bias,
        f"{kind} has one attention_bias, got qkv_bias={config.qkv_bias} "
        f"and attention_output_bias={config.attention_output_bias}",
    )
    require(
        config.rope.rotary_fraction == 1.0, f"{kind} rotates whole heads, got {config.rope.rotary_fraction}"
    )
    out = {
        "architectures": ["Qwen3ForCausalLM" if kind == "qwen3" else "Qwen3MoeForCausalLM"],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": config.hidden_act,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.qkv_bias,
        **rope_to_hf(config.rope),
    }
    dense = {layer.intermediate_size for layer in config.layers if layer.moe is None}
    require(len(dense) <= 1, f"{kind} has one intermediate_size for all dense layers, got {sorted(dense)}")
    windows = {layer.sliding_window for layer in config.layers}
    sizes = sorted(window for window in windows if window is not None)
    require(len(sizes) <= 1, f"{kind} has one sliding_window, got {sizes}")
    out |= {"use_sliding_window": bool(sizes), "sliding_window": sizes[0] if sizes else None}
    if kind == "qwen3":
        require(not config.is_moe, "qwen3 is dense: use model_type 'qwen3_moe' for layers with experts")
        names = ("full_attention", "sliding_attention")
        layer_types = [names[layer.sliding_window is not None] for layer in config.layers]
        return {**out, "intermediate_size": dense.pop(), "layer_types": layer_types}
    require(len(windows) == 1, "qwen3_moe has a sliding window in all layers or in none")
    experts = {layer.moe for layer in config.layers if layer.moe is not None}
    require(len(experts) == 1, f"qwen3_moe needs one MoEConfig for all its MoE layers, got {len(experts)}")
    moe = experts.pop()
    plain = MoEConfig(
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        intermediate_size=moe.intermediate_size,
        norm_topk_prob=moe.norm_topk_prob,
    )
    require(
        moe == plain,
        f"qwen3_moe has softmax scores and neither selection bias, groups, scaling nor shared experts, got {moe}",
    )
    return {
        **out,
        "intermediate_size": dense.pop() if dense else moe.intermediate_size,
        "moe_intermediate_size": moe.intermediate_size,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, layer in enumerate(config.layers) if layer.moe is None],
    }
