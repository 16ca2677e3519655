"""Everything that can be wrong with a request is found here, before it touches the engine."""

import operator
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from tinymoe.core.config import EngineConfig
from tinymoe.core.model_config import brief
from tinymoe.core.params import SamplingParams
from tinymoe.core.sequence import Request

_GOLDEN = 0x9E3779B97F4A7C15  # odd: request numbers map to well separated seeds


A_PROMPT = "a prompt is text (a string), a list of token ids, or {'prompt_token_ids': [...]}"
UNORDERED_OR_BYTES = (bytes, bytearray, memoryview, set, frozenset)


class RequestError(ValueError):
    """A request was refused; nothing else was disturbed. The message says what to change."""


def check_id(request_id: str) -> None:
    """Raise RequestError unless it is a string."""
    if not isinstance(request_id, str):
        raise RequestError(f"request_id must be a string, got {brief(request_id)}")


class TextState(Protocol):
    """The growing text of one sequence; tinymoe.text.TextState."""

    @property
    def text(self) -> str: ...
    def append(self, token_id: int, num_output_tokens: int, *, ends: bool = False) -> str | None: ...
    def finish(self) -> str | None: ...


class Text(Protocol):
    """What the engine needs of a tokenizer; tinymoe.text.Tokenizer."""

    def encode(self, text: str) -> list[int]: ...
    def bad_word_ids(self, words: Seq[str]) -> list[list[int]]: ...
    def decoded_token(self, token_id: int) -> str: ...
    def text_state(self, params: SamplingParams, prompt_token_ids: list[int]) -> TextState: ...


