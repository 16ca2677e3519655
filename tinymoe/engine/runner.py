"""The forward pass over paged KV."""

import torch
from torch import Tensor

from tinymoe import ops
from tinymoe.cache.storage import KVStorage
from tinymoe.engine.batch import Batch
from tinymoe.engine.routes import RouteRecorder
from tinymoe.model.decoder import Decoder
from tinymoe.model.moe import MoE


class PagedAttend:
    """Writes a layer's keys and values to their slots, then attends over the block tables."""

    def __init__(self, batch: Batch, storage: KVStorage, windows: list[int | None]):
        self.slots = batch.slots
        self.storage = storage
        self.windows = windows
        self.plans = {
            window: ops.plan_attention(batch.spans, storage.block_size, window, batch.slots.device)
            for window in set(windows)
        }

    def __call__(self, layer: int, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor) -> Tensor:
        self.storage.write(layer, self.slots, k_TGH, v_TGH)
        k_cache, v_cache = self.storage.kv[layer]
        return ops.paged_attention(q_TNH, k_cache, v_cache, self.plans[self.windows[layer]])


class Runner:
    """Owns the model and the KV tensors; runs one batch at a time."""

    def __init__(self, model: Decoder, storage: KVStorage, recorder: RouteRecorder):
        self.model = model
        self.storage = storage
        self.recorder = recorder
        self.device = storage.kv.device
        ops.gpu.check_head_dim(model.config.head_dim, self.device)
        recorder.path = next((m.path for m in model.modules() if isinstance(m, MoE)), recorder.path)
        self.windows = [layer.sliding_window for layer in model.config.layers]

    @torch.inference_mode()
    def run(self, batch: Batch, copies: list[tuple[int, int]]) -> Tensor:
        """Copy the blocks that are about to diverge, then one forward pass: logits [R, V] float32 of batch.rows."""
        self.storage.copy_blocks(copies)
        self.recorder.begin(batch)
        attend = PagedAttend(batch, self.storage, self.windows)
        return self.model(batch.token_ids, batch.positions, attend, self.recorder, batch.rows)
