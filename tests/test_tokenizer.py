"""The tokenizer of a folder, judged by transformers on the same folder."""

import json

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import KINDS, SPECIAL, TEXT, TRICKY, add_bos, byte_fallback, byte_level, save
from tokenizers import AddedToken, decoders

from tinymoe.core.model_config import ConfigError
from tinymoe.core.params import SamplingParams
from tinymoe.text import Tokenizer

TEXTS = [*TEXT, TRICKY, "", " ", "a<|eos|>b <|user|>", "12 + 30 = 42"]


def theirs(folder):
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def assert_same(folder, texts=TEXTS):
    """Everything the two offer in common; returns both."""
    ours, judge = Tokenizer(folder), theirs(folder)
    assert ours.vocab_size == len(judge)
    for name in ("bos", "eos", "pad"):
        assert getattr(ours, f"{name}_token_id") == getattr(judge, f"{name}_token_id")
    assert set(judge.all_special_ids) <= set(ours.all_special_ids)
    for text in texts:
        for special in (True, False):
            ids = judge.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids, skip_special_tokens=special) == judge.decode(
                ids, skip_special_tokens=special
            )
    return ours, judge


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: save(add_bos(make()), tmp_path_factory.mktemp(kind)) for kind, make in KINDS.items()}


@pytest.fixture(scope="module")
def pairs(folders):
    return {kind: (Tokenizer(folder), theirs(folder)) for kind, folder in folders.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_same_as_transformers(folders, kind):
    ours, _ = assert_same(folders[kind])
    assert ours.encode("fox")[0] == ours.bos_token_id
    assert ours.bos_token_id not in ours.encode("fox", add_special_tokens=False)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_random_ids_decode_alike(pairs, kind, data):
    ours, judge = pairs[kind]
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=30))
    skip = data.draw(st.booleans())
    assert ours.decode(ids, skip_special_tokens=skip) == judge.decode(ids, skip_special_tokens=skip)


def test_special_ids_are_those_that_decoding_skips(pairs):
    ours, judge = pairs["byte_level"]
    assert ours.all_special_ids == [
        i for i in range(ours.vocab_size) if judge.decode([i], skip_special_tokens=True) == ""
    ]
    assert [ours.decode([i], skip_special_tokens=False) for i in ours.all_special_ids] == SPECIAL


# Where a folder keeps its special tokens


def as_dict(content, **options):
    return {
        "content": content,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
        **options,
    }


def test_tokens_as_objects(tmp_path):
    eos = as_dict("<|user|>", __type="AddedToken")
    ours, _ = assert_same(save(byte_level(), tmp_path, eos_token=eos))
    assert ours.special_tokens["eos_token"] == "<|user|>"
    ours = Tokenizer(save(byte_level(), tmp_path, eos_token=as_dict("<|user|>")))  # older files
    assert ours.eos_token_id == ours.backend.token_to_id("<|user|>")


def test_no_special_tokens_at_all(tmp_path):
    folder = save(byte_level(), tmp_path, bos_token=None, eos_token=None, pad_token=None)
    ours, _ = assert_same(folder)
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (None, None, None)
    (folder / "tokenizer_config.json").unlink()
    assert Tokenizer(folder).encode("fox") == ours.encode("fox")


def test_special_tokens_map(tmp_path):
    folder = save(byte_level(), tmp_path, eos_token=None)
    body = {
        "eos_token": as_dict("<|assistant|>"),
        "pad_token": "<|user|>",
        "additional_special_tokens": ["<extra>"],
    }
    (folder / "special_tokens_map.json").write_text(json.dumps(body))
    ours, _ = assert_same(folder, [*TEXTS, "a<extra>b"])
    assert ours.special_tokens["eos_token"] == "<|assistant|>"


def test_special_tokens_map_yields_to_added_tokens_decoder(tmp_path):
    """Newer folders carry both; the older file is not read then."""
    folder = save(byte_level(), tmp_path, added_tokens_decoder={"2": as_dict("<|eos|>", special=True)})
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|assistant|>"}))
    ours, _ = assert_same(folder)
    assert ours.special_tokens["eos_token"] == "<|eos|>"


@pytest.mark.parametrize("extra", [
    {"additional_special_tokens": ["<x>", "<y>"]},
    {"extra_special_tokens": ["<x>", "<y>"]},
    {"extra_special_tokens": {"image_token": "<x>", "audio_token": "<y>"}},
    {"image_token": "<x>", "tool_token": "<y>"},
    {"added_tokens_decoder": {"421": as_dict("<y>", special=False), "420": as_dict("<x>", special=True, lstrip=True)}},
    {"added_tokens_decoder": {"4": as_dict("<|assistant|>", special=False)}},
    {"unk_token": "<x>", "eos_token": "<y>"},
    {"split_special_tokens": True},
], ids=str)  # fmt: skip
def test_tokens_that_only_the_config_knows(tmp_path, extra):
    assert_same(save(byte_level(), tmp_path, **extra), [*TEXTS, "a <x> b<y>c<x>"])


