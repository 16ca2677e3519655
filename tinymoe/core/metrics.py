"""Counters that are always on: plain integers and clock readings, no tensors."""

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of time.monotonic()."""

    arrival_time: float = field(default_factory=time.monotonic)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0
    num_preemptions: int = 0

    def count_tokens(self, tokens: int) -> None:
        """So many more tokens have come, now."""
        self.num_generation_tokens += tokens
        self.last_token_time = time.monotonic()
        if self.first_token_time is None:
            self.first_token_time = self.last_token_time

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first scheduled chunk."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def ttft(self) -> float | None:
        """Time to first token, seconds."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first, seconds."""
        if self.num_generation_tokens < 2 or self.last_token_time is None or self.first_token_time is None:
            return None
        return (self.last_token_time - self.first_token_time) / (self.num_generation_tokens - 1)


@dataclass(slots=True)
class EngineMetrics:
    """Totals since the engine started.

    draft_tokens were proposed, accepted_tokens of them kept. verify_steps checked drafts, for verifications sequences, and
    found verified_tokens tokens for them in verify_seconds (forward and sampling); what lies behind an end counts, too.
    drafts_at[i] and accepted_at[i] count the drafts at place i.
    """

    steps: int = 0
    requests: int = 0
    finished_requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    computed_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    peak_running: int = 0
    peak_blocks: int = 0
    schedule_seconds: float = 0.0
    draft_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    commit_seconds: float = 0.0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    verify_steps: int = 0
    verifications: int = 0
    verified_tokens: int = 0
    verify_seconds: float = 0.0
    drafts_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    _mark: float = 0.0

    def start(self) -> None:
        """Start the stopwatch of a step."""
        self._mark = time.perf_counter()

    def count_tokens(self, request: RequestMetrics, tokens: int) -> None:
        """So many more tokens of one request have come, now."""
        self.generation_tokens += tokens
        request.count_tokens(tokens)

    def count_drafts(self, drafted_at: list[int], accepted_at: list[int]) -> None:
        """drafted_at[k] sequences had k drafts verified; accepted_at[k] kept k of theirs."""
        self.draft_tokens += sum(k * n for k, n in enumerate(drafted_at))
        kept = sum(k * n for k, n in enumerate(accepted_at))
        self.accepted_tokens += kept
        self.verifications += sum(drafted_at)
        self.verified_tokens += kept + sum(accepted_at)
        for i in range(len(self.drafts_at)):  # drafts longer than i have an i-th place
            self.drafts_at[i] += sum(drafted_at[i + 1 :])
            self.accepted_at[i] += sum(accepted_at[i + 1 :])

    def lap(self, part: str) -> None:
        """Add the time since the last mark to `<part>_seconds`."""
        now = time.perf_counter()
        name = f"{part}_seconds"
        setattr(self, name, getattr(self, name) + now - self._mark)
        self._mark = now
