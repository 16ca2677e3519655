"""What a caller gets back. Names follow vLLM."""

from dataclasses import dataclass, field
from typing import Any

from tinymoe.core.metrics import RequestMetrics


@dataclass(slots=True)
class Logprob:
    """Natural-log probability of one token under the model (before temperature and masks), and its rank from 1."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion so far.

    finish_reason: None while running, else "stop", "length", "abort" or "error".
    stop_reason: the stop string or stop token id that ended it, None for eos.
    logprobs: per output token {token id: Logprob}, if asked for.
    routed_experts: int16 array [tokens that were run, L, K], -1 in dense layers, if the engine keeps them. The last
        sampled token was never run, so it has no row.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: Any = None


@dataclass(slots=True)
class RequestOutput:
    """State of one request after a step.

    num_cached_tokens: prompt tokens that came from the prefix cache. error: why a request with finish_reason "error"
    failed. prompt_logprobs: per prompt token {id: Logprob}, None for the first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None


@dataclass(slots=True)
class Delta:
    """What a stream adds: new text and token ids of completion `index`; finish_reason on its last delta."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
