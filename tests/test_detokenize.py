"""Incremental detokenising: whatever the ids and however they arrive, the deltas join to the whole decode."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import KINDS, TEXT, TRICKY
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models

from tinymoe.core.model_config import ConfigError
from tinymoe.text.detokenize import Decoding, IncrementalDetokenizer, byte_alphabet


@pytest.fixture(scope="module")
def made():
    return {kind: make() for kind, make in KINDS.items()}


def stream(backend, ids, cuts=None, **kw):
    """Deltas, the flush last. cuts: lengths of the pushes (default: one id each)."""
    detokenizer, deltas, start = IncrementalDetokenizer(Decoding(backend), **kw), [], 0
    for n in cuts or [1] * len(ids):
        deltas.append(detokenizer.push(ids[start : start + n]))
        start += n
    return [*deltas, detokenizer.push(ids[start:]), detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_random_ids_join_to_the_whole_decode(made, kind, data):
    """Specials, ids without a token, broken UTF-8, everything."""
    backend = made[kind]
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() + 3), max_size=40))
    skip = data.draw(st.booleans())
    cuts = data.draw(st.none() | st.lists(st.integers(0, 5), max_size=20))
    deltas = stream(backend, ids, cuts, skip_special_tokens=skip)
    assert "".join(deltas) == backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=30) | st.sampled_from([*TEXT, TRICKY]))
@settings(max_examples=50, deadline=None)
def test_any_text_streams(made, kind, text):
    ids = made[kind].encode(text).ids
    assert "".join(stream(made[kind], ids)) == made[kind].decode(ids)


@given(raw=st.binary(max_size=60))
@settings(max_examples=200, deadline=None)
def test_random_bytes_are_held_only_while_a_character_is_open(made, raw):
    """One byte a token: every delta is what Python's decoder could know at that point."""
    backend = made["byte_level"]
    spelled = {b: c for c, b in byte_alphabet().items()}
    ids = [backend.token_to_id(spelled[b]) for b in raw]
    shown = ""
    for n, delta in enumerate(stream(backend, ids)[: len(ids)], 1):
        shown += delta
        known = raw[:n].decode(errors="replace")
        assert known.startswith(shown)
        # One open character; two marks only for ED A0..BF, a surrogate, which Python refuses at its third byte.
        assert known[len(shown) :] in ("", "\ufffd", "\ufffd\ufffd" if raw[n - 2] == 0xED else "")
    assert "".join(stream(backend, ids)) == backend.decode(ids) == raw.decode(errors="replace")


