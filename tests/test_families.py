"""What a config.json means, judged by transformers: defaults, layer kinds, windows, rotary frequencies; refusals."""

from typing import Any

import pytest
import torch
import transformers
from checkpoints import E5, IDS, LLAMA3, SIZES, YARN
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tinymoe.core.model_config import ConfigError, LayerConfig, ModelConfig, MoEConfig, RopeConfig
from tinymoe.model.families import FAMILIES, model_config_from_hf
from tinymoe.model.hf_config import hf_config
from tinymoe.model.layers import ACTIVATIONS, activation, rope_frequencies

KNOWN = "dots1, llama, mistral, mixtral, olmoe, qwen2, qwen2_moe, qwen3, qwen3_moe"
NEEDED = {"dots1": {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2}}
SHARED = {**E5, "shared_expert_intermediate_size": 20}


def theirs(model_type: str, **options: Any) -> transformers.PreTrainedConfig:
    return transformers.CONFIG_MAPPING[model_type](**options)


def config(model_type: str, **options: Any) -> ModelConfig:
    return model_config_from_hf({"model_type": model_type, **SIZES, **NEEDED.get(model_type, {}), **options})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_absent_options_mean_what_transformers_takes(model_type):
    needed = NEEDED.get(model_type, {})
    judge = theirs(model_type, **needed)
    ours = model_config_from_hf({"model_type": model_type, **needed})
    assert ours == model_config_from_hf(judge.to_dict())
    for name in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"):
        assert getattr(ours, name) == getattr(judge, name), name
    for name in ("max_position_embeddings", "hidden_act", "tie_word_embeddings", "num_hidden_layers"):
        assert getattr(ours, name) == getattr(judge, name), name
    assert ours.rope.theta == judge.rope_parameters["rope_theta"]
    head_dim = getattr(judge, "head_dim", None) or judge.hidden_size // judge.num_attention_heads
    assert ours.head_dim == head_dim
    if moe := ours.layers[-1].moe:
        assert (
            moe.num_experts == getattr(judge, "num_experts", None)
            or moe.num_experts == judge.num_local_experts
        )
        assert moe.top_k == judge.num_experts_per_tok
        assert moe.norm_topk_prob == getattr(judge, "norm_topk_prob", True)
        assert moe.intermediate_size == getattr(judge, "moe_intermediate_size", judge.intermediate_size)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("qwen2_moe", {**SHARED, "decoder_sparse_step": 2}),
        ("qwen2_moe", {**SHARED, "mlp_only_layers": [1, 4]}),
        ("qwen3_moe", {**E5, "decoder_sparse_step": 3, "mlp_only_layers": [2]}),
        ("qwen3_moe", {**E5, "decoder_sparse_step": 2, "mlp_only_layers": [0]}),
        ("qwen3_moe", {**E5, "num_experts": 0}),
        ("dots1", {**NEEDED["dots1"], "moe_intermediate_size": 16, "first_k_dense_replace": 4}),
        ("mixtral", {}),
        ("olmoe", {}),
    ],
)
def test_dense_and_moe_layers_are_where_transformers_builds_them(model_type, options):
    options = {**SIZES, "num_hidden_layers": 6, **options}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs(model_type, **options))
    judge = [hasattr(layer.mlp, "experts") for layer in model.model.layers]
    assert [layer.moe is not None for layer in config(model_type, **options).layers] == judge


@settings(deadline=None, max_examples=60)
@given(
    model_type=st.sampled_from(["qwen2", "qwen3", "qwen2_moe", "dots1"]),
    layers=st.integers(1, 6),
    first=st.integers(0, 7),
    switch=st.booleans(),
    window=st.none() | st.integers(1, 9),
)
def test_windows_slide_in_the_layers_where_transformers_slides(model_type, layers, first, switch, window):
    options = {"num_hidden_layers": layers, "max_window_layers": first, "sliding_window": window}
    if model_type == "dots1":
        options |= NEEDED["dots1"]
    else:
        options["use_sliding_window"] = switch
    judge = theirs(model_type, **{**SIZES, **options})
    # transformers names sliding layers without a window here, and cannot run them.
    assume(model_type != "qwen2_moe" or window is not None)
    wanted = [judge.sliding_window if kind == "sliding_attention" else None for kind in judge.layer_types]
    assert [layer.sliding_window for layer in config(model_type, **options).layers] == wanted
    saved = model_config_from_hf(judge.to_dict())  # with an explicit layer_types
    assert [layer.sliding_window for layer in saved.layers] == wanted


@pytest.mark.parametrize("model_type", ["mistral", "mixtral"])
def test_sliding_window_of_all_layers(model_type):
    assert {layer.sliding_window for layer in config(model_type, sliding_window=7).layers} == {7}
    assert {layer.sliding_window for layer in config(model_type, sliding_window=None).layers} == {None}


