"""Request and Sequence: what is being generated; Chunk: which of its tokens run in this step.

Prefill, decode and verification differ only in the length of a chunk.
"""

from enum import IntEnum
from typing import Any, NamedTuple

from tinymoe.core.metrics import RequestMetrics
from tinymoe.core.params import SamplingParams


class Status(IntEnum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2  # waiting again, its pages are gone
    FINISHED = 3


class Request:
    """One prompt and its n sequences. `number` counts arrivals and breaks ties between equal priorities."""

    __slots__ = ("bad_word_ids", "cache_salt", "error", "final_only", "metrics", "num_cached_tokens", "number", "outbox", "params", "priority", "prompt", "prompt_logprobs", "prompt_token_ids",
                 "request_id", "seed", "sequences")  # fmt: skip

    def __init__(
        self,
        request_id: str,
        number: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        seed: int,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ):
        self.request_id = request_id
        self.number = number
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.seed = seed
        self.priority = priority
        self.cache_salt = cache_salt
        self.metrics = RequestMetrics()
        self.prompt_logprobs: list | None = None
        self.bad_word_ids: list[list[int]] = []
        self.error: str | None = None
        self.num_cached_tokens = 0
        self.sequences: list[Sequence] = []
        self.final_only = False  # whether outputs before the last are not even made
        self.outbox: Any = None  # deque that gets its outputs, or None: Engine.step returns them

    @property
    def finished(self) -> bool:
        return all(s.status is Status.FINISHED for s in self.sequences)


class Sequence:
    """One growing list of token ids of a request.

    num_computed_tokens: leading tokens whose KV is in the cache. The scheduler's one rule is to let it catch up
    with len(token_ids). row: its row in the block tables while it holds pages, else -1.
    num_drafts: how many tokens may be proposed for it in the coming step. draft_token_ids: those that run behind its own tokens
    in this step, to be verified; empty between steps.
    """

    __slots__ = ("acceptance", "block_keys", "cumulative_logprob", "draft_token_ids", "finish_reason", "index", "logprobs", "num_cached_tokens",
                 "num_computed_tokens", "num_drafts", "num_prompt_tokens", "request", "routed_experts", "row", "seed", "seq_id", "status",
                 "stop_reason", "text", "token_ids")  # fmt: skip

    def __init__(self, seq_id: int, request: Request, index: int = 0):
        self.seq_id = seq_id
        self.request = request
        self.index = index  # which of the request's n completions
        self.seed = (request.seed + index) % 2**63
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # of its last admission
        self.row = -1
        self.block_keys: list[bytes] = []  # chained hash of each full block, extended as tokens arrive
        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: list[dict] = []
        self.cumulative_logprob = 0.0
        self.routed_experts: Any = None  # int16 [tokens, L, K] once finished, if the engine keeps them
        self.text: Any = None  # detokenizer state, if the engine has a tokenizer
        self.num_drafts = 0
        self.draft_token_ids: list[int] = []
        self.acceptance: Any = None  # how drafts have fared, if the engine speculates

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def forks(self) -> bool:
        """Whether the request's other completions still have to be split off from this one."""
        return self.index == 0 and len(self.request.sequences) < self.request.params.n

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key of its turn under policy "priority"; the first entry is dropped under "fcfs"."""
        return (self.request.priority, self.request.number, self.index)

    def __repr__(self):
        return f"Sequence({self.seq_id}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens} computed)"


class Chunk(NamedTuple):
    """Positions start..stop-1 of seq run in this step; the last one yields a token if `samples`. Positions behind the
    sequence's own tokens hold its drafts: then each of these, and the own token before them, yields one."""

    seq: Sequence
    start: int
    stop: int
    samples: bool