@given(
    runs=st.lists(
        st.binary(max_size=6) | st.sampled_from(["é".encode(), "👍🏽".encode(), b"\n"]), max_size=8
    ),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_byte_fallback_runs(made, runs, data):
    """A run of <0xNN> tokens is valid as a whole or not at all, so it waits for its end; nothing else does."""
    backend, ids = made["byte_fallback"], []
    plain = [backend.token_to_id(t) for t in ("▁", "a", "e", "▁T")]
    for run in runs:
        ids += [backend.token_to_id(f"<0x{b:02X}>") for b in run]
        ids += data.draw(st.lists(st.sampled_from(plain), max_size=2))
    deltas, shown = stream(backend, ids), ""
    assert "".join(deltas) == backend.decode(ids)
    for n, delta in enumerate(deltas[: len(ids)], 1):
        shown += delta
        if ids[n - 1] in plain:
            assert shown == backend.decode(ids[:n])


def test_a_bad_byte_spoils_its_run(made):
    """The case that a naive stream gets wrong: it would have shown "é" already."""
    ids = [made["byte_fallback"].token_to_id(t) for t in ("a", "<0xC3>", "<0xA9>", "<0xFF>", "a")]
    assert stream(made["byte_fallback"], ids) == ["a", "", "", "", "\ufffd\ufffd\ufffda", "", ""]


def test_emoji_comes_when_it_is_whole(made):
    ids = made["byte_level"].encode("𝔘!").ids
    assert len(ids) == 5
    assert stream(made["byte_level"], ids) == ["", "", "", "𝔘", "!", "", ""]
    assert stream(made["byte_level"], ids[:3]) == ["", "", "", "", "\ufffd"]


# With a prompt


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_output_goes_on_where_the_prompt_was_certain(made, kind, data):
    backend = made[kind]
    ids = st.lists(st.integers(0, backend.get_vocab_size() - 1), max_size=15)
    prompt, output = data.draw(ids), data.draw(ids)
    text = "".join(stream(backend, output, prompt_token_ids=prompt))
    certain = "".join(stream(backend, prompt)[:-1])
    assert certain + text == backend.decode(prompt + output)


def test_prompt_gives_context(made):
    byte_fallback, byte_level = made["byte_fallback"], made["byte_level"]
    a, space_t = (byte_fallback.token_to_id(t) for t in ("a", "▁T"))
    assert "".join(stream(byte_fallback, [space_t])) == "T"
    assert "".join(stream(byte_fallback, [space_t], prompt_token_ids=[a])) == " T"
    half = byte_level.encode("𝔘").ids
    assert "".join(stream(byte_level, half[2:], prompt_token_ids=half[:2])) == "𝔘"


# Decoders


def spelling(*tokens, decoder):
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    backend.decoder = decoder
    return backend


TOKENS = [
    "a",
    "▁",
    "▁▁b",
    "",
    "▁c▁",
    "<0x41>",
    "<0xC3>",
    "<0xA9>",
    "<0x20>",
    " ",
    "é",
    "é x",
    "##d",
    "<0xZZ>",
]
GEMMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


@pytest.mark.parametrize("decoder", [
    None, decoders.ByteLevel(), decoders.Metaspace(), decoders.Metaspace(prepend_scheme="never"),
    decoders.Metaspace(prepend_scheme="first"), decoders.Sequence([decoders.Metaspace(), decoders.Fuse()]),
    decoders.Sequence(GEMMA), decoders.Sequence([*GEMMA, decoders.Strip(" ", 1, 0)]), decoders.Sequence([*GEMMA, decoders.Strip(" ", 3, 0)]),
    decoders.Sequence([decoders.Sequence([decoders.ByteFallback()]), decoders.Replace("▁c", "|")]),
    decoders.Sequence([decoders.ByteLevel(), decoders.Replace("x", "y"), decoders.Strip("▁", 2, 0)]),
], ids=lambda d: "none" if d is None else d.__getstate__().decode())  # fmt: skip
@given(ids=st.lists(st.integers(0, len(TOKENS) - 1), max_size=12))
@settings(max_examples=50, deadline=None)
def test_every_known_decoder(decoder, ids):
    backend = spelling(*TOKENS, decoder=decoder)
    assert "".join(stream(backend, ids)) == backend.decode(ids)


@pytest.mark.parametrize("decoder", [
    decoders.WordPiece(), decoders.CTC(), decoders.BPEDecoder(), decoders.Sequence([decoders.Replace(Regex("▁+"), " ")]),
    decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]), decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
    decoders.Sequence([decoders.Strip(" ", 1, 0)]), decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
], ids=lambda d: d.__getstate__().decode())  # fmt: skip
def test_decoders_that_cannot_stream_are_refused(decoder):
    decoding = Decoding(spelling("a", decoder=decoder))
    with pytest.raises(
        ConfigError, match=r"cannot be decoded token by token; known: .*skip_tokenizer_init=True"
    ):
        IncrementalDetokenizer(decoding)


def test_special_tokens_can_be_shown(made):
    ids = [made["byte_level"].token_to_id(t) for t in ("<|bos|>", "a", "<|eos|>")]
    assert "".join(stream(made["byte_level"], ids)) == "a"
    assert "".join(stream(made["byte_level"], ids, skip_special_tokens=False)) == "<|bos|>a<|eos|>"


def test_added_tokens_that_are_not_special_stay(made):
    backend = KINDS["byte_level"]()
    backend.add_tokens([AddedToken("<tool>", special=False)])
    ids = backend.encode("a<tool>b").ids
    assert backend.token_to_id("<tool>") in ids
    assert "".join(stream(backend, ids)) == "a<tool>b"


def test_a_token_alone(made):
    def alone(kind, token):
        return Decoding(made[kind]).alone(made[kind].token_to_id(token))

    assert alone("byte_level", "Ġ") == " "
    assert alone("byte_level", "Ã") == "\ufffd"
    assert alone("byte_fallback", "▁T") == " T"
    assert alone("byte_fallback", "<0x0A>") == "\n"
    assert alone("unigram", "▁") == " "
    assert alone("byte_level", "<|eos|>") == "<|eos|>"
    assert Decoding(made["byte_level"]).alone(10_000) == ""


def test_each_id_is_looked_at_once(made):
    """O(1) per id: a push looks at its own ids only, also when nothing can be shown for thousands of tokens."""
    seen = []

    class Watched(dict):
        def __missing__(self, token_id):
            seen.append(token_id)
            return made["byte_level"].id_to_token(token_id)

    decoding = Decoding(made["byte_level"])
    decoding.tokens = Watched()
    ids = [made["byte_level"].token_to_id("Ģ")] * 3000  # byte 0x80, never a character
    detokenizer = IncrementalDetokenizer(decoding)
    assert "".join([*(detokenizer.push([i]) for i in ids), detokenizer.finish()]) == "\ufffd" * 3000
    assert seen == ids
