"""The engine's speculation: before a step, who gets how many drafts; behind it, which of them stay."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from operator import eq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinymoe.core.config import EngineConfig
from tinymoe.core.metrics import EngineMetrics
from tinymoe.core.sequence import Chunk, Sequence
from tinymoe.engine.forward.batch import Batch
from tinymoe.engine.forward.passes import Pending
from tinymoe.engine.routes import RouteRecorder
from tinymoe.engine.sampling import Sampled, gather_logprobs
from tinymoe.engine.sampling.draws import Draw, draws_of
from tinymoe.engine.sampling.plain import Plain, Run
from tinymoe.engine.spec.depth import Depth
from tinymoe.engine.spec.estimates import Acceptance
from tinymoe.engine.spec.proposer import Proposer
from tinymoe.engine.spec.verify import distribution, leading_runs, rejection_sample

Clock = Callable[[], float]  # seconds


class Speculator(Plain):
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
        self.depth = Depth(self.most, routes.most_visits, proposer.most_tokens)
        self._began: float | None = None  # when the step began; None if that was behind the one before
        self._finished: float | None = None  # when the one before was over
        self._verifying: float | None = None  # when its drafts were there
        self._proposed: list[Sequence] = []  # who got some in this step
        self._pending: Pending | None = None  # them, while they are on their way
        self._drafting = 0.0  # seconds that went into them
        self._visited = self._counted = 0  # experts visited in so many steps
        self._due = False  # whether those of this step are to be counted
        self._ahead = False  # whether steps without drafts have run ahead

    # Before the forward pass

    def plan(self, running: Seq[Sequence]) -> None:
        """How many drafts each sequence may have in the coming step: sets num_drafts."""
        self._began, self._drafting = self.clock(), 0.0
        if self.adaptive and self.depth.dozes(len(running)) and not any(map(self._is_fixed, running)):
            for seq in running:
                seq.num_drafts, seq.draft_token_ids = 0, []
            self.depth.skip()
            self.proposer.q = {}
            return
        self._due = self.adaptive and (not self.routes.waits or self.depth.counts_experts())
        if self._due and self._counted != self.routes.routed_steps:
            self._count()
        self.proposer.look_up(running)
        decoding, able, limits, fixed = 0, [], [], 0
        for seq in running:
            seq.num_drafts, seq.draft_token_ids = 0, []
            decoding += (
                seq.num_tokens - seq.num_computed_tokens == 1 and seq.num_tokens > seq.num_prompt_tokens
            )
            limit = self.proposer.most(seq, self._limit(seq))
            if limit and self._is_fixed(seq):
                seq.num_drafts, fixed = limit, fixed + 1 + limit
            elif limit:
                able.append(seq)
                limits.append(limit)
        if able:
            others, learns = decoding - len(able) + fixed, decoding == len(running)
            depths = self.depth.kept(limits, others)
            if depths is None:
                known = [self._acceptance(seq) for seq in able]
                rates, evidence = [one.rate for one in known], [one.evidence for one in known]
                depths = self.depth.choose(rates, limits, others, evidence=evidence, learns=learns)
            for seq, depth in zip(able, depths):
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
        if seq.acceptance.at < seq.num_tokens:
            seq.acceptance.reach(seq.num_tokens)
        return seq.acceptance

    def propose(self, chunks: Seq[Chunk]) -> Pending | None:
        """Fill in draft_token_ids of the sequences whose chunks have room for drafts; what comes back is still to land."""
        counts = {c.seq: c.stop - c.seq.num_tokens for c in chunks if c.stop > c.seq.num_tokens}
        self._verifying, self.routes.verifying = None, bool(counts)
        if not counts:
            return None
        start, self._proposed = self.clock(), list(counts)
        self._pending = self.proposer.propose(counts)
        self._verifying = self.clock()
        self._drafting = self._verifying - start
        return self._pending

    # Behind it

    def draw(self, *step: Any) -> list[Run]:
        """See Plain. The drafts must be there by now: what the host waits for them counts as drafting."""
        if self._pending is not None:
            start = self.clock()
            self._pending.land()
            self.metrics.lap("draft")
            waited, self._pending = self.clock() - start, None
            self._drafting, self._verifying = self._drafting + waited, (self._verifying or 0.0) + waited
        if self._verifying is not None and self.proposer.caught_up <= len(self._proposed):
            passes = max(len(seq.draft_token_ids) for seq in self._proposed)
            self.depth.drafts.observe(len(self._proposed), passes, self._drafting)
        return super().draw(*step)

    @property
    def wants_logits(self) -> bool:
        return bool(self.proposer.q)

    @torch.inference_mode()
    def judge(self, draws: list[Draw], sampled: list[Sampled], logits_RV: Tensor | None) -> list[Run]:
        if self._verifying is None:
            return super().judge(draws, sampled, logits_RV)
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

    def judge_tokens(self, chunks: Seq[Chunk], tokens: list[int]) -> list[Run]:
        if self._verifying is None:
            return super().judge_tokens(chunks, tokens)
        drafts = [chunk.seq.draft_token_ids for chunk in chunks]
        behind = np.cumsum([0, *(len(each) + 1 for each in drafts)]).tolist()
        runs = []
        for chunk, guessed, start, kept in zip(chunks, drafts, behind, self._kept(chunks, drafts, tokens)):
            said = [*guessed[:kept], tokens[start + kept]]
            runs.append(Run(chunk.seq, chunk.seq.index, [*map(Sampled, said)]))
        return runs

    def _kept(self, chunks: Seq[Chunk], drafts: list[list[int]], tokens: list[int]) -> list[int]:
        """How many drafts of each chunk are what was drawn in their places."""
        same, at = [], 0
        for guessed in drafts:
            same += map(eq, guessed, tokens[at : at + len(guessed)])
            at += len(guessed) + 1
        return leading_runs(np.array(same, dtype=bool), [len(guessed) for guessed in drafts])

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
        stay: dict[Sequence, int] = {}
        if self.trace.on and logits_RV is not None:
            draws = draws_of(batch)
            for run in runs:
                self.proposer.tell(run.seq, len(run.tokens) - 1, draws, logits_RV)
        drafted_at, accepted_at = np.zeros(self.most + 1, int), np.zeros(self.most + 1, int)
        for run in runs:
            seq, drafted, accepted = run.seq, len(run.seq.draft_token_ids), len(run.tokens) - 1
            if not drafted:
                continue
            stay[seq] = accepted
            own = self._acceptance(seq)
            own.at += len(run.tokens)
            own.count(accepted, drafted)
            self.depth.acceptance.count(accepted, drafted)
            drafted_at[drafted] += 1
            accepted_at[accepted] += 1
        self.proposer.keep(stay)
        for seq in stay:
            seq.draft_token_ids = []
        self.metrics.count_drafts(drafted_at.tolist(), accepted_at.tolist())
        self.blocks.rollback({seq.seq_id: seq.num_tokens + accepted for seq, accepted in stay.items()})
        self.metrics.verify_steps += 1
        self.metrics.verify_seconds += self.clock() - self._verifying

    def undo(self) -> None:
        """The step broke off: so do its drafts."""
        for seq in self._proposed:
            seq.draft_token_ids = []
        self._began = self._finished = self._verifying = self._pending = None
        self.routes.verifying = False

    def finish(self, chunks: Seq[Chunk], tokens: int, followed: bool) -> None:
        """The step is over: its time and its experts teach what a step of so many tokens costs. followed: the next one runs
        already, without drafts; to count the experts of this one would be to wait for it."""
        began, now = self._finished if self._began is None else self._began, self.clock()
        self._ahead = self._ahead or followed
        plain, fresh = self._verifying is None, self._began is not None
        known = plain and self.depth.knows_enough()
        if self.adaptive and began is not None and not known and all(map(_decodes, chunks)):
            experts = self._count() if self._due and not followed else None
            seconds = now - began - self._drafting
            rare = (
                plain and fresh and self._ahead
            )  # where plain steps run ahead, one that did not took longer
            self.depth.steps.observe(len(chunks), tokens, experts, seconds, rare)
            self.depth.took(now - began)
        if self.adaptive and followed:
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


def _decodes(chunk: Chunk) -> bool:
    return chunk.samples and chunk.start >= chunk.seq.num_prompt_tokens
