"""Everything that can be wrong with a request is found here, before it touches the engine."""

import operator
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from tinymoe.core.config import EngineConfig
from tinymoe.core.params import SamplingParams
from tinymoe.core.sequence import Request

_GOLDEN = 0x9E3779B97F4A7C15  # odd: request numbers map to well separated seeds


class RequestError(ValueError):
    """A request was refused; nothing else was disturbed. The message says what to change."""


def check_id(request_id: str) -> None:
    """Raise RequestError unless it is a string."""
    if not isinstance(request_id, str):
        raise RequestError(f"request_id must be a string, got {request_id!r}")


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
            raise RequestError(f"priority must be an int (lower runs earlier), got {priority!r}")
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise RequestError(f"cache_salt must be a non-empty string or None, got {cache_salt!r}")
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
        text = None
        if isinstance(prompt, dict):
            known = {"prompt", "prompt_token_ids"}
            if not prompt.keys() & known or prompt.keys() - known:
                raise RequestError(
                    f"a prompt dict has 'prompt' or 'prompt_token_ids', got keys {sorted(prompt)}"
                )
            text = prompt.get("prompt")
            prompt = prompt.get("prompt_token_ids", text or [])
        if isinstance(prompt, str):
            if self.text is None:
                raise RequestError(
                    "a text prompt needs a tokenizer: give {'prompt_token_ids': [...]} instead"
                )
            text = prompt
            prompt = self.text.encode(prompt)
        try:
            ids = [_integer(i) for i in prompt]
        except TypeError as error:
            raise RequestError(f"prompt_token_ids must be a list of ints, got {prompt!r}") from error
        if not ids:
            raise RequestError("the prompt is empty: it needs at least one token")
        return text, ids

    def _check_ids(self, what: str, ids: Seq[int]) -> None:
        bad = [i for i in ids if not 0 <= i < self.vocab_size]
        if bad:
            raise RequestError(f"{what} has token ids outside 0..{self.vocab_size - 1}: {bad[:5]}")

    def _check_params(self, params: SamplingParams) -> None:
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", list(params.logit_bias or ()))
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        if params.n > self.config.max_num_seqs:
            raise RequestError(f"n ({params.n}) exceeds max_num_seqs ({self.config.max_num_seqs})")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self.vocab_size:
                raise RequestError(f"{name} ({value}) exceeds the vocabulary ({self.vocab_size})")
        if self.text is None and (params.stop or params.bad_words):
            raise RequestError(
                "stop strings and bad_words need a tokenizer: use stop_token_ids or logit_bias instead"
            )

    def _check_fit(self, prompt_tokens: int, params: SamplingParams) -> None:
        limit = self.max_model_len
        if prompt_tokens >= limit:
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens and leaves no room for output: max_model_len is {limit}"
            )
        if prompt_tokens + params.min_tokens > limit:
            raise RequestError(
                f"prompt ({prompt_tokens}) + min_tokens ({params.min_tokens}) exceeds max_model_len ({limit})"
            )
        longest = min(limit, prompt_tokens + params.max_tokens) if params.max_tokens else limit
        needed = -(-(longest - 1) // self.config.block_size)  # the last token is never run, so it needs no KV
        if needed > self.num_blocks:
            raise RequestError(
                f"the request can never fit: {longest} tokens (prompt {prompt_tokens}, max_tokens {params.max_tokens}) need "
                f"{needed} blocks of {self.config.block_size}, the cache has {self.num_blocks}; lower max_tokens or raise "
                "num_blocks"
            )


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError(f"not an int: {value!r}")
    return operator.index(value)  # refuses floats of every library, where int() would cut them
