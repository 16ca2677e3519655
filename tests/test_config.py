"""Options: each wrong value is refused with a text that names it; sizes and counts against the real thing."""

import dataclasses
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import CONFIGS

from tinymoe.cache.planner import DEFAULT_CACHE_BYTES, plan_cache
from tinymoe.cache.storage import KVStorage
from tinymoe.core.config import EngineConfig
from tinymoe.core.model_config import ConfigError, LayerConfig, ModelConfig, MoEConfig, RopeConfig
from tinymoe.core.params import SamplingParams
from tinymoe.model.decoder import Decoder

SAMPLING = [
    *(
        ({name: value}, f"{name} must be True or False, got {value!r}")
        for name, value in (
            ("ignore_eos", "yes"),
            ("include_stop_str_in_output", "no"),
            ("detokenize", None),
            ("skip_special_tokens", 3),
        )
    ),
    ({"stop": ["a" * 300, 5]}, "stop must hold str only, got 5"),
    (
        {"temperature": "a" * 300_000},
        f"temperature must be a finite number, got '{'a' * 79}... (300002 characters)",
    ),
    ({"n": 0}, "n must be at least 1, got 0"),
    ({"n": 1.5}, "n must be an int, got 1.5"),
    ({"n": True}, "n must be an int, got True"),
    ({"temperature": -0.1}, "temperature must be 0 (greedy) or positive, got -0.1"),
    ({"temperature": math.nan}, "temperature must be a finite number, got nan"),
    ({"temperature": "hot"}, "temperature must be a finite number, got 'hot'"),
    ({"temperature": True}, "temperature must be a finite number, got True"),
    ({"top_p": 0}, "top_p must be in (0, 1], got 0"),
    ({"top_p": 1.01}, "top_p must be in (0, 1], got 1.01"),
    ({"top_k": -2}, "top_k must be 0 or -1 (off) or positive, got -2"),
    ({"top_k": 2.0}, "top_k must be an int, got 2.0"),
    ({"min_p": 1.5}, "min_p must be in [0, 1], got 1.5"),
    ({"min_p": -0.5}, "min_p must be in [0, 1], got -0.5"),
    ({"repetition_penalty": 0}, "repetition_penalty must be positive, got 0"),
    ({"presence_penalty": 2.1}, "presence_penalty must be in [-2, 2], got 2.1"),
    ({"frequency_penalty": -2.1}, "frequency_penalty must be in [-2, 2], got -2.1"),
    ({"frequency_penalty": math.inf}, "frequency_penalty must be a finite number, got inf"),
    ({"seed": -1}, "seed must be None or an int in 0..2^63-1, got -1"),
    ({"seed": 2**63}, "seed must be None or an int in 0..2^63-1, got 9223372036854775808"),
    ({"seed": True}, "seed must be None or an int in 0..2^63-1, got True"),
    ({"max_tokens": 0}, "max_tokens must be None or an int of at least 1, got 0"),
    ({"max_tokens": True}, "max_tokens must be None or an int of at least 1, got True"),
    ({"max_tokens": 2.0}, "max_tokens must be None or an int of at least 1, got 2.0"),
    ({"min_tokens": -1}, "min_tokens must not be negative, got -1"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens (5) exceeds max_tokens (4)"),
    ({"min_tokens": 17}, "min_tokens (17) exceeds max_tokens (16)"),
    ({"logprobs": -1}, "logprobs must be None or 0..1000, got -1"),
    ({"logprobs": 1001}, "logprobs must be None or 0..1000, got 1001"),
    ({"logprobs": True}, "logprobs must be None or 0..1000, got True"),
    ({"prompt_logprobs": 1.0}, "prompt_logprobs must be None or 0..1000, got 1.0"),
    ({"stop": [""]}, "stop strings must not be empty"),
    ({"stop": [1]}, "stop must hold str only, got 1"),
    ({"stop": 5}, "stop must be a list of str, got 5"),
    ({"bad_words": ""}, "bad_words must not be empty strings"),
    ({"stop": "x", "detokenize": False}, "stop and bad_words are strings: they need detokenize=True"),
    ({"bad_words": ["x"], "detokenize": False}, "stop and bad_words are strings: they need detokenize=True"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids must hold int only, got 'a'"),
    ({"stop_token_ids": [True]}, "stop_token_ids must hold int only, got True"),
    ({"stop_token_ids": {1: 2}}, "stop_token_ids must be a list of int, got {1: 2}"),
    ({"allowed_token_ids": []}, "allowed_token_ids must not be empty; use None for no restriction"),
    ({"logit_bias": [1]}, "logit_bias must be a dict, got [1]"),
    ({"logit_bias": {"a": 1}}, "logit_bias must map token ids (ints) to numbers:"),
    ({"logit_bias": {1.5: 1}}, "logit_bias must map token ids (ints) to numbers:"),
    ({"logit_bias": {1: "x"}}, "logit_bias must map token ids (ints) to numbers:"),
    ({"logit_bias": {1: math.inf}}, "logit_bias values must be finite"),
]
ENGINE = [
    ({"max_num_seqs": 0}, "max_num_seqs must be an int of at least 1, got 0"),
    ({"max_num_batched_tokens": 1.0}, "max_num_batched_tokens must be an int of at least 1, got 1.0"),
    ({"block_size": True}, "block_size must be an int of at least 1, got True"),
    ({"max_model_len": 0}, "max_model_len must be None or an int of at least 2, got 0"),
    ({"max_model_len": 1}, "max_model_len must be None or an int of at least 2, got 1"),
    ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be True or False, got 'no'"),
    ({"return_routed_experts": 1}, "return_routed_experts must be True or False, got 1"),
    ({"num_blocks": -1}, "num_blocks must be None or an int of at least 1, got -1"),
    ({"kv_cache_bytes": 0.5}, "kv_cache_bytes must be None or an int of at least 1, got 0.5"),
    ({"num_blocks": 1, "kv_cache_bytes": 2}, "give num_blocks or kv_cache_bytes, not both (got 1 and 2)"),
    ({"policy": "lifo"}, "policy must be 'fcfs' or 'priority', got 'lifo'"),
    (
        {"long_prefill_token_threshold": -1},
        "long_prefill_token_threshold must be an int of at least 0, got -1",
    ),
    (
        {"long_prefill_token_threshold": "8"},
        "long_prefill_token_threshold must be an int of at least 0, got '8'",
    ),
    ({"seed": -1}, "seed must be an int in 0..2^63-1, got -1"),
    ({"seed": None}, "seed must be an int in 0..2^63-1, got None"),
]
MOE_BASE = {"num_experts": 8, "top_k": 2, "intermediate_size": 4}
MOE = [
    ({"num_experts": 0}, "num_experts must be at least 1, got 0"),
    ({"top_k": 0}, "top_k (num_experts_per_tok) must be in 1..8 (num_experts), got 0"),
    ({"top_k": 9}, "top_k (num_experts_per_tok) must be in 1..8 (num_experts), got 9"),
    ({"intermediate_size": 0}, "intermediate_size must be at least 1, got 0"),
    ({"scoring": "tanh"}, "scoring must be 'softmax' or 'sigmoid', got 'tanh'"),
    ({"n_group": 3}, "n_group (3) must divide num_experts (8)"),
    ({"n_group": 0}, "n_group (0) must divide num_experts (8)"),
    ({"n_group": 4, "topk_group": 5}, "topk_group must be in 1..4 (n_group), got 5"),
    ({"n_group": 4, "topk_group": 1, "top_k": 3}, "top_k (3) exceeds the 2 experts of topk_group groups"),
    ({"shared_intermediate_size": -1}, "shared_intermediate_size must not be negative, got -1"),
    ({"shared_gate": True}, "shared_gate needs a shared expert: set shared_intermediate_size"),
]
MODEL_BASE = {f.name: getattr(CONFIGS["dense"], f.name) for f in dataclasses.fields(ModelConfig)}
MODEL = [
    ({"vocab_size": 0}, "vocab_size must be positive, got 0"),
    ({"hidden_size": -4}, "hidden_size must be positive, got -4"),
    ({"num_attention_heads": 0}, "num_attention_heads must be positive, got 0"),
    ({"layers": ()}, "num_hidden_layers must be positive, got 0"),
    ({"num_key_value_heads": 3}, "num_attention_heads (4) must be a multiple of num_key_value_heads (3)"),
    ({"head_dim": 7}, "head_dim must be even for rotary embedding, got 7"),
    ({"max_position_embeddings": 0}, "max_position_embeddings must be positive, got 0"),
    ({"qk_norm": "layer"}, "qk_norm must be None, 'head' or 'full', got 'layer'"),
]
LAYER = [
    ({}, "a dense layer needs intermediate_size > 0"),
    ({"intermediate_size": 4, "sliding_window": 0}, "sliding_window must be positive or None, got 0"),
]
ROPE = [
    ({"kind": "spiral"}, "rope kind must be one of ('default', 'linear', 'llama3', 'yarn'), got 'spiral'"),
    ({"theta": 0}, "rope theta must be positive, got 0"),
    ({"factor": 0.5}, "rope factor must be at least 1, got 0.5"),
    ({"rotary_fraction": 0}, "rotary_fraction must be in (0, 1], got 0"),
    ({"kind": "yarn"}, "rope kind 'yarn' needs original_max_position_embeddings"),
    ({"kind": "llama3", "factor": 2.0}, "rope kind 'llama3' needs original_max_position_embeddings"),
]
WRONG = [
    (kind, {**base, **options}, message)
    for kind, base, cases in (
        (SamplingParams, {}, SAMPLING), (EngineConfig, {}, ENGINE), (MoEConfig, MOE_BASE, MOE), (ModelConfig, MODEL_BASE, MODEL),
        (LayerConfig, {}, LAYER), (RopeConfig, {}, ROPE),
    )
    for options, message in cases
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options", "message"), WRONG, ids=[f"{k.__name__}-{m[:40]}" for k, _, m in WRONG]
)
def test_a_wrong_option_is_named(kind, options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        kind(**options)


@pytest.mark.parametrize(
    "kind", [SamplingParams, EngineConfig, MoEConfig, ModelConfig, LayerConfig, RopeConfig]
)
def test_options_are_keywords_known_and_frozen(kind):
    base = {MoEConfig: MOE_BASE, ModelConfig: MODEL_BASE, LayerConfig: {"intermediate_size": 4}}.get(kind, {})
    made = kind(**base)
    with pytest.raises(TypeError, match="temprature"):
        kind(**base, temprature=1)
    with pytest.raises(TypeError):
        kind(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(kind)[0].name, 1)
    assert made == kind(**base)


def test_the_edges_of_sampling_params_are_inside():
    params = SamplingParams(
        n=1, temperature=0, top_p=1, top_k=-1, min_p=1, presence_penalty=-2, frequency_penalty=2, seed=2**63 - 1,
        max_tokens=None, min_tokens=10**6, logprobs=1000, prompt_logprobs=0, stop="end", stop_token_ids={3},
        allowed_token_ids=[1, 2], logit_bias={1: 2, 3: -0.5}, bad_words=["no"],
    )  # fmt: skip
    assert (params.stop, params.stop_token_ids, params.bad_words) == (("end",), (3,), ("no",))
    assert params.allowed_token_ids == (1, 2)
    assert params.logit_bias == {1: 2.0, 3: -0.5}
    assert params.greedy
    assert not SamplingParams().greedy
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_a_clone_is_changed_and_checked_again():
    params = SamplingParams(seed=4, stop=["a"])
    assert params.clone(temperature=0.5) == SamplingParams(seed=4, stop=["a"], temperature=0.5)
    with pytest.raises(ConfigError, match="top_p must be"):
        params.clone(top_p=2)
    with pytest.raises(TypeError, match="heat"):
        params.clone(heat=1)


def test_lengths_and_thresholds():
    model = CONFIGS["moe"]
    assert EngineConfig().model_len(model) == 128
    assert EngineConfig(max_model_len=50).model_len(model) == 50
    with pytest.raises(
        ConfigError, match=re.escape("max_model_len (129) exceeds the model's max_position_embeddings (128)")
    ):
        EngineConfig(max_model_len=129).model_len(model)
    assert EngineConfig(max_num_batched_tokens=9).long_prefill == 4
    assert EngineConfig(max_num_batched_tokens=1).long_prefill == 1
    assert EngineConfig(long_prefill_token_threshold=7).long_prefill == 7


# What a model is made of


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_counted_as_they_are(name):
    config, decoder = CONFIGS[name], Decoder(CONFIGS[name])
    assert config.num_parameters() == sum(p.numel() for p in decoder.parameters())
    idle = sum(
        (layer.moe.num_experts - layer.moe.top_k) * 3 * config.hidden_size * layer.moe.intermediate_size
        for layer in config.layers
        if layer.moe
    )
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    assert config.num_parameters(active=True) == config.num_parameters() - idle - looked_up


def test_derived_facts_of_a_model():
    mixed, dense = CONFIGS["mixed"], CONFIGS["dense"]
    assert (mixed.num_hidden_layers, mixed.is_moe, mixed.max_experts, mixed.max_top_k) == (3, True, 6, 3)
    assert (dense.num_hidden_layers, dense.is_moe, dense.max_experts, dense.max_top_k) == (2, False, 0, 0)
    assert mixed.kv_elements_per_token == 3 * 2 * 2 * 8


# The size of the cache


@given(
    name=st.sampled_from(list(CONFIGS)),
    block_size=st.integers(1, 64),
    num_blocks=st.integers(1, 500),
    element=st.sampled_from([2, 4]),
)
def test_cache_plan_from_num_blocks_and_from_bytes(name, block_size, num_blocks, element):
    model = CONFIGS[name]
    storage = KVStorage(model, 1, block_size, torch.float32 if element == 4 else torch.bfloat16)
    plan = plan_cache(model, EngineConfig(block_size=block_size, num_blocks=num_blocks), element)
    assert plan == (num_blocks, storage.kv.nbytes)
    assert plan.total_bytes == num_blocks * storage.kv.nbytes
    for spare in (0, plan.bytes_per_block - 1):
        budget = plan.total_bytes + spare
        again = plan_cache(model, EngineConfig(block_size=block_size, kv_cache_bytes=budget), element)
        assert again == plan


def test_cache_plan_without_a_size_is_what_can_be_used_at_most():
    model = CONFIGS["moe"]
    plan = plan_cache(model, EngineConfig(max_num_seqs=3, max_model_len=33, block_size=16), 4)
    assert plan.num_blocks == 3 * 3
    big = dataclasses.replace(model, max_position_embeddings=1 << 30)
    plan = plan_cache(big, EngineConfig(), 4)
    assert plan.num_blocks == DEFAULT_CACHE_BYTES // plan.bytes_per_block
    assert plan.total_bytes <= DEFAULT_CACHE_BYTES


def test_a_cache_of_less_than_one_block_shows_its_arithmetic():
    message = (
        "kv_cache_bytes (1000) is less than one block: 16 tokens x 64 numbers x 4 bytes = 4096 bytes; "
        "raise it or lower block_size"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan_cache(CONFIGS["moe"], EngineConfig(kv_cache_bytes=1000), 4)
