"""LLM on the bundled models, judged by transformers on the same folders."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tinymoe import LLM, SamplingParams
from tinymoe.core.model_config import ConfigError
from tinymoe.engine.intake import RequestError
from tinymoe.llm import bundled_models, resolve_model

PROMPTS = ["It was a cold morning", "Es war einmal", "def push(self, ", "KING RICHARD:\n", "12+35="]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    return LLM("quintet-moe", num_blocks=256)


@pytest.mark.parametrize("name", ["quintet-moe", "quintet-dense", "quintet-draft"])
def test_greedy_texts_equal_transformers(name):
    folder = resolve_model(name)
    judge = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ours = LLM(name, num_blocks=256, max_num_batched_tokens=16).generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, ours):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            full = judge.generate(ids, do_sample=False, max_new_tokens=24, min_new_tokens=24, pad_token_id=0)
        wanted = full[0, ids.shape[1] :].tolist()
        assert output.prompt_token_ids == ids[0].tolist()
        assert output.outputs[0].token_ids == wanted
        assert output.outputs[0].text == tokenizer.decode(wanted, skip_special_tokens=True)


def test_the_bundle_is_light_and_known():
    assert bundled_models() == ["quintet-dense", "quintet-draft", "quintet-moe"]
    weights = [resolve_model(name) / "model.safetensors" for name in bundled_models()]
    assert sum(path.stat().st_size for path in weights) < 34e6


def test_streams_join_to_the_text_and_may_be_interleaved(llm):
    params = SamplingParams(temperature=1, max_tokens=24, seed=3, n=2, ignore_eos=True)
    wanted = [llm.generate(p, params)[0] for p in PROMPTS[:2]]
    streams = [llm.stream(p, params) for p in PROMPTS[:2]]
    texts = [["", ""], ["", ""]]
    ids = [[[], []], [[], []]]
    live = {0, 1}
    while live:
        for i in list(live):
            delta = next(streams[i], None)
            if delta is None:
                live.discard(i)
            else:
                texts[i][delta.index] += delta.text
                ids[i][delta.index] += delta.token_ids
    for i in range(2):
        assert texts[i] == [c.text for c in wanted[i].outputs]
        assert ids[i] == [c.token_ids for c in wanted[i].outputs]
    assert not llm.engine.has_unfinished_requests()


def test_a_closed_stream_is_aborted(llm):
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.blocks.pool.num_free == llm.engine.blocks.pool.num_blocks


def test_one_bad_prompt_and_none_runs(llm):
    before = llm.get_metrics()["steps"]
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate([PROMPTS[0], ""], GREEDY)
    assert not llm.engine.has_unfinished_requests()
    assert llm.get_metrics()["steps"] == before
    assert llm.generate(PROMPTS[4], GREEDY)[0].outputs[0].text.startswith("47\n")


def test_chat_goes_through_the_template(llm):
    messages = [{"role": "user", "content": "12+35="}]
    output = llm.chat(messages, GREEDY)[0]
    judge = AutoTokenizer.from_pretrained(resolve_model("quintet-moe"))
    wanted = judge.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert output.prompt == wanted
    assert output.prompt_token_ids == judge(wanted, add_special_tokens=False).input_ids


def test_defaults_come_from_the_generation_config(llm):
    said = json.loads((resolve_model("quintet-moe") / "generation_config.json").read_text())
    params = llm.get_default_sampling_params()
    for name in ("temperature", "top_p", "top_k"):
        if name in said:
            assert getattr(params, name) == said[name]


def test_metrics_add_up(llm):
    before = llm.get_metrics()
    outputs = llm.generate(PROMPTS, GREEDY)
    after = llm.get_metrics()
    grown = {
        k: after[k] - before[k]
        for k in ("requests", "finished_requests", "generation_tokens", "prompt_tokens")
    }
    prompt_tokens = sum(len(o.prompt_token_ids) for o in outputs)
    assert grown == {
        "requests": 5,
        "finished_requests": 5,
        "generation_tokens": 5 * 24,
        "prompt_tokens": prompt_tokens,
    }
    computed = after["computed_tokens"] - before["computed_tokens"]
    hits = after["prefix_hit_tokens"] - before["prefix_hit_tokens"]
    assert computed == prompt_tokens + 5 * 23 - hits  # the last token of each is never run
    visits = [sum(a) - sum(b) for a, b in zip(after["expert_load"], before["expert_load"])]
    assert visits == [2 * computed] * 6
    for output in outputs:
        assert output.metrics.ttft is not None
        assert output.metrics.queue_time is not None
        assert 0 <= output.metrics.queue_time <= output.metrics.ttft


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": "quintet-mo"}, ConfigError, "neither a local folder nor a bundled model"),
        (
            {"gpu_memory_use": 0.9},
            TypeError,
            "LLM has no option 'gpu_memory_use'; known: dtype, ",
        ),
        ({"num_blocks": 8, "kv_cache_bytes": 8}, ConfigError, "num_blocks or kv_cache_bytes, not both"),
        ({"max_model_len": 4096}, ConfigError, "exceeds the model's max_position_embeddings"),
        ({"device": "tpu9"}, ConfigError, "device 'tpu9' is not known"),
        ({"dtype": "int8"}, ValueError, "dtype must be"),
        ({"kv_cache_bytes": 100}, ConfigError, "less than one block"),
    ],
)
def test_bad_options_say_what_to_change(arguments, error, message):
    with pytest.raises(error, match=message):
        LLM(**{"model": "quintet-draft", **arguments})


def test_ids_in_ids_out():
    llm = LLM("quintet-draft", skip_tokenizer_init=True, num_blocks=64)
    output = llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, max_tokens=3))[0]
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) <= 3
    with pytest.raises(RequestError, match="needs a tokenizer"):
        llm.generate("text")
    with pytest.raises(ConfigError, match="no tokenizer"):
        llm.get_tokenizer()
