"""What a step brings: one token for each sequence that has caught up, unless somebody guesses ahead (engine.spec)."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

from torch import Tensor

from tinymoe.core.sequence import Chunk, Sequence
from tinymoe.engine.forward.batch import Batch
from tinymoe.engine.forward.passes import Pending
from tinymoe.engine.forward.runner import Forward
from tinymoe.engine.sampling.draws import Draw, drawn_tokens, draws_of, sample_draws
from tinymoe.engine.sampling.sampler import Sampled, Sampler


class Run(NamedTuple):
    """What a step brings for one sequence (index: which of the request's n): one token, or accepted drafts and one more."""

    seq: Sequence
    index: int
    tokens: list[Sampled]


class Plain:
    """No speculation: one token per draw. wants_logits: whether tokens that are drawn elsewhere are not enough to judge."""

    wants_logits = False

    def plan(self, running: Seq[Sequence]) -> None: ...
    def propose(self, chunks: Seq[Chunk]) -> Pending | None: ...
    def settle(self, runs: list[Run], batch: Batch, logits_RV: Tensor | None) -> None: ...
    def finish(self, chunks: Seq[Chunk], tokens: int, followed: bool) -> None: ...
    def undo(self) -> None: ...
    def rests(self, chunks: Seq[Chunk]) -> bool:
        return True

    def draw(self, sampler: Sampler, batch: Batch, forward: Forward, eos_token_ids: Seq[int]) -> list[Run]:
        """Draw tokens, and judge: one Run per sequence, and per answer that begins."""
        tokens = None if self.wants_logits else drawn_tokens(batch, forward)
        if tokens is not None:
            return self.judge_tokens(batch.chunks, tokens)
        draws = draws_of(batch)
        return self.judge(draws, sample_draws(sampler, forward, draws, eos_token_ids), forward.logits)

    def judge(self, draws: list[Draw], sampled: list[Sampled], logits_RV: Tensor | None) -> list[Run]:
        return [Run(draw.seq, draw.index, [one]) for draw, one in zip(draws, sampled)]

    def judge_tokens(self, chunks: Seq[Chunk], tokens: list[int]) -> list[Run]:
        """The same where every chunk decodes, and the tokens drawn behind their rows are all that is known."""
        return [Run(chunk.seq, chunk.seq.index, [Sampled(token)]) for chunk, token in zip(chunks, tokens)]