def test_qwen3_moe_window_has_a_switch():
    on = config("qwen3_moe", sliding_window=7, use_sliding_window=True)
    assert {layer.sliding_window for layer in on.layers} == {7}
    assert {layer.sliding_window for layer in config("qwen3_moe", sliding_window=7).layers} == {None}


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 77_000.0},
    "linear": {"rope_type": "linear", "factor": 3, "rope_theta": 1000.0},
    "llama3": LLAMA3,
    "llama3-wide": {
        **LLAMA3,
        "low_freq_factor": 2.0,
        "high_freq_factor": 9.0,
        "original_max_position_embeddings": 90,
    },
    "yarn": YARN,
    "yarn-no-truncate": {**YARN, "truncate": False, "beta_fast": 20.0, "beta_slow": 0.5},
    "yarn-mscale": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.7},
    "yarn-mscale-alone": {**YARN, "mscale": 1.3},
    "yarn-factor": {**YARN, "attention_factor": 1.25},
    "yarn-tiny-context": {
        **YARN,
        "original_max_position_embeddings": 16,
        "beta_fast": 4,
        "beta_slow": 3,
        "truncate": False,
    },
    "yarn-zero-betas": {**YARN, "beta_fast": 0, "beta_slow": 0},
    "yarn-no-original": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1000.0},
}


def same_frequencies(ours: ModelConfig, judge: transformers.PreTrainedConfig) -> None:
    kind = judge.rope_parameters["rope_type"]
    compute = ROPE_INIT_FUNCTIONS.get(kind) or (
        transformers.models.llama.modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters
    )
    wanted, factor = compute(judge)
    freq, scale = rope_frequencies(ours.rope, ours.head_dim)
    torch.testing.assert_close(freq, wanted, rtol=1e-6, atol=0)
    assert scale == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("name", ROPES)
def test_rope_in_both_spellings(name, model_type):
    options = {**SIZES, "head_dim": 20}
    judge = theirs(model_type, **options, rope_parameters=dict(ROPES[name]))
    new = config(model_type, **options, rope_parameters=dict(ROPES[name]))
    same_frequencies(new, judge)
    old = dict(ROPES[name])
    theta, kind = old.pop("rope_theta"), old.pop("rope_type")
    scaling = None if kind == "default" else {"type": kind, **old}
    assert config(model_type, **options, rope_theta=theta, rope_scaling=scaling) == new


@settings(deadline=None, max_examples=200)
@given(
    head_dim=st.integers(2, 40).map(lambda n: 2 * n),
    theta=st.floats(100, 1e6),
    factor=st.floats(1, 32),
    original=st.integers(16, 4096),
    fast=st.floats(4, 64),
    slow=st.floats(0.25, 3),
    truncate=st.booleans(),
)
def test_yarn_frequencies_for_any_numbers(head_dim, theta, factor, original, fast, slow, truncate):
    rope = {"rope_type": "yarn", "rope_theta": theta, "factor": factor, "truncate": truncate}
    rope |= {"original_max_position_embeddings": original, "beta_fast": fast, "beta_slow": slow}
    options = {**SIZES, "head_dim": head_dim}
    judge = theirs("llama", **options, rope_parameters=dict(rope))
    same_frequencies(config("llama", **options, rope_parameters=rope), judge)


def test_top_level_original_length_wins_as_in_transformers():
    rope = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
    got = config("llama", rope_scaling=rope, original_max_position_embeddings=64)
    judge = theirs("llama", **SIZES, rope_scaling=dict(rope), original_max_position_embeddings=64)
    assert got.rope.original_max_position_embeddings == 64
    same_frequencies(got, judge)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_transformers(name):
    x = torch.linspace(-6, 6, 101)
    torch.testing.assert_close(
        activation(name)(x), transformers.activations.ACT2FN[name](x), rtol=0, atol=1e-6
    )


def test_experts_under_either_name():
    assert config("qwen3_moe", num_local_experts=6, num_experts_per_tok=2).layers[0].moe.num_experts == 6
    assert config("qwen3_moe", num_experts=6, num_experts_per_tok=2).layers[0].moe.num_experts == 6
    assert config("mixtral", num_local_experts=6).layers[0].moe.num_experts == 6


