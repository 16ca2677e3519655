"""Decode as captured CUDA graphs: one launch from the host instead of a dozen per layer.

A graph repeats what was recorded, at the addresses that were recorded. So there is one for each of a few numbers of tokens
(buckets), its inputs lie in fixed buffers, and a step of n tokens runs in the next larger bucket with rows to spare. Those
rows are nobody's: slot -1 stores no keys, context 0 attends to nothing, and `num_valid` keeps them from every expert.

Everything that depends on the requests is data: block tables, lengths, seeds, temperatures. The bounds that the grids are
made from (the longest context) are those of the engine. Sources: CUDA graphs in vLLM and PyTorch (Ng et al. 2021).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinymoe import ops
from tinymoe.cache.blocks import BlockManager
from tinymoe.core.sequence import Chunk


def buckets_up_to(most: int) -> list[int]:
    """Numbers of tokens that graphs are captured for: close together where a step is cheap, never above 512."""
    steps = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512]
    most = min(most, steps[-1])
    return [n for n in steps if n < most] + [most]


class Inputs:
    """What a step brings for each of its sequences, in one buffer of 32-bit words, so that it takes one transfer.

    token_ids, positions, next_positions, slots, context_lens int32 [rows], seeds int64, temperature float32; num_valid
    int32 [1]; block tables int32 [rows, width], last, so that a small step sends few of them.
    """

    def __init__(self, rows: int, width: int, device: torch.device | str, pin: bool = False):
        self.rows, self.width = rows, width
        even = rows + rows % 2  # seeds must lie at a multiple of 8 bytes
        self.words = torch.zeros(
            8 * even + 2 + rows * width, dtype=torch.int32, device=device, pin_memory=pin
        )
        self.fixed = even  # words before it are the tokens
        token_ids, positions, later, slots, lens, warmth, seeds, count, tables = self.words.split(
            [even] * 6 + [2 * even, 2, rows * width]
        )
        self.token_ids, self.positions, self.next_positions = token_ids, positions, later
        self.slots, self.context_lens, self.temperature = slots, lens, warmth.view(torch.float32)
        self.seeds, self.num_valid, self.tables = seeds.view(torch.int64), count[:1], tables.view(rows, width)

    def used(self, rows: int) -> int:
        """How many words a step of so many rows needs."""
        return len(self.words) - (self.rows - rows) * self.width


class Staged:
    """The host's side of one step: inputs in pinned memory, and where the drawn tokens come back to."""

    def __init__(self, rows: int, width: int, pin: bool):
        self.inputs = Inputs(rows, width, "cpu", pin)
        self.drawn = torch.zeros(2 * rows, dtype=torch.float64, pin_memory=pin)

    def fill(self, chunks: Sequence[Chunk], blocks: BlockManager, bucket: int, tokens: bool = True) -> None:
        """Write the step of these one-token chunks, and the rest of the bucket as nobody's."""
        n, x = len(chunks), self.inputs
        positions = torch.from_numpy(blocks.positions())
        columns = [
            (x.positions, positions, 0),
            (x.next_positions, positions + 1, 0),
            (x.context_lens, positions + 1, 0),
            (x.slots, torch.from_numpy(blocks.place()), -1),
            (x.temperature, torch.tensor([c.seq.request.params.heat for c in chunks]), 0),
            (x.seeds, torch.tensor([c.seq.seed for c in chunks]), 0),
        ]
        if tokens:
            columns.append((x.token_ids, torch.tensor([c.seq.token_ids[c.start] for c in chunks]), 0))
        for column, values, nobody in columns:
            column[:n] = values
            column[n:bucket] = nobody
        x.num_valid[0] = n
        np.take(blocks.tables, [c.seq.row for c in chunks], axis=0, out=x.tables[:n].numpy(), mode="clip")


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

    def __init__(self, decode: Decode, buckets: list[int], width: int, device: torch.device):
        self.decode = decode
        self.buckets = buckets
        self.inputs = Inputs(buckets[-1], width, device)
        pin = self.inputs.words.is_cuda
        self.staged = [
            Staged(buckets[-1], width, pin) for _ in range(2)
        ]  # the other one may still be on its way
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

    def launch(self, chunks: Sequence[Chunk], blocks: BlockManager, *, follow: bool = False) -> Flight:
        """Start a step of one-token chunks. follow: their tokens are those that the last launch drew, row by row."""
        n = len(chunks)
        bucket = self.bucket_for(n)
        assert bucket is not None
        graph, staged = self.graphs[bucket], self.staged[self._turn]
        self._turn = 1 - self._turn
        staged.fill(chunks, blocks, bucket, tokens=not follow)
        first, end = self.inputs.fixed if follow else 0, self.inputs.used(bucket)
        self.inputs.words[first:end].copy_(staged.inputs.words[first:end], non_blocking=True)
        if follow:
            self.inputs.token_ids[:n].copy_(self._drawn[0, :n])
        graph.replay()
        self._drawn = graph.drawn
        drawn = staged.drawn[: 2 * bucket].view(2, bucket)
        drawn.copy_(graph.drawn, non_blocking=True)
        arrived = self._mark()
        ids_LTK = None if graph.ids_LTK is None else graph.ids_LTK[:, :n]
        return Flight(graph.logits[:n], ids_LTK, drawn[:, :n], arrived)

    def _mark(self) -> torch.cuda.Event:
        """Something that can be waited for until all that has been launched is done."""
        arrived = torch.cuda.Event()
        arrived.record()
        return arrived
