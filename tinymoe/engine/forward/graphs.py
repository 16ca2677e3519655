"""Decode as captured CUDA graphs: one launch from the host instead of a dozen per layer.

A graph repeats what was recorded, at the addresses that were recorded. So there is one for each of a few numbers of tokens
(buckets), its inputs lie in fixed buffers, and a step of n tokens runs in the next larger bucket with rows to spare. Those
rows are nobody's: slot -1 stores no keys, context 0 attends to nothing, and `num_valid` keeps them from every expert.

A token that verifies a draft is a row like any other, with the block table of its sequence and a context that ends with
itself: a layer stores the keys of all rows before it attends. So speculation needs no graphs of its own; what it pays is that
rows of one sequence read its keys each for itself, from the L2 cache while they fit there.

Everything that depends on the requests is data: block tables, lengths, seeds, temperatures. The bounds that the grids are
made from (the longest context) are those of the engine. Sources: CUDA graphs in vLLM and PyTorch (Ng et al. 2021).
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinymoe import ops
from tinymoe.core.sequence import Sequence


def buckets_up_to(most: int) -> list[int]:
    """Numbers of tokens that graphs are captured for: close together where a step is cheap, never above 512."""
    steps = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512]
    most = min(most, steps[-1])
    return [n for n in steps if n < most] + [most]


class Rows(NamedTuple):
    """The tokens of a step, one a row: of which sequence, at which position, stored in which slot (int64 [n] both).

    token_ids: None if the last launch draws them, on the GPU, in its rows `drawn_in` (None: row by row).
    """

    sequences: list[Sequence]
    token_ids: np.ndarray | None
    positions: np.ndarray
    slots: np.ndarray
    drawn_in: Seq[int] | None = None


class Inputs:
    """What a step brings for each of its rows, in one buffer of 32-bit words, so that it takes one transfer.

    token_ids, drawn_in, positions, next_positions, slots, context_lens int32 [rows], seeds int64, temperature float32;
    num_valid int32 [1]; block tables int32 [rows, width], last, so that a small step sends few of them.
    """

    def __init__(self, rows: int, width: int, device: torch.device | str, pin: bool = False):
        self.rows, self.width = rows, width
        even = rows + rows % 2  # seeds must lie at a multiple of 8 bytes
        self.words = torch.zeros(
            9 * even + 2 + rows * width, dtype=torch.int32, device=device, pin_memory=pin
        )
        self.fixed = even  # words before it are the tokens
        token_ids, drawn_in, positions, later, slots, lens, warmth, seeds, count, tables = self.words.split(
            [even] * 7 + [2 * even, 2, rows * width]
        )
        self.token_ids, self.drawn_in = token_ids, drawn_in
        self.positions, self.next_positions = positions, later
        self.slots, self.context_lens, self.temperature = slots, lens, warmth.view(torch.float32)
        self.seeds, self.num_valid, self.tables = seeds.view(torch.int64), count[:1], tables.view(rows, width)

    def used(self, rows: int) -> int:
        """How many words a step of so many rows needs."""
        return len(self.words) - (self.rows - rows) * self.width


class Staged:
    """The host's side of one step: inputs in pinned memory, and where the drawn tokens come back to."""

    def __init__(self, rows: int, width: int, pin: bool):
        self.inputs = x = Inputs(rows, width, "cpu", pin)
        self.drawn = torch.zeros(2 * rows, dtype=torch.float64, pin_memory=pin)
        self.arrived: torch.cuda.Event | None = None  # of the launch that took it last
        # The same memory as arrays: a step writes a dozen short columns, which costs numpy less than torch.
        integers = (x.token_ids, x.drawn_in, x.positions, x.next_positions, x.slots, x.context_lens)
        self._columns = [column.numpy() for column in (*integers, x.temperature, x.seeds)]
        self._tables, self._count = x.tables.numpy(), x.num_valid.numpy()

    def fill(self, rows: Rows, tables: np.ndarray, bucket: int) -> None:
        """Write these rows, and the rest of the bucket as nobody's."""
        n, seqs = len(rows.sequences), rows.sequences
        token_ids, drawn_in, positions, later, slots, lens, warmth, seeds = self._columns
        if rows.token_ids is not None:
            token_ids[:n] = rows.token_ids
        elif rows.drawn_in is not None:
            drawn_in[:n] = rows.drawn_in
        positions[:n] = rows.positions
        later[:n] = lens[:n] = rows.positions + 1
        slots[:n] = rows.slots
        warmth[:n] = [seq.request.params.heat for seq in seqs]
        seeds[:n] = [seq.seed for seq in seqs]
        if n < bucket:
            for column in self._columns:
                column[n:bucket] = 0
            slots[n:bucket] = -1
        self._count[0] = n
        np.take(tables, [seq.row for seq in seqs], axis=0, out=self._tables[:n], mode="clip")


