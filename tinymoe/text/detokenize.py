"""Token ids to text, a few ids at a time, so that the pieces join to what decoding all ids at once gives.

Decoding prefixes and subtracting is quadratic and wrong where a later token changes earlier text: half a character,
a byte that spoils its neighbours, a space that only the first token loses. Instead the tokenizer's decoder
(tokenizer.json, "decoder") is run as a chain of small stages that remember what they may not say yet. Each stage
does what the `tokenizers` library does to the whole list (github.com/huggingface/tokenizers, decoders/).
"""

import codecs
import copy
import json
import re
from collections.abc import Callable, Iterable
from functools import cached_property, partial

import tokenizers

from tinymoe.core.model_config import ConfigError

SAMPLE_TOKEN = "x"  # stands before a token to show how it looks inside a text
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (Radford et al. 2019): printable bytes stand for themselves."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


class Spelling(dict[str, bytes]):
    """Token -> the bytes it spells, worked out once; a token with a foreign character stands for itself."""

    def __init__(self):
        self._alphabet = byte_alphabet()

    def __missing__(self, token: str) -> bytes:
        try:
            spelled = bytes([self._alphabet[c] for c in token])
        except KeyError:
            spelled = token.encode()
        self[token] = spelled
        return spelled


class Stage:
    """One decoder: `push` takes the next tokens and returns what is certain, `finish` returns the rest."""

    def push(self, parts: list[str]) -> list[str]:
        raise NotImplementedError

    def finish(self) -> list[str]:
        return []


class Join(Stage):
    """No decoder at all: tokens are joined with spaces."""

    def __init__(self):
        self._first = True

    def push(self, parts):
        out = [part if i == 0 and self._first else f" {part}" for i, part in enumerate(parts)]
        self._first = self._first and not parts
        return out


class ByteLevel(Stage):
    """Tokens spell bytes, and the bytes are UTF-8."""

    def __init__(self, spelling: Spelling):
        self._spelling = spelling
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, parts):
        return [self._utf8.decode(b"".join([self._spelling[part] for part in parts]))]

    def finish(self):
        return [self._utf8.decode(b"", final=True)]


class ByteFallback(Stage):
    """Tokens <0xNN> are bytes. A run of them is text only if all of it is UTF-8, else every byte becomes U+FFFD.

    So a run is held until another token ends it: one bad byte would take back the whole run.
    """

    def __init__(self):
        self._run = bytearray()

    def push(self, parts):
        out = []
        for part in parts:
            if match := BYTE_TOKEN.fullmatch(part):
                self._run.append(int(match[1], 16))
            else:
                out += [*self.finish(), part]
        return out

    def finish(self):
        run, self._run = self._run, bytearray()
        if not run:
            return []
        try:
            return [run.decode()]
        except UnicodeDecodeError:
            return ["\ufffd" * len(run)]

    def whole(self) -> str:
        """The run, if it is whole characters, else ""."""
        try:
            return self._run.decode()
        except UnicodeDecodeError:
            return ""


class Metaspace(Stage):
    """A visible mark stands for a space; the first token loses its marks if the encoder added one there."""

    def __init__(self, mark: str, drop_first: bool):
        self._mark = mark
        self._drop = drop_first

    def push(self, parts):
        out = [p.replace(self._mark, "" if i == 0 and self._drop else " ") for i, p in enumerate(parts)]
        self._drop = self._drop and not parts
        return out


class Replace(Stage):
    def __init__(self, old: str, new: str):
        self._old, self._new = old, new

    def push(self, parts):
        return [part.replace(self._old, self._new) for part in parts]


class Strip(Stage):
    """Removes at most `count` leading `content` characters of the whole text."""

    def __init__(self, content: str, count: int):
        self._content, self._left = content, count

    def push(self, parts):
        text = "".join(parts)
        while self._left and text:
            if text[0] != self._content:
                self._left = 0
                break
            text = text[1:]
            self._left -= 1
        return [text]


