"""The scheduler: which tokens run in the next step.

One rule, as in vLLM's V1 engine: there are no prefill and decode phases; every sequence catches up its computed tokens with
its tokens, within the step's token budget (continuous batching: Orca, OSDI 2022; chunked prefill: Sarathi-Serve, arXiv
2403.02310). When pages run out, the sequence whose turn is last gives up its pages and is recomputed later.
"""

import time
from bisect import insort
from collections.abc import Callable
from typing import NamedTuple

from tinymoe.cache.blocks import BlockManager
from tinymoe.core.config import EngineConfig
from tinymoe.core.metrics import EngineMetrics
from tinymoe.core.sequence import Chunk, Sequence, Status
from tinymoe.core.trace import WAIT_REASONS, Trace
from tinymoe.engine.spec.room import with_drafts

Order = Callable[[Sequence], tuple]
NO_BUDGET, NO_SEAT, NO_PAGES, PREEMPTED, TWIN = range(len(WAIT_REASONS))


class Candidate(NamedTuple):
    """A sequence that wants more than one token: where it starts, and how many it still needs."""

    seq: Sequence
    start: int
    need: int


class Scheduler:
    """Waiting line, running set, and the choice of chunks. Torch-free."""

    def __init__(self, config: EngineConfig, blocks: BlockManager, metrics: EngineMetrics, trace: Trace):
        self.config = config
        self.blocks = blocks
        self.metrics = metrics
        self.trace = trace
        self.waiting: list[Sequence] = []  # in order of turn
        self.running: list[Sequence] = []  # in order of admission
        self._waits: dict[Sequence, tuple[int, str]] = {}  # who stays in line in this step: why, and src
        skip = 0 if config.policy == "priority" else 1
        self._order: Order = lambda seq: seq.order[skip:]

    def add(self, seq: Sequence) -> None:
        """Join the waiting line."""
        insort(self.waiting, seq, key=self._order)
        if self.trace.on:
            self.trace.emit(
                "arrive",
                f"{__name__}:Scheduler.add#line-up",
                request=seq.request.number,
                seq=seq.seq_id,
                prompt_tokens=seq.num_prompt_tokens,
                priority=seq.request.priority,
            )

    def schedule(self) -> list[Chunk]:
        """Choose and reserve the chunks of one step; empty only when there is nothing to run.

        Running sequences come first (those that decode before those that still read their prompt), then the waiting
        line in order. Nobody is admitted in a step that had to preempt. Drafts get what tokens and pages are left.
        """
        self._waits = {}
        budget = self.config.max_num_batched_tokens
        chunks = self._plan(admit=True)
        for chunk in chunks:
            if chunk.seq.status is not Status.RUNNING:
                self._seat(chunk.seq)
        while not self.blocks.reserve(chunks := with_drafts(chunks, budget, self.blocks)):
            self._preempt(max(self.running, key=self._order))
            self._waits = {
                self.waiting[0]: (PREEMPTED, f"{__name__}:Scheduler.schedule#preempted-in-this-step")
            }
            chunks = self._plan(admit=False)
        self._record(chunks)
        return chunks

    def follow(self, chunks: list[Chunk]) -> None:
        """These chunks run without a choice, right behind a step of the same sequences; their blocks are reserved."""
        self._waits = {}
        self._record(chunks)

    def _plan(self, admit: bool) -> list[Chunk]:
        """Chunks of the running sequences, then of waiting ones that can start."""
        budget = self.config.max_num_batched_tokens
        chunks: list[Chunk] = []
        candidates: list[Candidate] = []
        for seq in self.running:
            computed, total = seq.num_computed_tokens, len(seq.token_ids)
            if total - computed > 1:
                candidates.append(Candidate(seq, computed, total - computed))
            elif budget:
                chunks.append(Chunk(seq, computed, total, True))
                budget -= 1
        if admit and self.waiting:
            return chunks + self._with_waiting(budget, candidates, chunks)
        return chunks + _chunks(candidates, self._share(budget, candidates))

    def _with_waiting(self, budget: int, reading: list[Candidate], decodes: list[Chunk]) -> list[Chunk]:
        """Chunks of `reading` and of the head of the waiting line. Tokens of those that cannot or should not start in
        this step are offered again to the others, until all that remain can start."""
        while True:
            candidates = reading + self._candidates(budget)
            tokens = self._share(budget, candidates)
            chunks = _chunks(candidates, tokens)
            if self._hold_twins(candidates, tokens):
                # For whom there were no pages beside them, there may be now.
                self._waits = {seq: why for seq, why in self._waits.items() if why[0] != NO_PAGES}
            elif self._have_pages(decodes, chunks):
                return chunks

    def _candidates(self, budget: int) -> list[Candidate]:
        """The head of the waiting line, as far as pages, seats and (for short prompts) the budget reach."""
        seats = self.config.max_num_seqs - sum(self._seats(s) for s in self.running)
        found = []
        for seq in self.waiting:
            why, _ = self._waits.get(seq, (None, ""))
            if why == TWIN:
                continue
            if why == NO_PAGES:
                break
            seats -= self._seats(seq)
            if seats < 0 or budget <= 0:
                why = NO_SEAT if seats < 0 else NO_BUDGET
                self._waits[seq] = (why, f"{__name__}:Scheduler._candidates#no-seat-or-budget")
                break
            cached = len(self.blocks.lookup(seq)) * self.blocks.block_size
            need = seq.num_tokens - cached
            found.append(Candidate(seq, cached, need))
            if need <= self.config.long_prefill:
                budget -= need
        return found

    def _hold_twins(self, candidates: list[Candidate], tokens: list[int]) -> bool:
        """Hold back waiting sequences whose next missing block is being computed in this very step by another one: one
        step later they find that block in the prefix index instead of computing it twice. True if there are any."""
        if self.blocks.prefix is None:
            return False
        size, computing, found = self.blocks.block_size, set(), False
        for (seq, start, _), n in zip(candidates, tokens):
            keys = seq.block_keys[start // size : (start + n) // size]
            if seq.status is Status.RUNNING or not keys or keys[0] not in computing:
                computing.update(keys)
            else:
                found = True
                self._waits[seq] = (TWIN, f"{__name__}:Scheduler._hold_twins#prefix-on-its-way")
        return found

    def _have_pages(self, decodes: list[Chunk], chunks: list[Chunk]) -> bool:
        """Whether the waiting sequences that got tokens will find pages after the running ones; the first that will not
        ends the line. Each must fit whole, so that it is not evicted at once."""
        running = [c for c in chunks if c.seq.status is Status.RUNNING]
        entrants = chunks[len(running) :]
        count = self.blocks.count_fitting(entrants, after=decodes + running)
        if count == len(entrants):
            return True
        self._waits[entrants[count].seq] = (NO_PAGES, f"{__name__}:Scheduler._have_pages#must-fit-whole")
        return False

    def _share(self, budget: int, candidates: list[Candidate]) -> list[int]:
        """Split the budget over prefills, first come first served, except that long ones together get at most half
        while a short one is there (of an odd budget they get the odd token every other step, or a budget of 1 would
        starve one of the two); what the short ones leave goes back to the long ones.

        So a long prompt cannot keep short ones waiting, nor they it, and no token of the budget idles while
        somebody could use it.
        """
        limit = self.config.long_prefill
        needs = [c.need for c in candidates]
        is_long = [need > limit for need in needs]
        for_long = budget if all(is_long) else (budget + self.metrics.steps % 2) // 2
        tokens = [0] * len(needs)
        for i, need in enumerate(needs):
            if is_long[i]:
                tokens[i] = min(need, for_long)
                for_long -= tokens[i]
        budget -= sum(tokens)
        for wanted in (False, True):
            for i, need in enumerate(needs):
                if is_long[i] is wanted:
                    extra = min(need - tokens[i], budget)
                    tokens[i] += extra
                    budget -= extra
        return tokens

    def _seat(self, seq: Sequence) -> None:
        self.blocks.admit(seq, self.blocks.lookup(seq))
        self.waiting.remove(seq)
        self.running.append(seq)
        first_time = seq.status is Status.WAITING
        seq.status = Status.RUNNING
        times = seq.request.metrics
        if times.first_scheduled_time is None:
            times.first_scheduled_time = time.monotonic()
        if first_time:
            self.metrics.prefix_query_tokens += seq.num_tokens
            self.metrics.prefix_hit_tokens += seq.num_cached_tokens
            seq.request.num_cached_tokens = seq.num_cached_tokens
        if self.trace.on:
            self.trace.emit(
                "admit",
                f"{__name__}:Scheduler._seat#its-turn",
                request=seq.request.number,
                seq=seq.seq_id,
                tokens=seq.num_tokens,
                cached=seq.num_cached_tokens,
            )

    def _preempt(self, seq: Sequence) -> None:
        """Give up the pages of `seq` and put it back into the line; its tokens stay and are recomputed."""
        lost = seq.num_computed_tokens
        self.blocks.free(seq)
        self.running.remove(seq)
        seq.num_computed_tokens = seq.num_drafts = 0
        seq.status = Status.PREEMPTED
        insort(self.waiting, seq, key=self._order)
        self.metrics.preemptions += 1
        self.metrics.recomputed_tokens += lost
        seq.request.metrics.num_preemptions += 1
        if self.trace.on:
            self.trace.emit(
                "preempt", f"{__name__}:Scheduler._preempt#last-in-turn", seq=seq.seq_id, lost=lost
            )

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Start `child` beside `parent`, sharing all its pages."""
        self.blocks.fork(parent, child)
        child.status = Status.RUNNING
        self.running.append(child)
        if self.trace.on:
            self.trace.emit(
                "fork",
                f"{__name__}:Scheduler.fork#one-prompt-n-answers",
                request=parent.request.number,
                parent=parent.seq_id,
                child=child.seq_id,
            )

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its pages."""
        if seq.status is Status.RUNNING:
            self.blocks.free(seq)
            self.running.remove(seq)
        elif seq.status is not Status.FINISHED:
            self.waiting.remove(seq)

    def _seats(self, seq: Sequence) -> int:
        """Seats a sequence takes: its own and those of the siblings that it will be forked into."""
        request = seq.request
        return 1 + request.params.n - len(request.sequences) if seq.index == 0 else 1

    def _record(self, chunks: list[Chunk]) -> None:
        if not chunks:  # nobody was here: not a step
            return
        used = sum(c.stop - c.start for c in chunks)
        m = self.metrics
        m.steps += 1
        m.peak_running = max(m.peak_running, len(self.running))
        m.peak_blocks = max(m.peak_blocks, self.blocks.pool.num_blocks - self.blocks.pool.num_free)
        if not self.trace.on:
            return
        if self.waiting:
            src = f"{__name__}:Scheduler._record#others-took-the-budget"
            self._waits.setdefault(self.waiting[0], (NO_BUDGET, src))
        for seq, (why, src) in self._waits.items():
            if seq.status is not Status.RUNNING:  # a first look may have been too pessimistic
                self.trace.emit("wait", src, seq=seq.seq_id, why=why)
        src = f"{__name__}:Scheduler._record#catch-up"
        for seq, start, stop, samples in chunks:
            self.trace.emit("chunk", src, seq=seq.seq_id, start=start, stop=stop, samples=int(samples))
        self.trace.emit(
            "step",
            f"{__name__}:Scheduler._record#budget",
            budget=self.config.max_num_batched_tokens,
            used=used,
            running=len(self.running),
            waiting=len(self.waiting),
        )


def _chunks(candidates: list[Candidate], tokens: list[int]) -> list[Chunk]:
    """One chunk for each that got tokens; it samples if these are all it needs."""
    return [Chunk(seq, start, start + n, n == need) for (seq, start, need), n in zip(candidates, tokens) if n]