class Intake:
    """Checks requests against the model's vocabulary, its length, and the size of the cache."""

    def __init__(
        self, config: EngineConfig, vocab_size: int, max_model_len: int, num_blocks: int, text: Text | None
    ):
        self.config = config
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.text = text
        self.count = 0

    def accept(
        self,
        request_id: str,
        prompt: str | dict | Seq[int],
        params: SamplingParams,
        priority: int,
        cache_salt: str | None,
    ) -> Request:
        """A checked Request, or RequestError with the reason."""
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be a SamplingParams, got {type(params).__name__}")
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise RequestError(f"priority must be an int (lower runs earlier), got {brief(priority)}")
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise RequestError(f"cache_salt must be a non-empty string or None, got {brief(cache_salt)}")
        text, ids = self._token_ids(prompt)
        self._check_ids("prompt", ids)
        self._check_params(params)
        self._check_fit(len(ids), params)
        seed = params.seed
        if seed is None:
            seed = ((self.config.seed + self.count + 1) * _GOLDEN) % 2**63
        request = Request(
            request_id, self.count, ids, params, seed, prompt=text, priority=priority, cache_salt=cache_salt
        )
        if params.bad_words and self.text is not None:
            request.bad_word_ids = self.text.bad_word_ids(params.bad_words)
        return request

    def _token_ids(self, prompt: str | dict | Seq[int]) -> tuple[str | None, list[int]]:
        text, ids = None, prompt
        if isinstance(prompt, dict):
            known = {"prompt", "prompt_token_ids"}
            if not prompt.keys() & known or prompt.keys() - known:
                raise RequestError(
                    f"a prompt dict has 'prompt' or 'prompt_token_ids', got keys {brief(sorted(map(str, prompt)))}"
                )
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if not (isinstance(text, str) or (text is None and ids is not None)):
                raise RequestError(
                    f"'prompt' must be text (a string), got {brief(text)}: token ids are 'prompt_token_ids'"
                )
        elif isinstance(prompt, str):
            text, ids = prompt, None
        if ids is None and text is not None:
            if self.text is None:
                raise RequestError(
                    "a text prompt needs a tokenizer: give {'prompt_token_ids': [...]} instead"
                )
            ids = self._encode(text)
        ids = _integers(ids)
        if not ids:
            raise RequestError("the prompt is empty: it needs at least one token")
        return text, ids

    def _encode(self, text: str) -> list[int]:
        assert self.text is not None
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt {brief(text)} is not valid Unicode ({error.reason} at {error.start}): decode its bytes with "
                "errors='replace'"
            ) from error
        return self.text.encode(text)

    def _check_ids(self, what: str, ids: Seq[int]) -> None:
        bad = [i for i in ids if not 0 <= i < self.vocab_size]
        if bad:
            raise RequestError(f"{what} has token ids outside 0..{self.vocab_size - 1}: {bad[:5]}")

    def _check_params(self, params: SamplingParams) -> None:
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", list(params.logit_bias or ()))
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        if params.n > self.config.max_num_seqs:
            raise RequestError(
                f"n ({params.n}) exceeds max_num_seqs ({self.config.max_num_seqs}): lower n or raise max_num_seqs"
            )
        most = self.config.speculation.num_speculative_tokens if self.config.speculation else 0
        if (params.num_speculative_tokens or 0) > most:
            raise RequestError(
                f"num_speculative_tokens ({params.num_speculative_tokens}) exceeds the engine's ({most}): lower it, or raise "
                "it in the engine's speculative_config"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self.vocab_size:
                raise RequestError(f"{name} ({value}) exceeds the vocabulary ({self.vocab_size}): lower it")
        if self.text is None and (params.stop or params.bad_words):
            raise RequestError(
                "stop strings and bad_words need a tokenizer: use stop_token_ids or logit_bias instead"
            )

    def _check_fit(self, prompt_tokens: int, params: SamplingParams) -> None:
        limit = self.max_model_len
        if prompt_tokens >= limit:
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens and leaves no room for output: max_model_len is {limit}; "
                + (
                    "shorten the prompt or raise max_model_len"
                    if self.config.max_model_len
                    else "shorten the prompt (this is the most that the model was built for)"
                )
            )
        if prompt_tokens + params.min_tokens > limit:
            raise RequestError(
                f"prompt ({prompt_tokens}) + min_tokens ({params.min_tokens}) exceeds max_model_len ({limit}): "
                "shorten the prompt or lower min_tokens"
            )
        longest = min(limit, prompt_tokens + params.max_tokens) if params.max_tokens else limit
        needed = -(-(longest - 1) // self.config.block_size)  # the last token is never run, so it needs no KV
        if needed > self.num_blocks:
            raise RequestError(
                f"the request can never fit: {longest} tokens (prompt {prompt_tokens}, max_tokens {params.max_tokens}) need "
                f"{needed} blocks of {self.config.block_size}, the cache has {self.num_blocks}; lower max_tokens or raise "
                "num_blocks"
            )


def split_prompts(prompts: Any) -> list[Any]:
    """The prompts of one call, which brings one prompt or an ordered collection of them; each is checked by `accept`."""
    if isinstance(prompts, (str, dict)) or getattr(prompts, "ndim", None) == 1:
        return [prompts]
    if isinstance(prompts, UNORDERED_OR_BYTES) or not _is_iterable(prompts):
        raise RequestError(
            f"prompts must be a prompt or a list of prompts, got {_named(prompts)}: {A_PROMPT}"
        )
    items = list(prompts)
    return [items] if items and _is_integer(items[0]) else items


def _integers(value: Any) -> list[int]:
    if isinstance(value, (str, dict, *UNORDERED_OR_BYTES)) or not _is_iterable(value):
        raise RequestError(f"prompt_token_ids must be a list of ints, got {_named(value)}: {A_PROMPT}")
    if getattr(value, "ndim", 1) != 1:
        raise RequestError(
            f"prompt_token_ids must be a list of ints or a 1-d array, got an array of shape {tuple(value.shape)}: "
            "give the rows as a list of prompts"
        )
    items = value.tolist() if hasattr(value, "ndim") else list(value)
    if set(map(type, items)) <= {int}:  # the usual case, and half a million ids are not rare
        return items
    try:
        return [_integer(i) for i in items]
    except TypeError as error:
        raise RequestError(
            f"prompt_token_ids must be a list of ints, got {brief(value)}: {A_PROMPT}"
        ) from error


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not _is_integer(value):
        raise TypeError(f"not an int: {value!r}")
    return operator.index(value)  # refuses floats of every library, where int() would cut them


def _is_integer(value: Any) -> bool:
    """Of Python or of an array library; arrays of one number pass for integers too, but are none here."""
    return hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0


def _is_iterable(value: Any) -> bool:
    return hasattr(value, "__iter__") and getattr(value, "ndim", 1) != 0


def _named(value: Any) -> str:
    return f"{brief(value)} ({type(value).__name__})"
