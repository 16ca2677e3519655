"""The engine's speculation: before a step, who gets how many drafts; behind it, which of them stay."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from tinymoe.core.config import EngineConfig
from tinymoe.core.metrics import EngineMetrics
from tinymoe.core.sequence import Chunk, Sequence
from tinymoe.engine.forward.batch import Batch
from tinymoe.engine.routes import RouteRecorder
from tinymoe.engine.sampling import Sampled, gather_logprobs
from tinymoe.engine.sampling.draws import Draw, draws_of
from tinymoe.engine.spec.depth import Acceptance, Depth
from tinymoe.engine.spec.proposer import Proposer, millionths
from tinymoe.engine.spec.verify import distribution, rejection_sample

Clock = Callable[[], float]  # seconds


class Run(NamedTuple):
    """What a step brings for one sequence (index: which of the request's n): one token, or accepted drafts and one more."""

    seq: Sequence
    index: int
    tokens: list[Sampled]


class Plain:
    """No speculation: one token per draw."""

    def plan(self, running: Seq[Sequence]) -> None: ...
    def propose(self, chunks: Seq[Chunk]) -> None: ...
    def settle(self, runs: list[Run], batch: Batch, logits_RV: Tensor | None) -> None: ...
    def finish(self, chunks: Seq[Chunk], tokens: int, followed: bool) -> None: ...
    def undo(self) -> None: ...
    def rests(self, chunks: Seq[Chunk]) -> bool:
        return True

    def judge(self, draws: list[Draw], sampled: list[Sampled], logits_RV: Tensor | None) -> list[Run]:
        return [Run(draw.seq, draw.index, [one]) for draw, one in zip(draws, sampled)]


class Speculator:
    """Proposes and judges. clock: seconds, for the choice of depths.

    A step calls plan, propose (its chunks are chosen), judge (its logits are there), settle (it counts) and finish.
    """

    def __init__(
        self,
        config: EngineConfig,
        proposer: Proposer,
        routes: RouteRecorder,
        metrics: EngineMetrics,
        max_model_len: int,
        clock: Clock = time.perf_counter,
    ):
        options = config.speculation
        assert options is not None
        self.proposer, self.routes, self.metrics = proposer, routes, metrics
        self.blocks, self.trace = proposer.blocks, proposer.trace
        self.max_model_len, self.clock = max_model_len, clock
        self.adaptive, self.most = options.adaptive, options.num_speculative_tokens
        metrics.drafts_at, metrics.accepted_at = [0] * self.most, [0] * self.most
        self.depth = Depth(self.most, routes.most_visits)
        self._began: float | None = None  # when the step began; None if that was behind the one before
        self._finished: float | None = None  # when the one before was over
        self._verifying: float | None = None  # when its drafts were there
        self._proposed: list[Sequence] = []  # who got some in this step
        self._drafting = 0.0  # seconds that went into them
        self._visited = self._counted = 0  # experts visited in so many steps
        self._due = False  # whether those of this step are to be counted

    # Before the forward pass

    def plan(self, running: Seq[Sequence]) -> None:
        """How many drafts each sequence may have in the coming step: sets num_drafts."""
        self._due = self.adaptive and (not self.routes.waits or self.depth.counts_experts())
        if self._due and self._counted != self.routes.routed_steps:
            self._count()
        self._began, self._drafting = self.clock(), 0.0
        self.proposer.look_up(running)
        decoding, able, limits, fixed = 0, [], [], 0
        for seq in running:
            seq.num_drafts, seq.draft_token_ids = 0, []
            decoding += seq.num_tokens - seq.num_computed_tokens == 1
            limit = self.proposer.most(seq, self._limit(seq))
            if limit and self._is_fixed(seq):
                seq.num_drafts, fixed = limit, fixed + 1 + limit
            elif limit:
                able.append(seq)
                limits.append(limit)
        if able:
            others = decoding - len(able) + fixed
            rates = [self._acceptance(seq).rate for seq in able]
            for seq, depth in zip(able, self.depth.choose(rates, limits, others)):
                seq.num_drafts = depth

    def _limit(self, seq: Sequence) -> int:
        """How many drafts can be of use: it decodes, wants them, and has so many tokens to come, and one behind them."""
        params = seq.request.params
        if seq.num_tokens - seq.num_computed_tokens != 1 or seq.num_tokens == seq.num_prompt_tokens:
            return 0
        wanted = self.most if params.num_speculative_tokens is None else params.num_speculative_tokens
        left = self.max_model_len - seq.num_tokens
        if params.max_tokens is not None:
            left = min(left, params.max_tokens - (seq.num_tokens - seq.num_prompt_tokens))
        return max(0, min(wanted, self.most, left - 1))

    def _is_fixed(self, seq: Sequence) -> bool:
        """Whether a clock must not decide about its tokens: they would not come again with its seed."""
        params = seq.request.params
        seeded = params.seed is not None and not params.greedy and not self.proposer.coupled
        return seeded or not self.adaptive

    def _acceptance(self, seq: Sequence) -> Acceptance:
        if seq.acceptance is None:
            seq.acceptance = Acceptance(self.depth.acceptance)
        return seq.acceptance

    def propose(self, chunks: Seq[Chunk]) -> None:
        """Fill in draft_token_ids of the sequences whose chunks have room for drafts."""
        counts = {c.seq: c.stop - c.seq.num_tokens for c in chunks if c.stop > c.seq.num_tokens}
        self._verifying, self.routes.verifying = None, bool(counts)
        if not counts:
            return
        start, self._proposed = self.clock(), list(counts)
        self.proposer.propose(counts)
        self._verifying = self.clock()
        self._drafting = self._verifying - start
        if self.proposer.caught_up <= 2 * len(counts):
            self.depth.observe_draft(len(counts), max(counts.values()), self._drafting)

    # Behind it

    @torch.inference_mode()
    def judge(self, draws: list[Draw], sampled: list[Sampled], logits_RV: Tensor | None) -> list[Run]:
        """One Run per sequence (and per answer that begins), from one Sampled per draw."""
        runs: list[Run] = []
        drawn: list[tuple[Run, list[Draw]]] = []
        i = 0
        while i < len(draws):
            seq, index = draws[i].seq, draws[i].index
            drafts = seq.draft_token_ids
            group = sampled[i : i + len(drafts) + 1]
            if drafts and seq in self.proposer.q:
                runs.append(Run(seq, index, group))
                drawn.append((runs[-1], draws[i : i + len(group)]))
            else:
                kept = 0
                while kept < len(drafts) and group[kept].token == drafts[kept]:
                    kept += 1
                runs.append(Run(seq, index, group[: kept + 1]))
            i += len(group)
        if drawn:
            assert logits_RV is not None
            self._reject(drawn, logits_RV)
        return runs

    def _reject(self, drawn: list[tuple[Run, list[Draw]]], logits_RV: Tensor) -> None:
        """Rejection sampling for these runs; they come with what the model would have said by itself."""
        seqs = [run.seq for run, _ in drawn]
        draws = [draw for _, group in drawn for draw in group]
        device = logits_RV.device
        p_RV = distribution(
            logits_RV[torch.tensor([draw.logits_row for draw in draws], device=device)],
            [draw.row(self.proposer.eos_token_ids) for draw in draws],
        )
        drafts = [token for seq in seqs for token in seq.draft_token_ids]
        accepted, last = rejection_sample(
            p_RV,
            torch.stack([q_V for seq in seqs for q_V in self.proposer.q[seq]]),
            torch.tensor(drafts, device=device),
            [len(seq.draft_token_ids) for seq in seqs],
            [seq.seed for seq in seqs],
            [seq.num_tokens for seq in seqs],
        )
        for (run, group), count, token in zip(drawn, accepted, last):
            said, params = list(run.tokens), run.seq.request.params
            tokens = [*run.seq.draft_token_ids[:count], token]
            bad = next((i for i in range(count + 1) if said[i].error is not None), None)
            if params.logprobs is not None and bad is None:
                rows = torch.tensor([draw.logits_row for draw in group[: count + 1]], device=device)
                reports = gather_logprobs(logits_RV[rows], tokens, [params.logprobs] * (count + 1))
                run.tokens[:] = [Sampled(t, one[t].logprob, one) for t, one in zip(tokens, reports)]
            else:
                stop = count + 1 if bad is None else bad
                run.tokens[:] = [*map(Sampled, tokens[:stop]), *([] if bad is None else [said[bad]])]

    def settle(self, runs: list[Run], batch: Batch, logits_RV: Tensor | None) -> None:
        """The step counts: rejected drafts give their pages back; what was drafted is forgotten."""
        if self._verifying is None:
            return
        kept: dict[int, int] = {}
        m = self.metrics
        if self.trace.on and logits_RV is not None:
            self._emit(runs, draws_of(batch), logits_RV)
        for run in runs:
            seq, drafted, accepted = run.seq, len(run.seq.draft_token_ids), len(run.tokens) - 1
            if not drafted:
                continue
            kept[seq.seq_id] = seq.num_tokens + accepted
            self.proposer.keep(seq, accepted)
            for count in (self._acceptance(seq), self.depth.acceptance):
                count.count(accepted, drafted)
            m.draft_tokens += drafted
            m.accepted_tokens += accepted
            m.verifications += 1
            m.verified_tokens += len(run.tokens)
            for i in range(drafted):
                m.drafts_at[i] += 1
                m.accepted_at[i] += i < accepted
            seq.draft_token_ids = []
        self.blocks.rollback(kept)
        m.verify_steps += 1
        m.verify_seconds += self.clock() - self._verifying

    def _emit(self, runs: list[Run], draws: list[Draw], logits_RV: Tensor) -> None:
        src = f"{__name__}:Speculator._emit#kept-if-the-model-agrees"
        behind = {(draw.seq, draw.ahead): draw for draw in draws}
        for run in runs:
            seq, accepted = run.seq, len(run.tokens) - 1
            for i, token in enumerate(seq.draft_token_ids[: accepted + 1]):
                draw = behind[seq, i]
                row = draw.row(self.proposer.eos_token_ids)
                p = self.proposer.chance(logits_RV[draw.logits_row][None], [row], [token])[0]
                q = self.proposer.chances[seq][i] if seq in self.proposer.chances else 1.0
                self.trace.emit(
                    "verify",
                    src,
                    seq=seq.seq_id,
                    position=draw.position,
                    token=token,
                    p=millionths(p),
                    q=millionths(q),
                    accepted=int(i < accepted),
                )

    def undo(self) -> None:
        """The step broke off: so do its drafts."""
        for seq in self._proposed:
            seq.draft_token_ids = []
        self._began = self._finished = self._verifying = None
        self.routes.verifying = False

    def finish(self, chunks: Seq[Chunk], tokens: int, followed: bool) -> None:
        """The step is over: its time and its experts teach what a step of so many tokens costs. followed: the next one runs
        already, without drafts; to count the experts of this one would be to wait for it."""
        began, now = self._finished if self._began is None else self._began, self.clock()
        if self.adaptive and began is not None:
            if all(c.samples and c.start >= c.seq.num_prompt_tokens for c in chunks):
                experts = self._count() if self._due and not followed else None
                self.depth.steps.observe(tokens, experts, now - began - self._drafting)
            if followed:
                self.depth.skip()
        self._began, self._finished, self._verifying, self._drafting = None, now, None, 0.0
        self._due = self.routes.verifying = False

    def _count(self) -> int | None:
        """Distinct experts, summed over layers, of the last step; None if more than one has gone by uncounted. On a GPU this
        waits."""
        before, steps = self._visited, self._counted
        self._visited, self._counted = self.routes.visited(), self.routes.routed_steps
        return self._visited - before if self._counted == steps + 1 else None

    def rests(self, chunks: Seq[Chunk]) -> bool:
        """Whether the step behind these chunks may start before their tokens are known: it will have no drafts."""
        if not any(self._limit(c.seq) for c in chunks):
            return True
        return self.depth.rests(len(chunks)) and not any(self._is_fixed(c.seq) for c in chunks)
