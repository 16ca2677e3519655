"""A draft model's passes as graphs that follow one another on the GPU, with nobody looking until they are needed.

Pass p + 1 takes the token that pass p has drawn. Where it lies in the text and in the cache is known beforehand: the host
writes the places of all passes into one buffer, and each graph picks its own. What was drawn stays on the GPU, too, so that
the verification can start before the host has seen a draft.
"""

from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinymoe.core.sequence import Sequence
from tinymoe.engine.forward.graphs import Decode, DecodeGraphs, Rows, recorded

NOBODY = np.array([0, 0, -1, 0])[:, None]  # position, next position, slot and context of a row to spare


class Pending:
    """Drafts that are on their way. source int32 [(1 + passes) * rows]: where the GPU puts them; a row for the newest token of
    each sequence, then one for each pass.

    Until `land`, draft_token_ids of these sequences have their lengths, and are 0.
    """

    def __init__(self, seqs: Seq[Sequence], counts: Seq[int], source: Tensor, heard: Tensor, arrived: Any):
        self.source, self._stride = source.flatten(), source.shape[1]
        self._column = {seq: i for i, seq in enumerate(seqs)}
        self._heard, self._arrived = heard, arrived
        for seq, count in zip(seqs, counts):
            seq.draft_token_ids = [0] * count

    def places(self, seq: Sequence) -> Seq[int]:
        """Where in `source` the newest token of a sequence and its drafts are; -1 if it has none."""
        column = self._column.get(seq)
        if column is None:
            return (-1,)
        return range(column, column + (1 + len(seq.draft_token_ids)) * self._stride, self._stride)

    def land(self) -> None:
        """Wait for the drafts, and write them down."""
        self._arrived.synchronize()
        heard = self._heard.numpy()
        for seq, column in self._column.items():
            seq.draft_token_ids = heard[1 : 1 + len(seq.draft_token_ids), column].tolist()


class DraftGraphs(DecodeGraphs):
    """Up to `passes` passes in a row. Every graph keeps what it has drawn: as tokens of the pass behind it, and in told int32
    [1 + passes, rows] (a column for each sequence), where the first row has what the first pass has read."""

    def __init__(self, decode: Decode, buckets: list[int], width: int, device: torch.device, passes: int):
        super().__init__(decode, buckets, width, device, further=passes)
        pin = self.inputs.words.is_cuda
        self.told = torch.zeros(1 + passes, buckets[-1], dtype=torch.int32, device=device)
        self._heard = torch.zeros(1 + passes, buckets[-1], dtype=torch.int32, pin_memory=pin)
        self.further: dict[int, Any] = {}  # bucket -> how to run one more pass

    def record(self, bucket: int, plans: dict, pool: Any) -> None:
        super().record(bucket, plans, pool)
        self.further[bucket], _ = recorded(partial(self._further, bucket, plans), pool)

    def _run(self, bucket: int, plans: dict) -> tuple[Tensor, Tensor, Tensor | None]:
        self.told[0, :bucket].copy_(self.inputs.token_ids[:bucket])
        self.inputs.turn.zero_()
        results = super()._run(bucket, plans)
        self.note(bucket, results[1])
        return results

    def _further(self, bucket: int, plans: dict) -> None:
        self.advance()
        self.note(bucket, super()._run(bucket, plans)[1])

    def advance(self) -> None:
        """Every row goes to its place in the next pass; its token is there already."""
        x = self.inputs
        torch.index_select(x.later, 0, x.turn, out=x.places[None])

    def note(self, bucket: int, drawn: Tensor) -> None:
        """Keep what a pass has drawn (ids are drawn[0]) for the next one, the verification and the host."""
        x = self.inputs
        x.token_ids[:bucket].copy_(drawn[0])
        x.turn.add_(1)
        self.told[:, :bucket].index_copy_(0, x.turn, x.token_ids[None, :bucket])

    def chain(
        self,
        seqs: Seq[Sequence],
        counts: Seq[int],
        first: Rows,
        positions_PS: np.ndarray,
        slots_PS: np.ndarray,
        tables: np.ndarray,
    ) -> Pending:
        """Start passes that draft counts[i] tokens for seqs[i].

        first: tokens to read in the first pass; row i is the newest one of seqs[i], and arrears come behind. positions_PS,
        slots_PS int [P, S]: of the tokens that the P passes behind it read; slot -1 where a sequence has all its drafts.
        """
        P, S = positions_PS.shape
        staged, bucket = self.take_turn(), self.bucket_for(S)
        assert bucket is not None
        # The pass after turn t finds its places at later[t].
        later = staged.inputs.later[1 : P + 1].numpy()
        later[:, :, S:] = NOBODY
        later[:, :, :S] = np.stack((positions_PS, positions_PS + 1, slots_PS, positions_PS + 1), 1)
        self.start(staged, first, tables)
        for _ in range(P):
            self.further[bucket]()
        heard = self._heard[: P + 2]
        heard.copy_(self.told[: P + 2], non_blocking=True)
        staged.arrived = self.mark()
        return Pending(seqs, counts, self.told, heard, staged.arrived)
