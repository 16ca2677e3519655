"""The bundled pair through LLM: texts, streams and stop strings with drafts are those without, and a draft that speaks
another language is refused."""

import json
import shutil

import pytest
from tiny_models import BUNDLED

from tinymoe.core.model_config import ConfigError
from tinymoe.core.params import SamplingParams
from tinymoe.llm import LLM

DRAFT = BUNDLED.parent / "quintet-draft"
pytestmark = pytest.mark.skipif(
    not all((folder / "model.safetensors").exists() for folder in (BUNDLED, DRAFT)),
    reason="the bundled models are missing",
)
PAIR = {"method": "draft_model", "model": "quintet-draft", "num_speculative_tokens": 4, "adaptive": False}
PROMPTS = ["The old river ran through the village and", "12 + 34 =", "def main():", "Once upon a time"]
GREEDY = SamplingParams(temperature=0, max_tokens=40)


@pytest.fixture(scope="module")
def plain():
    return LLM("quintet-moe", device="cpu")


@pytest.fixture(scope="module")
def pair():
    return LLM("quintet-moe", device="cpu", speculative_config=PAIR)


@pytest.fixture(scope="module")
def coupled():
    return LLM(
        "quintet-moe", device="cpu", speculative_config=PAIR | {"acceptance": "coupled", "adaptive": True}
    )


def test_greedy_texts_are_equal_and_take_fewer_steps(plain, pair):
    before = plain.get_metrics()["steps"], pair.get_metrics()["steps"]
    one, two = plain.generate(PROMPTS, GREEDY), pair.generate(PROMPTS, GREEDY)
    for a, b in zip(one, two):
        assert a.outputs[0].text == b.outputs[0].text
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.outputs[0].finish_reason == b.outputs[0].finish_reason
    steps = plain.get_metrics()["steps"] - before[0], pair.get_metrics()["steps"] - before[1]
    assert steps[1] < steps[0]
    assert pair.get_metrics()["acceptance_rate"] > 0.2


def test_coupled_texts_are_equal_though_drawn(plain, coupled):
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=40, n=2)
    for a, b in zip(plain.generate(PROMPTS, params), coupled.generate(PROMPTS, params)):
        assert [c.text for c in a.outputs] == [c.text for c in b.outputs]
    assert coupled.get_metrics()["accepted_tokens"] > 0


def test_stop_strings_inside_a_run(plain, pair):
    """Every piece of an answer as a stop string: the text ends before it, with and without drafts."""
    whole = plain.generate(PROMPTS[0], GREEDY)[0].outputs[0].text
    stops = [whole[i : i + 3] for i in range(2, len(whole) - 3, 7)]
    params = [
        GREEDY.clone(stop=[stop], include_stop_str_in_output=bool(i % 2)) for i, stop in enumerate(stops)
    ]
    asked = [PROMPTS[0]] * len(stops)
    for stop, a, b in zip(stops, plain.generate(asked, params), pair.generate(asked, params)):
        (x,), (y,) = a.outputs, b.outputs
        assert (x.text, x.token_ids, x.finish_reason, x.stop_reason) == (
            y.text, y.token_ids, y.finish_reason, y.stop_reason,
        )  # fmt: skip
        assert y.stop_reason == stop
        assert whole.startswith(y.text)


def test_bad_words_hold_for_drafts_too(plain, pair):
    word = plain.generate(PROMPTS[0], GREEDY)[0].outputs[0].text.split()[3]
    params = GREEDY.clone(bad_words=[word])
    a, b = (llm.generate(PROMPTS[0], params)[0].outputs[0] for llm in (plain, pair))
    assert a.token_ids == b.token_ids
    assert f" {word} " not in b.text


def test_a_stream_brings_runs_that_join_to_the_text(plain, pair):
    wanted = plain.generate(PROMPTS[0], GREEDY)[0].outputs[0]
    deltas = list(pair.stream(PROMPTS[0], GREEDY))
    assert "".join(d.text for d in deltas) == wanted.text
    assert [t for d in deltas for t in d.token_ids] == wanted.token_ids
    assert max(len(d.token_ids) for d in deltas) > 1
    assert deltas[-1].finish_reason == wanted.finish_reason


def test_logprobs_of_accepted_tokens(plain, pair):
    params = GREEDY.clone(logprobs=2)
    a, b = (llm.generate(PROMPTS[0], params)[0].outputs[0] for llm in (plain, pair))
    assert len(b.logprobs) == len(b.token_ids)
    for x, y in zip(a.logprobs, b.logprobs):
        assert [l.decoded_token for l in x.values()] == [l.decoded_token for l in y.values()]
        assert [l.logprob for l in x.values()] == pytest.approx([l.logprob for l in y.values()], abs=1e-3)


def test_a_draft_with_another_vocabulary_is_refused(tmp_path):
    folder = shutil.copytree(DRAFT, tmp_path / "stranger")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    a, b = [token for token, i in vocab.items() if i in (300, 301)]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError) as error:
        LLM("quintet-moe", device="cpu", speculative_config=PAIR | {"model": str(folder)})
    message = str(error.value)
    assert "the draft stranger has another vocabulary than quintet-moe: token id 300 is" in message
    assert "take a draft with the model's own tokenizer" in message


def test_a_draft_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="'nobody' is neither a local folder nor a bundled model"):
        LLM("quintet-moe", device="cpu", speculative_config=PAIR | {"model": "nobody"})


def test_without_a_tokenizer_ids_are_enough():
    llm = LLM("quintet-moe", device="cpu", skip_tokenizer_init=True, speculative_config=PAIR)
    (out,) = llm.generate([[5, 6, 7, 8]], GREEDY.clone(max_tokens=8, ignore_eos=True))
    assert len(out.outputs[0].token_ids) == 8