class Flight(NamedTuple):
    """A step that runs on the GPU: its logits [n, V] (valid until the next launch), experts, and tokens to come."""

    logits: Tensor
    ids_LTK: Tensor | None
    drawn: Tensor
    arrived: torch.cuda.Event

    def wait(self) -> np.ndarray:
        """float64 [2, n]: token ids (exact, they are small) and the largest raw logit of each row."""
        self.arrived.synchronize()
        return self.drawn.numpy()


class Graph(NamedTuple):
    """One bucket: how to run it again, and where its results lie."""

    replay: Callable[[], None]
    logits: Tensor
    drawn: Tensor
    ids_LTK: Tensor | None


Decode = Callable[[Inputs, int, dict], tuple[Tensor, Tensor | None]]


class DecodeGraphs:
    """decode(inputs, bucket, plans) -> logits [bucket, V] and experts [L, bucket, K] is what gets captured.

    under_way: how many launches may go by before what the first of them drew is looked at.
    """

    def __init__(
        self, decode: Decode, buckets: list[int], width: int, device: torch.device, under_way: int = 2
    ):
        self.decode = decode
        self.buckets = buckets
        self.inputs = Inputs(buckets[-1], width, device)
        pin = self.inputs.words.is_cuda
        self.staged = [Staged(buckets[-1], width, pin) for _ in range(under_way)]
        self.graphs: dict[int, Graph] = {}
        self.starts = torch.arange(buckets[-1] + 1, dtype=torch.int32, device=device)
        self._turn = 0
        self._drawn = torch.zeros(2, 0)  # by the last launch, on the GPU

    def capture(self, windows: set[int | None], max_context: int, invariant: bool) -> None:
        """Run every bucket once (kernels compile), then record it; largest first, so that the others find memory."""
        pool = torch.cuda.graph_pool_handle()
        for bucket in reversed(self.buckets):
            plans = {
                window: ops.gpu.PagePlan(
                    self.inputs.tables[:bucket],
                    self.starts[: bucket + 1],
                    self.inputs.context_lens[:bucket],
                    1, 1, max_context, window, invariant,
                )
                for window in windows
            }  # fmt: skip
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._run(bucket, plans)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                results = self._run(bucket, plans)
            self.graphs[bucket] = Graph(graph.replay, *results)

    def _run(self, bucket: int, plans: dict) -> tuple[Tensor, Tensor, Tensor | None]:
        x = self.inputs
        logits, ids_LTK = self.decode(x, bucket, plans)
        ids, best = ops.sample(logits, x.temperature[:bucket], x.seeds[:bucket], x.next_positions[:bucket])
        return logits, torch.stack((ids.double(), best.double())), ids_LTK

    def bucket_for(self, tokens: int) -> int | None:
        """The smallest bucket with room, or None."""
        return next((b for b in self.buckets if b >= tokens), None)

    def launch(self, rows: Rows, tables: np.ndarray) -> Flight:
        """Start a step. tables int32 [max_num_seqs, width]: the block tables of all running sequences."""
        n = len(rows.sequences)
        bucket = self.bucket_for(n)
        assert bucket is not None
        graph, staged, x = self.graphs[bucket], self.staged[self._turn], self.inputs
        self._turn = (self._turn + 1) % len(self.staged)
        if staged.arrived is not None:
            staged.arrived.synchronize()
        staged.fill(rows, tables, bucket)
        first, end = x.fixed if rows.token_ids is None else 0, x.used(bucket)
        x.words[first:end].copy_(staged.inputs.words[first:end], non_blocking=True)
        if rows.token_ids is None:
            before = self._drawn[0]
            x.token_ids[:n].copy_(
                before[:n] if rows.drawn_in is None else before.index_select(0, x.drawn_in[:n])
            )
        graph.replay()
        self._drawn = graph.drawn
        drawn = staged.drawn[: 2 * bucket].view(2, bucket)
        drawn.copy_(graph.drawn, non_blocking=True)
        arrived = staged.arrived = self._mark()
        ids_LTK = None if graph.ids_LTK is None else graph.ids_LTK[:, :n]
        return Flight(graph.logits[:n], ids_LTK, drawn[:, :n], arrived)

    def _mark(self) -> torch.cuda.Event:
        """Something that can be waited for until all that has been launched is done."""
        arrived = torch.cuda.Event()
        arrived.record()
        return arrived