def stages(spec: dict | None) -> list[Callable[[], Stage]]:
    """Makers of the stages of a decoder in its tokenizer.json form. Raises ConfigError for one that cannot stream."""
    if spec is None:
        return [Join]
    flat, todo = [], [spec]
    while todo:
        item = todo.pop()
        if item["type"] == "Sequence":
            todo += reversed(item["decoders"])
        else:
            flat.append(item)
    makers, fused = [], False  # fused: token borders are gone
    for item in flat:
        kind, pattern = item["type"], item.get("pattern", {}).get("String", "")
        if kind == "Fuse":
            fused = True
        elif kind == "ByteLevel" and not fused:
            makers.append(partial(ByteLevel, Spelling()))
            fused = True
        elif kind == "ByteFallback" and not fused:
            makers.append(ByteFallback)
        elif kind == "Metaspace" and not fused:
            makers.append(partial(Metaspace, item["replacement"], item["prepend_scheme"] != "never"))
        elif kind == "Replace" and pattern and (len(pattern) == 1 or not fused):
            makers.append(partial(Replace, pattern, item["content"]))
        elif kind == "Strip" and fused and not item["stop"]:
            makers.append(partial(Strip, item["content"], item["start"]))
        else:
            raise ConfigError(
                f"tokenizer.json: decoder {json.dumps(item, ensure_ascii=False)} cannot be decoded token by token; known: "
                "ByteLevel, Metaspace, none, and Sequence of Replace (a string), ByteFallback, Fuse, Strip (at the start). "
                "Use skip_tokenizer_init=True and decode the token ids yourself"
            )
    return makers


class Tokens(dict[int, str | None]):
    """Id -> its string, looked up once; None if the tokenizer has none (vocabularies are often padded)."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend

    def __missing__(self, token_id: int) -> str | None:
        self[token_id] = token = self._backend.id_to_token(token_id)
        return token


class Decoding:
    """What detokenisers of one tokenizer share: the string of each id, which ids are special, the stages."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        self.tokens = Tokens(backend)
        self._alone: dict[int, str] = {}
        added = backend.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        self.special_ids = frozenset(i for i, token in added.items() if token.content in special)

    @cached_property
    def _makers(self) -> list[Callable[[], Stage]]:
        decoder = self._backend.decoder
        return stages(None if decoder is None else json.loads(decoder.__getstate__()))

    def chain(self) -> list[Stage]:
        """Fresh stages, for one sequence."""
        return [maker() for maker in self._makers]

    def alone(self, token_id: int) -> str:
        """One token as it looks inside a text; U+FFFD for part of a character, "" for an id without a token."""
        if token_id not in self._alone:
            token = self.tokens[token_id]
            parts = [SAMPLE_TOKEN] if token is None else [SAMPLE_TOKEN, token]
            self._alone[token_id] = _finish(self.chain(), parts).removeprefix(SAMPLE_TOKEN)
        return self._alone[token_id]


def _finish(chain: list[Stage], parts: list[str]) -> str:
    for stage in chain:
        parts = [*stage.push(parts), *stage.finish()]
    return "".join(parts)


class IncrementalDetokenizer:
    """Text of one sequence as its ids arrive; amortised O(1) per id.

    With a prompt the text is what decode(prompt + output) has beyond the prompt's certain text: the space before a
    first word stays, and a character that the prompt began is finished in the output.
    """

    def __init__(
        self, decoding: Decoding, *, skip_special_tokens: bool = True, prompt_token_ids: Iterable[int] = ()
    ):
        self._tokens = decoding.tokens
        self._skip = decoding.special_ids if skip_special_tokens else frozenset()
        self._chain = decoding.chain()
        self.push(prompt_token_ids)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that became certain with these ids. All that push and finish return, joined, is the text."""
        tokens, skip = self._tokens, self._skip
        parts = [token for i in token_ids if i not in skip and (token := tokens[i]) is not None]
        for stage in self._chain:
            parts = stage.push(parts)
        return "".join(parts)

    def pending(self) -> str:
        """Text that finish() would add and that is whole characters (only byte fallback holds such text)."""
        for i, stage in enumerate(self._chain):
            if isinstance(stage, ByteFallback) and (text := stage.whole()):
                parts = [text]
                for later in self._chain[i + 1 :]:
                    parts = copy.copy(later).push(parts)
                return "".join(parts)
        return ""

    def finish(self) -> str:
        """The rest: what was held back, as the whole decode shows it (U+FFFD for an unfinished character)."""
        return _finish(self._chain, [])