REFUSED = [
    ({"model_type": "gpt2"}, f"model_type 'gpt2' is not known; known: {KNOWN}"),
    ({}, f"model_type None is not known; known: {KNOWN}"),
    (
        {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}},
        "quantised checkpoint not supported (quantization_config, method 'gptq'): use the checkpoint in bfloat16",
    ),
    (
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        "architectures is ['LlamaForSequenceClassification']: only language models",
    ),
    ({"model_type": "llama", "attention_sinks": True}, "option attention_sinks=True changes results"),
    (
        {"model_type": "qwen3", "final_logit_softcapping": 30.0},
        "option final_logit_softcapping=30.0 changes results",
    ),
    (
        {"model_type": "llama", "partial_rotary_factor": 0.5},
        "option partial_rotary_factor=0.5 changes results",
    ),
    ({"model_type": "llama", "hidden_act": "xielu"}, "hidden_act 'xielu' is not known; known: ['gelu'"),
    (
        {"model_type": "llama", "sliding_window": 128},
        "sliding_window=128 is not supported for this model_type",
    ),
    (
        {"model_type": "mistral", "use_sliding_window": False, "sliding_window": 8},
        "use_sliding_window=False has no meaning for this model_type: set sliding_window (8) to null",
    ),
    (
        {"model_type": "mistral", "layer_types": ["full_attention"] * 3, "sliding_window": 8},
        "contradicts sliding_window=8",
    ),
    (
        {"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention", "full_attention"]},
        "layer_types must name 3 layers, each one of ['full_attention', 'sliding_attention']",
    ),
    ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "layer_types must name 3 layers"),
    (
        {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 3},
        "layer_types has sliding_attention, but use_sliding_window or sliding_window is off",
    ),
    (
        {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_type 'dynamic' is not supported; supported: default, linear, llama3, yarn",
    ),
    (
        {"model_type": "llama", "rope_parameters": {"rope_type": "longrope"}},
        "rope_type 'longrope' is not supported",
    ),
    (
        {"model_type": "qwen2", "rope_scaling": {"type": "default", "mrope_section": [1, 2]}},
        "rope options ['mrope_section'] of rope_type 'default' are not supported",
    ),
    (
        {"model_type": "qwen3", "rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_parameters per layer type (['full_attention']) are not supported",
    ),
    (
        {"model_type": "llama", "rope_scaling": {"type": "linear"}},
        "rope_type 'linear' needs factor, which is missing",
    ),
    (
        {"model_type": "llama", "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5 is not supported",
    ),
    ({"model_type": "llama", "hidden_size": "48"}, "hidden_size must be an integer, got '48'"),
    (
        {"model_type": "llama", "hidden_size": 50},
        "hidden_size (50) must be a multiple of num_attention_heads (4)",
    ),
    ({"model_type": "llama", "rms_norm_eps": None}, "rms_norm_eps must be a number, got None"),
    (
        {"model_type": "llama", "tie_word_embeddings": "no"},
        "tie_word_embeddings must be true or false, got 'no'",
    ),
    ({"model_type": "llama", "num_key_value_heads": 3}, "num_attention_heads (4) must be a multiple of"),
    (
        {"model_type": "olmoe", "head_dim": 16},
        "olmoe normalises hidden_size numbers per query: head_dim (16)",
    ),
    (
        {"model_type": "mixtral", "norm_topk_prob": False},
        "norm_topk_prob=False has no meaning in model_type 'mixtral'",
    ),
    ({"model_type": "mixtral", "clip_qkv": 8.0}, "clip_qkv=8.0 has no meaning in model_type 'mixtral'"),
    (
        {"model_type": "qwen3_moe", "num_experts": 4, "num_local_experts": 5},
        "num_local_experts (5) contradicts num_exp",
    ),
    (
        {"model_type": "llama", "rms_norm_eps": -1e-6},
        "rms_norm_eps must be finite and not negative, got -1e-06",
    ),
    (
        {"model_type": "llama", "rms_norm_eps": float("nan")},
        "rms_norm_eps must be finite and not negative, got nan",
    ),
    (
        {"model_type": "llama", "rms_norm_eps": float("inf")},
        "rms_norm_eps must be finite and not negative, got inf",
    ),
    (
        {"model_type": "llama", "rms_norm_eps": 10**400},
        "rms_norm_eps must be a number that fits in 64 bits, got 1000",
    ),
    ({"model_type": "olmoe", "clip_qkv": 0}, "clip_qkv must be None or a positive finite number, got 0.0"),
    (
        {"model_type": "olmoe", "clip_qkv": float("nan")},
        "clip_qkv must be None or a positive finite number, got nan",
    ),
    ({"model_type": "llama", "num_hidden_layers": -3}, "num_hidden_layers must be positive, got -3"),
    (
        {"model_type": "qwen3_moe", "mlp_only_layers": [0, 3]},
        "mlp_only_layers must be a list of layers in 0..2, got [0, 3]",
    ),
    (
        {"model_type": "qwen3_moe", "mlp_only_layers": ["0"]},
        "mlp_only_layers must be a list of layers in 0..2, got ['0']",
    ),
    (
        {"model_type": "qwen3_moe", "mlp_only_layers": "01"},
        "mlp_only_layers must be a list of layers in 0..2, got '01'",
    ),
    (
        {"model_type": "qwen3_moe", "mlp_only_layers": 0},
        "mlp_only_layers must be a list of layers in 0..2, got 0",
    ),
    (
        {"model_type": "qwen3_moe", "mlp_only_layers": [True]},
        "mlp_only_layers must be a list of layers in 0..2, got [True]",
    ),
    ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1, got 0"),
    (
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 5},
        "top_k (num_experts_per_tok) must be in",
    ),
    (
        {"model_type": "dots1", "n_routed_experts": 8, "n_group": 8},
        "n_group (8) must leave at least two of the 8",
    ),
    ({"model_type": "dots1", "n_shared_experts": 0}, "n_shared_experts must be at least 1, got 0"),
    (
        {"model_type": "dots1", "num_experts_per_tok": None},
        "num_experts_per_tok must be an integer, got None",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_refusals_name_the_option(options, message):
    whole = {**SIZES, **NEEDED.get(options.get("model_type", ""), {}), **options}
    with pytest.raises(ConfigError) as caught:
        model_config_from_hf(whole)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"attention_sinks": False, "final_logit_softcapping": None, "is_causal": True, "logit_scale": 1.0},
        {"sliding_window": None, "partial_rotary_factor": 1.0, "quantization_config": None},
        {"auto_map": {"AutoModel": "x.Y"}, "pretraining_tp": 2, "attention_dropout": 0.1, "unheard_of": 3},
        {"rope_scaling": None, "rope_theta": 10000},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "factor": None}},
    ],
)
def test_options_that_change_nothing_are_let_through(options):
    assert config("llama", **options) == config("llama")


