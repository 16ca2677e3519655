"""Decode as captured CUDA graphs: one launch from the host instead of a dozen per layer.

A graph repeats what was recorded, at the addresses that were recorded. So there is one for each of a few numbers of tokens
(buckets), its inputs lie in fixed buffers, and a step of n tokens runs in the next larger bucket with rows to spare. Those
rows are nobody's: slot -1 stores no keys, context 0 attends to nothing, and `num_valid` keeps them from every expert.

A token that verifies a draft is a row like any other, with the block table of its sequence and a context that ends with
itself: a layer stores the keys of all rows before it attends. So speculation needs no graphs of its own; what it pays is that
rows of one sequence read its keys each for itself, from the L2 cache while they fit there. A draft model's passes follow one
another on the GPU alone (engine.forward.passes), and the step that verifies them takes its tokens from there.

Everything that depends on the requests is data: block tables, lengths, seeds, temperatures. The bounds that the grids are
made from (the longest context) are those of the engine. Sources: CUDA graphs in vLLM and PyTorch (Ng et al. 2021).
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, NamedTuple

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
    """The tokens of a step, one a row: row of the block tables, seed, temperature, position, slot ([n] each).

    token_ids: None if they are on the GPU: in the rows `drawn_in` (None: row by row) of `source`, or of what the last launch
    draws. With both, those of rows whose drawn_in is not -1 come from the source.
    """

    tables: np.ndarray
    seeds: np.ndarray
    heat: np.ndarray
    token_ids: np.ndarray | None
    positions: np.ndarray
    slots: np.ndarray
    drawn_in: Seq[int] | None = None
    source: Tensor | None = None

    @classmethod
    def of(cls, seqs: Seq[Sequence], counts: Seq[int] | int, *columns: Any, **more: Any) -> "Rows":
        """counts[i] rows of seqs[i], one sequence after another; the other columns as they are."""
        keys = [s.row for s in seqs], [s.seed for s in seqs], [s.request.params.heat for s in seqs]
        tables, seeds, heat = (np.repeat(key, counts) for key in keys)
        return cls(tables, seeds, heat, *columns, **more)

    def ordered(self, order: np.ndarray) -> "Rows":
        """The same rows in another order, all of whose tokens are known."""
        assert self.token_ids is not None
        keys = self.tables[order], self.seeds[order], self.heat[order]
        return Rows(*keys, self.token_ids[order], self.positions[order], self.slots[order])


class Inputs:
    """What a step brings for each of its rows, in one buffer of 32-bit words, so that it takes one transfer.

    token_ids, drawn_in, positions, next_positions, slots, context_lens int32 [rows] (the last four also as `places`), seeds
    int64, temperature float32; num_valid int32 [1]; turn int64 [1]: which of several passes it is, and later: the places of
    further ones (engine.forward.passes); block tables int32 [rows, width], last, so that a small step sends few of them.
    """

    def __init__(
        self, rows: int, width: int, device: torch.device | str, pin: bool = False, further: int = 0
    ):
        self.rows, self.width = rows, width
        even = rows + rows % 2  # what is read as int64 must lie at a multiple of 8 bytes
        parts = [even, even, 4 * even, even, 2 * even, 2, 2, further * 4 * even, rows * width]
        self.words = torch.zeros(sum(parts), dtype=torch.int32, device=device, pin_memory=pin)
        self.fixed = even  # words before it are the tokens
        self.token_ids, self.drawn_in, places, warmth, seeds, count, turn, later, tables = self.words.split(
            parts
        )
        self.places = places.view(4, even)
        self.positions, self.next_positions, self.slots, self.context_lens = self.places
        self.temperature, self.seeds = warmth.view(torch.float32), seeds.view(torch.int64)
        self.num_valid, self.turn = count[:1], turn.view(torch.int64)
        self.later, self.tables = later.view(further, 4, even), tables.view(rows, width)

    def used(self, rows: int) -> int:
        """How many words a step of so many rows needs."""
        return len(self.words) - (self.rows - rows) * self.width


class Staged:
    """The host's side of one step: inputs in pinned memory, and where the drawn tokens come back to."""

    def __init__(self, rows: int, width: int, pin: bool, further: int = 0):
        self.inputs = x = Inputs(rows, width, "cpu", pin, further)
        self.drawn = torch.zeros(2 * rows, dtype=torch.float64, pin_memory=pin)
        self.arrived: torch.cuda.Event | None = None  # of the launch that took it last
        # The same memory as arrays: a step writes a dozen short columns, which costs numpy less than torch.
        integers = (x.token_ids, x.drawn_in, x.positions, x.next_positions, x.slots, x.context_lens)
        self._columns = [column.numpy() for column in (*integers, x.temperature, x.seeds)]
        self._tables, self._count = x.tables.numpy(), x.num_valid.numpy()

    def fill(self, rows: Rows, tables: np.ndarray, bucket: int) -> None:
        """Write these rows, and the rest of the bucket as nobody's."""
        n = len(rows.positions)
        token_ids, drawn_in, positions, later, slots, lens, warmth, seeds = self._columns
        if rows.token_ids is not None:
            token_ids[:n] = rows.token_ids
        if rows.drawn_in is not None:
            drawn_in[: len(rows.drawn_in)] = rows.drawn_in
        positions[:n] = rows.positions
        later[:n] = lens[:n] = rows.positions + 1
        slots[:n], warmth[:n], seeds[:n] = rows.slots, rows.heat, rows.seeds
        if n < bucket:
            for column in self._columns:
                column[n:bucket] = 0
            slots[n:bucket] = -1
        self._count[0] = n
        np.take(tables, rows.tables, axis=0, out=self._tables[:n], mode="clip")


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
    """decode(inputs, bucket, plans) -> logits [bucket, V] and experts [L, bucket, K] is what gets captured."""

    def __init__(
        self, decode: Decode, buckets: list[int], width: int, device: torch.device, further: int = 0
    ):
        self.decode = decode
        self.buckets = buckets
        self.inputs = Inputs(buckets[-1], width, device, further=further)
        pin = self.inputs.words.is_cuda
        # One runs, one is being written.
        self.staged = [Staged(buckets[-1], width, pin, further) for _ in range(2)]
        self.graphs: dict[int, Graph] = {}
        self.starts = torch.arange(buckets[-1] + 1, dtype=torch.int32, device=device)
        self._turn = 0
        self._drawn = torch.zeros(0)  # by the last launch, on the GPU

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
            self.record(bucket, plans, pool)

    def record(self, bucket: int, plans: dict, pool: Any) -> None:
        replay, results = recorded(partial(self._run, bucket, plans), pool)
        self.graphs[bucket] = Graph(replay, *results)

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
        staged, n = self.take_turn(), len(rows.positions)
        graph, bucket = self.start(staged, rows, tables)
        drawn = staged.drawn[: 2 * bucket].view(2, bucket)
        drawn.copy_(graph.drawn, non_blocking=True)
        arrived = staged.arrived = self.mark()
        ids_LTK = None if graph.ids_LTK is None else graph.ids_LTK[:, :n]
        return Flight(graph.logits[:n], ids_LTK, drawn[:, :n], arrived)

    def take_turn(self) -> Staged:
        """Inputs to be written, which no step under way reads."""
        staged = self.staged[self._turn]
        self._turn = (self._turn + 1) % len(self.staged)
        if staged.arrived is not None:
            staged.arrived.synchronize()
        return staged

    def start(self, staged: Staged, rows: Rows, tables: np.ndarray) -> tuple[Graph, int]:
        """Run the graph of the bucket for these rows; nothing is told to the host."""
        x, n = self.inputs, len(rows.positions)
        bucket = self.bucket_for(n)
        assert bucket is not None
        staged.fill(rows, tables, bucket)
        first, end = x.fixed if rows.token_ids is None else 0, x.used(bucket)
        x.words[first:end].copy_(staged.inputs.words[first:end], non_blocking=True)
        source, at = self._drawn if rows.source is None else rows.source, x.drawn_in[:n]
        if rows.token_ids is None:
            x.token_ids[:n].copy_(source[:n] if rows.drawn_in is None else source.index_select(0, at))
        elif rows.source is not None:
            known, there = x.token_ids[:n], source.index_select(0, at.clamp(min=0))
            known.copy_(torch.where(at < 0, known, there))
        graph = self.graphs[bucket]
        graph.replay()
        self._drawn = graph.drawn[0]
        return graph, bucket

    def mark(self) -> torch.cuda.Event:
        """Something that can be waited for until all that has been launched is done."""
        arrived = torch.cuda.Event()
        arrived.record()
        return arrived


def recorded(run: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
    """Run once on a side stream, then record: how to run it again, and where its results will lie."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        results = run()
    return graph.replay, results
