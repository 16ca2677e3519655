"""Who visited which expert: counters that are always on, the experts of every token, and route events for listeners."""

import numpy as np
import torch
from torch import Tensor

from tinymoe.cache.storage import KVStorage
from tinymoe.core.model_config import ModelConfig
from tinymoe.core.trace import PATHS, Trace
from tinymoe.engine.batch import Batch
from tinymoe.experts import paths


class RouteRecorder:
    """The engine's RouteSink. load [L, E] int64 counts tokens per expert since the start; rows of dense layers stay 0.

    distinct [L] and routed_steps give the mean number of experts that a step has to read.
    """

    def __init__(self, config: ModelConfig, storage: KVStorage, trace: Trace):
        self.config = config
        self.path = "adaptive"  # how the experts run; the runner takes it from the model
        self.storage = storage
        self.trace = trace
        self.load = np.zeros((config.num_hidden_layers, config.max_experts), dtype=np.int64)
        self.distinct = np.zeros(config.num_hidden_layers, dtype=np.int64)
        self.routed_steps = 0
        self._batch: Batch | None = None
        self._ids: dict[int, Tensor] = {}  # layer -> expert ids [T, K] of the step that runs

    def begin(self, batch: Batch) -> None:
        """A forward pass starts; what an earlier one left that did not come to `settle` is forgotten."""
        self._batch = batch
        self._ids = {}

    def settle(self) -> None:
        """The step counts."""
        L, E = self.load.shape
        if self._ids:  # all layers in one count: on a GPU, one wait a step
            places = torch.cat([layer * E + ids_TK.reshape(-1) for layer, ids_TK in self._ids.items()])
            counts = torch.bincount(places, minlength=L * E).view(L, E).cpu().numpy()
            self.load += counts
            self.distinct += np.count_nonzero(counts, axis=1)
        self.routed_steps += 1

    def route(self, layer: int, logits_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        """Called by each MoE layer of the step."""
        assert self._batch is not None
        self._ids[layer] = ids_TK
        if self.storage.experts is not None:
            self.storage.experts[self._batch.slots, layer, : ids_TK.shape[1]] = ids_TK.to(torch.int16)
        if self.trace.on:
            self._emit(layer, logits_TE, ids_TK, weights_TK)

    def _emit(self, layer: int, logits_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        assert self._batch is not None
        src = f"{__name__}:RouteRecorder._emit#top-k"
        moe = self.config.layers[layer].moe
        scores_TE = logits_TE.sigmoid() if moe and moe.scoring == "sigmoid" else logits_TE.softmax(-1)
        # A selection bias and groups choose by other scores: then this gap can be negative, and bounds nothing.
        rejected_T = scores_TE.scatter(1, ids_TK, -1.0).amax(1)
        gaps_T = (scores_TE.gather(1, ids_TK).amin(1) - rejected_T).clamp(max=1)
        experts, gates = ids_TK.tolist(), (weights_TK.nan_to_num() * 1000).round().int().tolist()
        positions, gaps = self._batch.positions.tolist(), (gaps_T.nan_to_num() * 1e6).int().tolist()
        for (seq, *_), span in zip(self._batch.chunks, self._batch.spans):
            for t in range(span.start, span.stop):
                self.trace.emit(
                    "route",
                    src,
                    layer=layer,
                    seq=seq.seq_id,
                    position=positions[t],
                    experts=tuple(experts[t]),
                    gates=tuple(gates[t]),
                    margin=gaps[t],
                )
        src = f"{__name__}:RouteRecorder._emit#expert-path"
        sizes = torch.bincount(ids_TK.reshape(-1), minlength=logits_TE.shape[1]).tolist()
        path = PATHS.index(paths.choose(sizes) if self.path == "adaptive" else self.path)
        distinct = sum(size > 0 for size in sizes)
        self.trace.emit("kernel", src, layer=layer, path=path, tokens=len(experts), experts=distinct)

    def max_over_mean(self) -> np.ndarray:
        """Per MoE layer: tokens of the busiest expert over the mean, float64 [layers]. Empty for a dense model."""
        used = [
            (load, layer.moe.num_experts) for load, layer in zip(self.load, self.config.layers) if layer.moe
        ]
        return np.array([load.max() * experts / max(1, load.sum()) for load, experts in used])