def model(model_type: str, *layers: LayerConfig, **options: Any) -> ModelConfig:
    base: dict[str, Any] = {
        "vocab_size": 11,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    base |= {"head_dim": 6, "max_position_embeddings": 64, "qk_norm": "head"}
    return ModelConfig(model_type=model_type, layers=layers, **{**base, **options})


DENSE = LayerConfig(intermediate_size=20)
MOE = MoEConfig(num_experts=3, top_k=2, intermediate_size=8)
YARN_ROPE = RopeConfig(
    theta=500.0, kind="yarn", factor=2.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=1.1
)
WRITTEN = [
    model("qwen3", DENSE, DENSE, tie_word_embeddings=True),
    model(
        "qwen3",
        DENSE,
        LayerConfig(intermediate_size=20, sliding_window=5),
        qkv_bias=True,
        attention_output_bias=True,
    ),
    model("qwen3", DENSE, rope=YARN_ROPE, rms_norm_eps=1e-5, hidden_act="gelu"),
    model("qwen3_moe", LayerConfig(moe=MOE), DENSE, LayerConfig(moe=MOE)),
    model(
        "qwen3_moe",
        LayerConfig(moe=MoEConfig(num_experts=4, top_k=1, intermediate_size=8, norm_topk_prob=False)),
    ),
    model(
        "qwen3_moe",
        LayerConfig(moe=MOE, sliding_window=4),
        rope=RopeConfig(theta=9.0, kind="linear", factor=2.0),
    ),
]


@pytest.mark.parametrize("written", WRITTEN)
def test_what_we_write_reads_back_here_and_after_transformers(written):
    out = hf_config(written)
    assert model_config_from_hf(out) == written
    judge = transformers.CONFIG_MAPPING[out["model_type"]].from_dict({**out, **IDS})
    assert model_config_from_hf(judge.to_dict()) == written


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (model("llama", DENSE), "only qwen3 and qwen3_moe models can be saved, got 'llama'"),
        (model("qwen3", LayerConfig(moe=MOE)), "qwen3 is dense: use model_type 'qwen3_moe'"),
        (model("qwen3", DENSE, qk_norm=None), "qwen3 has qk_norm='head', got None"),
        (model("qwen3", DENSE, qkv_bias=True), "qwen3 has one attention_bias, got qkv_bias=True"),
        (
            model("qwen3_moe", LayerConfig(moe=MoEConfig(num_experts=3, top_k=1, intermediate_size=8, selection_bias=True))),
            "qwen3_moe has softmax scores and neither selection bias",
        ),
        (
            model("qwen3_moe", LayerConfig(moe=MOE), LayerConfig(moe=MoEConfig(num_experts=2, top_k=2, intermediate_size=8))),
            "qwen3_moe needs one MoEConfig for all its MoE layers, got 2",
        ),
        (model("qwen3_moe", LayerConfig(moe=MOE), LayerConfig(moe=MOE, sliding_window=3)), "in all layers or in none"),
        (model("qwen3", DENSE, LayerConfig(intermediate_size=8)), "one intermediate_size for all dense layers, got [8, 20]"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused(refused, message):
    with pytest.raises(ConfigError) as caught:
        hf_config(refused)
    assert message in str(caught.value)
