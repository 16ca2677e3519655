"""SamplingParams: how one request wants its tokens chosen and when it stops. Names and defaults follow vLLM."""

import math
import operator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tinymoe.core.model_config import ConfigError, brief, require

GREEDY_BELOW = 1e-5  # temperatures under this mean exact argmax, as in vLLM
MAX_LOGPROBS = 1000


def _as_tuple(value: Any, what: str, kind: type) -> tuple:
    if value is None:
        return ()
    if isinstance(value, kind) and not isinstance(value, (list, tuple)):
        value = (value,)
    require(
        isinstance(value, (list, tuple, set, frozenset)),
        f"{what} must be a list of {kind.__name__}, got {brief(value)}",
    )
    out = tuple(value)
    for item in out:
        ok = isinstance(item, kind) and not isinstance(item, bool)
        require(ok, f"{what} must hold {kind.__name__} only, got {brief(item)}")
    return out


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping options of one request.

    n: completions per prompt (they share the prompt's KV pages).
    temperature: 0 is exact greedy decoding. top_p in (0, 1], top_k 0 or -1 for off, min_p in [0, 1].
    seed: noise is keyed by (seed + completion index, position), so a seeded request does not depend on its
        neighbours; None takes a seed derived from the engine's.
    stop: strings that end the text; stop_token_ids: ids that end it (the id is kept in token_ids).
    max_tokens: None means up to the model's length. min_tokens: eos and stop ids are banned before it.
    logprobs / prompt_logprobs: how many most likely tokens to report beside the chosen one; -1 is not supported.
    logit_bias: {token id: value added}. bad_words: strings that must not appear.
    ignore_eos: generate on through eos.
    num_speculative_tokens: at most so many tokens are proposed per step for this request; 0: none, None: what the engine's
        speculative_config says.

    Raises ConfigError naming the option for anything out of range; an unknown keyword raises TypeError.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    num_speculative_tokens: int | None = None

    def __post_init__(self):
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  (frozen dataclass)
        put("stop", _as_tuple(self.stop, "stop", str))
        put("stop_token_ids", _as_tuple(self.stop_token_ids, "stop_token_ids", int))
        put("bad_words", _as_tuple(self.bad_words, "bad_words", str))
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", _as_tuple(self.allowed_token_ids, "allowed_token_ids", int))
            require(
                len(self.allowed_token_ids) > 0,
                "allowed_token_ids must not be empty; use None for no restriction",
            )
        for name in ("n", "top_k", "min_tokens"):
            value = getattr(self, name)
            require(
                isinstance(value, int) and not isinstance(value, bool),
                f"{name} must be an int, got {brief(value)}",
            )
        floats = (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            value = getattr(self, name)
            require(isinstance(value, bool), f"{name} must be True or False, got {brief(value)}")
        for name in floats:
            value = getattr(self, name)
            ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            require(ok, f"{name} must be a finite number, got {brief(value)}")
        require(self.n >= 1, f"n must be at least 1, got {self.n}")
        require(self.temperature >= 0, f"temperature must be 0 (greedy) or positive, got {self.temperature}")
        require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        require(self.top_k >= -1, f"top_k must be 0 or -1 (off) or positive, got {self.top_k}")
        require(0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p}")
        require(
            self.repetition_penalty > 0, f"repetition_penalty must be positive, got {self.repetition_penalty}"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            require(-2 <= getattr(self, name) <= 2, f"{name} must be in [-2, 2], got {getattr(self, name)}")
        if self.seed is not None:
            ok = isinstance(self.seed, int) and not isinstance(self.seed, bool) and 0 <= self.seed < 2**63
            require(ok, f"seed must be None or an int in 0..2^63-1, got {brief(self.seed)}")
        value = self.max_tokens
        ok = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)
        require(ok, f"max_tokens must be None or an int of at least 1, got {brief(value)}")
        require(self.min_tokens >= 0, f"min_tokens must not be negative, got {self.min_tokens}")
        require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            ok = value is None or (
                isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_LOGPROBS
            )
            require(ok, f"{name} must be None or 0..{MAX_LOGPROBS}, got {brief(value)}")
        value = self.num_speculative_tokens
        ok = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)
        require(ok, f"num_speculative_tokens must be None or an int of at least 0, got {brief(value)}")
        require(all(self.stop), "stop strings must not be empty")
        require(all(self.bad_words), "bad_words must not be empty strings")
        require(
            self.detokenize or not (self.stop or self.bad_words),
            "stop and bad_words are strings: they need detokenize=True",
        )
        if self.logit_bias is not None:
            require(
                isinstance(self.logit_bias, dict), f"logit_bias must be a dict, got {brief(self.logit_bias)}"
            )
            try:
                bias = {operator.index(k): float(v) for k, v in self.logit_bias.items()}
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"logit_bias must map token ids (ints) to numbers: {brief(error)}"
                ) from error
            require(all(math.isfinite(v) for v in bias.values()), "logit_bias values must be finite")
            put("logit_bias", bias)

    @cached_property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @cached_property
    def heat(self) -> float:
        """The temperature, 0 if it means argmax."""
        return 0.0 if self.greedy else self.temperature

    @cached_property
    def plain(self) -> bool:
        """Whether a token is drawn from logits and temperature alone, and nothing is told about it but the token."""
        edited = self.logit_bias or self.allowed_token_ids is not None or self.bad_words or self.min_tokens
        penalised = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        cut = not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
        return not (edited or penalised or cut or self.logprobs is not None)

    def clone(self, **changes: Any) -> "SamplingParams":
        """A copy with some options replaced, validated again."""
        return replace(self, **changes)