def test_saved_truncation_and_padding_are_not_applied(tmp_path):
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64, pad_id=0, pad_token="<|pad|>")
    ours, _ = assert_same(save(backend, tmp_path))
    assert len(ours.encode(TEXT[0])) > 4


def test_spaces_before_punctuation_stay(tmp_path):
    ours, judge = assert_same(save(byte_level(), tmp_path, clean_up_tokenization_spaces=True))
    text = "it 's ok , no ? n't ."
    assert ours.decode(ours.encode(text)) == text == judge.decode(judge.encode(text))


# Errors


def test_missing_or_broken_files(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"has no tokenizer.json, the only tokenizer format read here: .*skip_tokenizer_init=True",
    ):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(
        ConfigError, match=r"tokenizer.json is not a tokenizer the tokenizers library can read: "
    ):
        Tokenizer(tmp_path)
    folder = save(byte_level(), tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config.json is not valid JSON: "):
        Tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"tokenizer_config.json must hold a JSON object, got list"):
        Tokenizer(folder)


@pytest.mark.parametrize("text", ["a\ud800", b"abc", None, 5], ids=repr)
def test_what_is_not_text_is_refused(pairs, text):
    ours, _ = pairs["byte_level"]
    with pytest.raises(ConfigError, match="text to encode must be a string of valid Unicode, got "):
        ours.encode(text)


def test_a_decoder_that_cannot_stream_still_encodes(tmp_path):
    backend = byte_level()
    backend.decoder = decoders.WordPiece()
    ours = Tokenizer(save(backend, tmp_path))
    assert ours.decode(ours.encode("fox"))
    with pytest.raises(ConfigError, match="cannot be decoded token by token"):
        ours.text_state(SamplingParams())


# Helpers of the engine


def test_text_state_streams_with_the_requests_options(pairs):
    ours, _ = pairs["byte_level"]
    ids = [*ours.encode("The quick", add_special_tokens=False), ours.eos_token_id]
    for skip, text in ((True, "The quick"), (False, "The quick<|eos|>")):
        state = ours.text_state(SamplingParams(skip_special_tokens=skip))
        assert [state.append(i, n) for n, i in enumerate(ids, 1)] == [None] * len(ids)
        state.finish()
        assert state.text == text == ours.decode(ids, skip_special_tokens=skip)


def test_detokenizer_continues_the_prompt(pairs):
    ours, _ = pairs["byte_fallback"]
    ids = ours.encode("The quick brown fox")
    detokenizer = ours.detokenizer(prompt_token_ids=ids[:3], skip_special_tokens=False)
    assert "".join(detokenizer.push([i]) for i in ids[3:]) == ours.decode(ids)[len(ours.decode(ids[:3])) :]


def test_decoded_tokens_join_inside_a_text(pairs):
    ours, _ = pairs["byte_fallback"]
    ids = ours.encode("The quick brown fox", add_special_tokens=False)
    assert "".join(map(ours.decoded_token, ids)) == " The quick brown fox"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram"])
def test_bad_words_cover_the_start_and_the_middle_of_a_text(pairs, kind):
    """However a text with the word is encoded, some banned sequence is in it."""
    ours, _ = pairs[kind]
    banned = ours.bad_word_ids(["fox", " lazy"])
    for text in ("fox", "the fox", "a lazy dog", "lazy"):
        ids = ours.encode(text, add_special_tokens=False)
        assert any(ids[i : i + len(b)] == b for b in banned for i in range(len(ids))), text
    assert len({tuple(b) for b in banned}) == len(banned)


def test_bad_words_are_not_banned_twice(tmp_path):
    """After a space the same tokens follow "▁": banning the shorter sequence is enough."""
    backend = byte_fallback()
    backend.add_tokens([AddedToken("fox")])
    ours = Tokenizer(save(backend, tmp_path))
    fox = ours.backend.token_to_id("fox")
    assert ours.bad_word_ids(["fox", "fox"]) == [[fox]]


def test_a_bad_word_without_tokens_is_an_error(tmp_path):
    backend = byte_level()
    backend.normalizer = None
    ours = Tokenizer(save(backend, tmp_path))
    ours.encode = lambda *a, **k: []
    with pytest.raises(ConfigError, match=r"bad_words: '\\t' has no tokens in this tokenizer"):
        ours.bad_word_ids(["\t"])
