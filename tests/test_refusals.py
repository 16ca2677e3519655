"""LLM against wrong types, sizes that no machine has, and folders that recommend nonsense: refused early, and said why."""

import json
import re
import shutil

import numpy as np
import pytest
import torch

from tinymoe import LLM, SamplingParams
from tinymoe.core.model_config import ConfigError, brief
from tinymoe.engine.engine import Engine
from tinymoe.engine.intake import RequestError
from tinymoe.llm import resolve_model
from tinymoe.text import Tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
LONG = "a" * 300_000


@pytest.fixture(scope="module")
def llm():
    return LLM("quintet-draft", num_blocks=64)


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(resolve_model("quintet-draft"), tmp_path / "model")


# Prompts


PROMPTS = [
    (b"abc", "prompts must be a prompt or a list of prompts, got b'abc' (bytes): a prompt is text (a string), a list of"),
    (None, "prompts must be a prompt or a list of prompts, got None (NoneType)"),
    (5, "prompts must be a prompt or a list of prompts, got 5 (int)"),
    ({"a"}, "prompts must be a prompt or a list of prompts, got {'a'} (set)"),
    (np.array(3), "prompts must be a prompt or a list of prompts, got array(3) (ndarray)"),
    (np.array([1.5]), "prompt_token_ids must be a list of ints, got array([1.5])"),
    (np.array([True]), "prompt_token_ids must be a list of ints, got array([ True])"),
    (torch.tensor([1.0]), "prompt_token_ids must be a list of ints, got tensor([1.])"),
    (np.array(["a"]), "prompt_token_ids must be a list of ints, got array(['a']"),
    (np.zeros((1, 2, 3), int), "prompt_token_ids must be a list of ints or a 1-d array, got an array of shape (2, 3)"),
    ({"prompt": [1, 2]}, "'prompt' must be text (a string), got [1, 2]: token ids are 'prompt_token_ids'"),
    ({"prompt": None}, "'prompt' must be text (a string), got None"),
    ({"prompt": 5, "prompt_token_ids": [1]}, "'prompt' must be text (a string), got 5"),
    ({"prompt_token_ids": "abc"}, "prompt_token_ids must be a list of ints, got 'abc' (str)"),
    ({"prompt_token_ids": {1, 2}}, "prompt_token_ids must be a list of ints, got {1, 2} (set)"),
    ({"prompt_token_ids": b"ab"}, "prompt_token_ids must be a list of ints, got b'ab' (bytes)"),
    ({"prompt_token_ids": [1, LONG]}, "... (300007 characters): a prompt is"),
    ({1: 2, LONG: 3}, "a prompt dict has 'prompt' or 'prompt_token_ids', got keys ['1', 'aaa"),
    (["a", 5], "prompt_token_ids must be a list of ints, got 5 (int)"),
    (["a", None], "prompt_token_ids must be a list of ints, got None (NoneType)"),
    ("a\ud800", "the prompt 'a\\ud800' is not valid Unicode (surrogates not allowed at 1)"),
    ("x " * 6000, "leaves no room for output: max_model_len is 2048; shorten the prompt (this is the most that the model"),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "message"), PROMPTS, ids=[f"{i}" for i in range(len(PROMPTS))])
def test_what_is_no_prompt_is_refused(llm, prompt, message):
    steps = llm.get_metrics()["steps"]
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        llm.generate(prompt, GREEDY)
    assert len(str(caught.value)) < 400
    assert llm.get_metrics()["steps"] == steps
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize(
    "prompt",
    [np.array([5, 6]), torch.tensor([5, 6]), [np.int64(5), np.int32(6)], [torch.tensor(5), 6], range(5, 7), (5, 6),
     iter([5, 6]), (i for i in ([5, 6],)), np.array([[5, 6]]), [np.array([5, 6])], {"prompt_token_ids": torch.tensor([5, 6])}],
    ids=map(str, range(11)),
)  # fmt: skip
def test_token_ids_in_every_ordered_form(llm, prompt):
    (output,) = llm.generate(prompt, GREEDY)
    assert output.prompt_token_ids == [5, 6]
    assert all(type(i) is int for i in output.prompt_token_ids)


def test_a_generator_of_prompts(llm):
    outputs = llm.generate((p for p in ("It was", "12+35=")), GREEDY)
    assert [o.prompt for o in outputs] == ["It was", "12+35="]


def test_a_prompt_that_is_too_long_for_a_chosen_length_says_what_to_raise():
    llm = LLM("quintet-draft", max_model_len=16)
    with pytest.raises(RequestError, match="max_model_len is 16; shorten the prompt or raise max_model_len"):
        llm.generate({"prompt_token_ids": [5] * 16})


@pytest.mark.parametrize("request_id", [[1], 5, None], ids=str)
def test_abort_wants_a_string(llm, request_id):
    with pytest.raises(RequestError, match="request_id must be a string, got "):
        llm.engine.abort_request(request_id)


CHATS = [
    {"role": "user", "content": "Hi"}, None, 5, "Hi", ["Hi"], [{"role": "user"}], [{"role": "user", "content": 5}],
    [{"role": "user", "content": None}], [None], [{"role": "user", "content": "a\ud800"}], [{"role": "user", "content": "a"}, LONG],
]  # fmt: skip


@pytest.mark.parametrize("messages", CHATS, ids=lambda m: brief(m, 40))
def test_what_is_no_chat_is_refused(llm, messages):
    with pytest.raises(ConfigError, match=r"message|valid Unicode") as caught:
        llm.chat(messages, GREEDY)
    assert len(str(caught.value)) < 300


