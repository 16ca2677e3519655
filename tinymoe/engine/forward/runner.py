"""The forward pass over paged KV."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinymoe import ops
from tinymoe.cache.blocks import BlockManager
from tinymoe.cache.storage import KVStorage
from tinymoe.core.config import EngineConfig
from tinymoe.engine.forward.batch import Batch
from tinymoe.engine.forward.graphs import DecodeGraphs, Flight, Inputs, Rows, buckets_up_to
from tinymoe.engine.forward.passes import Pending
from tinymoe.engine.routes import RouteRecorder
from tinymoe.model.decoder import Decoder
from tinymoe.model.moe import MoE


class PagedAttend:
    """Writes a layer's keys and values to their slots, then attends over the block tables.

    slots: as KVStorage.write takes them. plans: how the step attends, one for each sliding window of the model.
    """

    def __init__(self, slots: Tensor, plans: dict, storage: KVStorage, windows: list):
        self.slots = slots
        self.plans = plans
        self.storage = storage
        self.windows = windows

    def __call__(self, layer: int, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor) -> Tensor:
        self.storage.write(layer, self.slots, k_TGH, v_TGH)
        return self.stored(layer, q_TNH)

    def pages(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where a kernel puts the layer's keys and values itself."""
        return *self.storage.pages[layer], self.slots

    def stored(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Attend; keys and values are in their slots."""
        k_cache, v_cache = self.storage.pages[layer]
        return ops.paged_attention(q_TNH, k_cache, v_cache, self.plans[self.windows[layer]])


def can_capture(model: Decoder, config: EngineConfig) -> bool:
    """Whether steps of this model can be CUDA graphs, and are wanted as such."""
    fused = all(module.path == "fused" for module in model.modules() if isinstance(module, MoE))
    on_gpu = ops.gpu.AVAILABLE and model.norm.weight.device.type == "cuda"
    return not config.enforce_eager and fused and on_gpu


def decode_buckets(config: EngineConfig) -> list[int]:
    """Numbers of tokens that decode steps are captured for, with as many drafts as there may be."""
    drafts = config.speculation.num_speculative_tokens if config.speculation is not None else 0
    return buckets_up_to(min(config.max_num_seqs * (1 + drafts), config.max_num_batched_tokens))


class Forward(NamedTuple):
    """What a step's forward pass leaves: logits [R, V] float32 of batch.rows; a captured graph also draws tokens, and its
    logits are gone (None) once another step follows."""

    logits: Tensor | None
    flight: Flight | None = None


class Runner:
    """Owns the model and the KV tensors; runs one batch at a time."""

    def __init__(self, model: Decoder, storage: KVStorage, recorder: RouteRecorder):
        self.model = model
        self.storage = storage
        self.recorder = recorder
        self.device = storage.kv.device
        ops.gpu.check_head_dim(model.config.head_dim, self.device)
        self._moes = [m for m in model.modules() if isinstance(m, MoE)]
        recorder.path = next((m.path for m in self._moes), recorder.path)
        self.windows = [layer.sliding_window for layer in model.config.layers]
        self.graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def capture(self, config: EngineConfig, max_model_len: int) -> None:
        """Record decode steps as CUDA graphs, where there are CUDA and kernels that wait for nothing."""
        if can_capture(self.model, config):
            width = -(-max_model_len // config.block_size)
            graphs = DecodeGraphs(self._decode, decode_buckets(config), width, self.device)
            graphs.capture(set(self.windows), max_model_len, self.model.invariant)
            self.graphs = graphs

    @torch.inference_mode()
    def run(self, batch: Batch, blocks: BlockManager, pending: Pending | None = None) -> Forward:
        """Copy the blocks that are about to diverge, then one forward pass over a batch whose blocks are reserved.
        pending: its drafts, if they are still to come; only a captured graph (see `flies`) can take them."""
        self.storage.copy_blocks(blocks.copies)
        if self.flies(batch):
            return self._fly(batch, blocks, batch.token_ids.numpy(), pending)
        batch = batch.to(self.device)
        self.recorder.begin(batch.slots, batch)
        plans = {
            window: ops.plan_attention(
                batch.spans, self.storage.block_size, window, self.device, self.model.invariant
            )
            for window in set(self.windows)
        }
        attend = PagedAttend(batch.slots, plans, self.storage, self.windows)
        return Forward(self.model(batch.token_ids, batch.positions, attend, self.recorder, batch.rows))

    def flies(self, batch: Batch) -> bool:
        """Whether a captured graph can run this batch: decodes and drafts only, not too many, and nobody looks inside."""
        graphs = self.graphs
        if graphs is None or not batch.decodes or self.recorder.trace.on:
            return False
        return graphs.bucket_for(len(batch.token_ids)) is not None

    @torch.inference_mode()
    def follow(self, batch: Batch, blocks: BlockManager) -> Forward:
        """One more step of the same sequences behind the one that runs: its tokens are those that one draws."""
        self.storage.copy_blocks(blocks.copies)
        return self._fly(batch, blocks)

    def _fly(
        self,
        batch: Batch,
        blocks: BlockManager,
        token_ids: np.ndarray | None = None,
        pending: Pending | None = None,
    ) -> Forward:
        assert self.graphs is not None
        seqs, counts = [c.seq for c in batch.chunks], [c.stop - c.start for c in batch.chunks]
        rows = Rows.of(seqs, counts, token_ids, blocks.positions(), blocks.place())
        if pending is not None:
            there = [at for seq in seqs for at in pending.places(seq)]
            rows = rows._replace(drawn_in=there, source=pending.source)
            if -1 not in there:
                rows = rows._replace(token_ids=None)
        flight = self.graphs.launch(rows, blocks.tables)
        self.recorder.take(flight.ids_LTK)
        return Forward(flight.logits, flight)

    def _decode(self, x: Inputs, bucket: int, plans: dict) -> tuple[Tensor, Tensor | None]:
        """What a graph records: one decode step of `bucket` rows."""
        slots = x.slots[:bucket]
        attend = PagedAttend(slots, plans, self.storage, self.windows)
        self.recorder.begin(slots)
        logits = self.model(
            x.token_ids[:bucket], x.positions[:bucket], attend, self.recorder, None, x.num_valid
        )
        return logits, self.recorder.stacked()
