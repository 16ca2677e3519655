"""Stop strings and the growing text of a sequence, against a search over the whole text, character by character."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import byte_fallback, byte_level
from tokenizers import Tokenizer, decoders, models

from tinymoe.core.params import SamplingParams
from tinymoe.text.detokenize import Decoding
from tinymoe.text.stop import StopChecker, TextState

TOKENS = ["a", "b", "c", "ab", "ba", "aab", "abcab", "cc", ""]
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple)
IDS = st.lists(st.integers(0, len(TOKENS) - 1), max_size=14)


def letters():
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(TOKENS)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Decoding(backend)


LETTERS = letters()


def judge(pieces, stop, min_tokens=0):
    """(end in the text, stop string, number of pieces) of the first stop string completed, or None."""
    text, owner = "".join(pieces), [n for n, piece in enumerate(pieces, 1) for _ in piece]
    for end in range(1, len(text) + 1):
        for s in stop:
            if text[:end].endswith(s) and owner[end - 1] >= min_tokens:
                return end, s, owner[end - 1]
    return None


@given(
    st.lists(st.text("ab", max_size=5), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
)
@settings(max_examples=250, deadline=None)
def test_checker_equals_the_search(pieces, stop):
    checker, want, before = StopChecker(tuple(stop)), judge(pieces, stop), 0
    for n, piece in enumerate(pieces, 1):
        peeked, found = checker.peek(piece), checker.feed(piece)
        assert peeked == found
        if want and n == want[2]:
            assert found == (want[0] - before, want[1])
            return
        assert found is None
        before += len(piece)
        text = "".join(pieces[:n])
        longest = max((k for s in stop for k in range(len(s)) if text.endswith(s[:k])), default=0)
        assert checker.held == longest


def run(decoding, params, ids, prompt=()):
    """What an engine does: append until something fires, then finish. (texts shown on the way, fired, final, tokens)"""
    state, shown = TextState(decoding, params, prompt), []
    for n, token in enumerate(ids, 1):
        fired = state.append(token, n)
        shown.append(state.text)
        if fired is not None:
            break
    else:
        n, fired = len(ids), state.finish()
    state.finish()
    return shown, fired, state.text, n


@given(IDS, STOPS, st.booleans(), st.integers(0, 5))
@settings(max_examples=250, deadline=None)
def test_text_equals_the_search(ids, stop, include, min_tokens):
    params = SamplingParams(stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens)
    shown, fired, text, used = run(LETTERS, params, ids)
    pieces = [TOKENS[i] for i in ids]
    want = judge(pieces, stop, min_tokens)
    if want is None:
        assert (fired, text) == (None, "".join(pieces))
    else:
        end, which, count = want
        assert (fired, used) == (which, count)
        assert text == "".join(pieces)[: end if include else end - len(which)]
    # A stream only ever adds, and keeps back no more than a beginning of a stop string.
    for n, (earlier, later) in enumerate(zip(shown, [*shown[1:], text])):
        assert later.startswith(earlier)
        so_far = "".join(pieces[: n + 1])
        held = so_far.removeprefix(earlier)
        if n + 1 < used or want is None:
            assert held == "" or (not include and any(s.startswith(held) and s != held for s in stop))


def ids_of(backend, text):
    return backend.encode(text).ids


@pytest.mark.parametrize(("stop", "include", "text", "fired"), [
    (("wor",), False, "Hello ", "wor"),
    (("wor",), True, "Hello wor", "wor"),
    (("lo w", "wor"), False, "Hel", "lo w"),  # complete first wins, whatever the order of the list
    (("wor", "lo w"), False, "Hel", "lo w"),
    (("llo", "lo"), False, "He", "llo"),  # complete at once: the first of the list
    (("lo", "llo"), False, "Hel", "lo"),
    (("xyz",), False, "Hello world", None),
    (("world!",), False, "Hello world", None),  # kept back to the end, then released
])  # fmt: skip
def test_by_hand(stop, include, text, fired):
    backend = byte_level()
    params = SamplingParams(stop=stop, include_stop_str_in_output=include)
    _, got, final, _ = run(Decoding(backend), params, ids_of(backend, "Hello world"))
    assert (final, got) == (text, fired)


def test_stop_inside_an_emoji_is_not_seen_early():
    """Half a character is nothing yet; a stop string of several code points works across tokens."""
    backend = byte_level()
    ids = ids_of(backend, "ok 👍🏽 then")
    shown, fired, text, _ = run(Decoding(backend), SamplingParams(stop=("🏽",)), ids)
    assert (fired, text) == ("🏽", "ok 👍")
    assert all("\ufffd" not in s for s in shown)


# Byte fallback: "\n" is the token <0x0A>, which may still be spoiled by the next byte


def fallback_ids(backend, *tokens):
    return [backend.token_to_id(t) for t in tokens]


def test_newline_of_byte_fallback_stops_at_once():
    backend = byte_fallback()
    ids = fallback_ids(backend, "a", "<0x0A>", "a")
    shown, fired, text, used = run(Decoding(backend), SamplingParams(stop=("\n",)), ids)
    assert (fired, text, used, shown) == ("\n", "a", 2, ["a", "a"])
    assert run(Decoding(backend), SamplingParams(stop=("\n",), include_stop_str_in_output=True), ids)[1:] == (
        "\n",
        "a\n",
        2,
    )


def test_pending_bytes_are_not_shown():
    backend = byte_fallback()
    ids = fallback_ids(backend, "a", "<0x0A>", "<0xFF>", "a")
    shown, fired, text, _ = run(Decoding(backend), SamplingParams(stop=("\n\n",)), ids)
    assert (shown, fired, text) == (["a", "a", "a", "a\ufffd\ufffda"], None, backend.decode(ids))
    assert run(Decoding(backend), SamplingParams(stop=("\n",), min_tokens=3), ids)[1:3] == (
        None,
        backend.decode(ids),
    )


def test_min_tokens_lets_an_early_stop_string_pass():
    ids = [TOKENS.index(t) for t in ("a", "b", "a", "b", "c")]
    assert run(LETTERS, SamplingParams(stop=("ab",), min_tokens=3), ids)[1:] == ("ab", "ab", 4)
    assert run(LETTERS, SamplingParams(stop=("ab",), min_tokens=2), ids)[1:] == ("ab", "", 2)
    assert run(LETTERS, SamplingParams(stop=("bab",), min_tokens=3), ids)[1:] == (
        "bab",
        "a",
        4,
    )  # begun before, completed after
    ids = [TOKENS.index("a")] * 3  # the second "aa" overlaps the one that had to pass
    assert run(LETTERS, SamplingParams(stop=("aa",), min_tokens=3), ids)[1:] == ("aa", "a", 3)


def test_finish_can_reveal_a_stop_string():
    """The last allowed token opens a character; the text ends with U+FFFD, and that is what was asked to stop at."""
    backend = byte_level()
    ids = ids_of(backend, "a𝔘")[:2]
    assert run(Decoding(backend), SamplingParams(stop=("\ufffd",)), ids)[1:3] == ("\ufffd", "a")


def test_stop_ids_leave_no_text_unless_included():
    a, b = TOKENS.index("a"), TOKENS.index("b")
    for include, text in ((False, "a"), (True, "ab")):
        state = TextState(LETTERS, SamplingParams(include_stop_str_in_output=include, stop=("ac",)))
        assert state.append(a, 1) is None
        assert state.append(b, 2, ends=True) is None
        assert state.finish() is None
        assert state.text == text


def test_nothing_changes_after_the_end():
    state = TextState(LETTERS, SamplingParams(stop=("b",)))
    assert [state.append(TOKENS.index(t), n) for n, t in enumerate(("a", "ba"), 1)] == [None, "b"]
    assert state.append(TOKENS.index("c"), 3) is None
    assert state.finish() is None
    assert state.text == "a"


def test_without_detokenising_there_is_no_text():
    state = TextState(LETTERS, SamplingParams(detokenize=False))
    assert state.append(0, 1) is None
    assert state.finish() is None
    assert state.text == ""


def test_prompt_gives_context():
    backend = byte_fallback()
    a, space_t = fallback_ids(backend, "a", "▁T")
    assert run(Decoding(backend), SamplingParams(), [space_t], prompt=[a])[2] == " T"
    assert run(Decoding(backend), SamplingParams(), [space_t])[2] == "T"