def test_none_in_a_list_is_what_the_model_recommends(folder):
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "eos_token_id": 2}')
    llm = LLM(folder)
    assert llm.get_default_sampling_params().greedy
    one, two = llm.generate(["It was"] * 2, [None, SamplingParams(temperature=0)])
    assert (
        one.outputs[0].token_ids == two.outputs[0].token_ids == llm.generate("It was")[0].outputs[0].token_ids
    )
    with pytest.raises(RequestError, match=r"priority must be an int .*, got None"):
        llm.generate("It was", priority=None)  # pyright: ignore[reportArgumentType]


def test_long_values_are_cut():
    for options in (
        {"logit_bias": {1: LONG}},
        {"stop_token_ids": [LONG]},
        {"stop": {LONG: 1}},
        {"seed": 10**5000},
    ):
        with pytest.raises(ConfigError) as caught:
            SamplingParams(**options)
        assert len(str(caught.value)) < 200
    with pytest.raises(TypeError) as unknown:
        LLM(**{LONG: 1})
    assert len(str(unknown.value)) < 600


# The options of LLM


OPTIONS = [
    ({"model": None}, "model must be the name of a bundled model (quintet-dense, quintet-draft, quintet-moe) or a path, got None"),
    ({"model": 5}, "model must be the name of a bundled model"),
    ({"model": ""}, "or a path, got ''"),
    ({"model": LONG}, "... (300002 characters) is neither a local folder nor a bundled model"),
    ({"device": None}, "device must be a string or a torch.device, got None: use 'auto', 'cpu' or 'cuda'"),
    ({"device": "meta"}, "device 'meta' holds no numbers"),
    ({"device": "cuda:99"}, "device 'cuda:99' "),
    ({"device": "cpu:3"}, "device 'cpu:3' does not exist"),
    ({"device": "xpu:77"}, "device 'xpu:77' does not work here"),
    ({"dtype": "int8"}, "dtype must be 'auto' or 'float32' or 'bfloat16' or 'float16', got 'int8'"),
    ({"dtype": torch.float32}, "got torch.float32"),
    ({"dtype": None}, "dtype must be"),
    ({"skip_tokenizer_init": "no"}, "skip_tokenizer_init must be True or False, got 'no'"),
    ({"max_model_len": 1}, "max_model_len must be None or an int of at least 2, got 1"),
    ({"num_blocks": 10**12}, "the KV cache does not fit: 1000000000000 blocks of 16 tokens x 16384 bytes a block = 15258789.1 GiB, the memory"),
    ({"kv_cache_bytes": 10**15}, "lower kv_cache_bytes"),
    ({"block_size": 10**12}, "lower block_size"),
    ({"max_num_seqs": 10**11}, "the block tables do not fit: max_num_seqs (100000000000) x 128 blocks of a sequence x 4 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=[m[:50] for _, m in OPTIONS])
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        LLM(**{"model": "quintet-draft", **options})
    assert len(str(caught.value)) < 400


# The files of the model


GENERATION = [
    ({"eos_token_id": 4096}, "eos_token_id must be a token id of the model (0..4095), a list of them, or null, got 4096"),
    ({"eos_token_id": -1}, "or null, got -1"),
    ({"eos_token_id": "x"}, "or null, got 'x'"),
    ({"eos_token_id": [2, "y"]}, "or null, got [2, 'y']"),
    ({"eos_token_id": True}, "or null, got True"),
    ({"eos_token_id": 1.0}, "or null, got 1.0"),
    ({"eos_token_id": {"a": 1}}, "or null, got {'a': 1}"),
    ({"temperature": "hot"}, "temperature must be a finite number, got 'hot'; correct it there, or leave it out"),
    ({"top_p": 5}, "top_p must be in (0, 1], got 5"),
    ({"top_k": [1]}, "top_k must be an int, got [1]"),
    ({"repetition_penalty": 0}, "repetition_penalty must be positive, got 0"),
    ({"do_sample": "yes"}, "do_sample must be true, false or null, got 'yes'"),
    ([1], " must hold a JSON object, got [1]"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), GENERATION, ids=[json.dumps(b) for b, _ in GENERATION])
def test_a_recommendation_that_cannot_be_followed_is_refused_at_load(folder, body, message):
    path = folder / "generation_config.json"
    path.write_text(json.dumps(body))
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        LLM(folder)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("eos", "wanted"), [(3, (3,)), ([5, 4095], (5, 4095)), ([], ()), (None, (Tokenizer(resolve_model("quintet-draft")).eos_token_id,))]
)  # fmt: skip
def test_eos_ids_are_those_of_the_file_or_of_the_tokenizer(folder, eos, wanted):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "temperature": None}))
    assert LLM(folder).engine.eos_token_ids == wanted


def test_an_engine_refuses_eos_ids_that_the_model_lacks(llm):
    with pytest.raises(ConfigError, match=re.escape("eos_token_ids must be in 0..4095, got [4096]")):
        Engine(llm.engine.runner.model, eos_token_ids=[4096])


def test_a_decoder_that_cannot_stream_is_refused_at_load(folder):
    path = folder / "tokenizer.json"
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}))
    with pytest.raises(ConfigError, match="cannot be decoded token by token"):
        LLM(folder)
    llm = LLM(folder, skip_tokenizer_init=True)
    assert len(llm.generate([5, 6], GREEDY)[0].outputs[0].token_ids) == 2
