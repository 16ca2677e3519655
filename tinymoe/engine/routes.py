"""Who visited which expert: counters that are always on, the experts of every token, and route events for listeners."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinymoe import ops
from tinymoe.cache.storage import KVStorage
from tinymoe.core.model_config import ModelConfig
from tinymoe.core.trace import PATHS, Trace
from tinymoe.engine.forward.batch import Batch
from tinymoe.experts import paths


class RouteRecorder:
    """The engine's RouteSink. load [L, E] int64 counts tokens per expert since the start; rows of dense layers stay 0.

    distinct [L] and routed_steps give the mean number of experts that a step has to read. Counters live beside the model,
    so that counting makes nobody wait for a GPU. Rejected drafts have been computed, so they count as load; what a draft
    computes in order to propose them does not.
    """

    def __init__(self, config: ModelConfig, storage: KVStorage, trace: Trace):
        self.config = config
        self.path = "adaptive"  # how the experts run; the runner takes it from the model
        self.storage = storage
        self.trace = trace
        L, E = config.num_hidden_layers, config.max_experts
        self._layers = [i for i, layer in enumerate(config.layers) if layer.moe]
        device = storage.kv.device
        self._load = torch.zeros(len(self._layers), E, dtype=torch.int64, device=device)
        # Of steps without drafts, and of steps that verify some.
        self._distinct = torch.zeros(2, len(self._layers), dtype=torch.int64, device=device)
        self._shape = (L, E)
        self.routed_steps = 0
        self.verifying = False  # whether the step that runs verifies drafts
        self._batch: Batch | None = None
        self._slots = torch.zeros(0, dtype=torch.int64)
        self._ids: dict[int, Tensor] = {}  # layer -> expert ids [T, K] of the step that runs
        self._ids_LTK: Tensor | None = None  # the same of a step that a captured graph runs

    @property
    def waits(self) -> bool:
        """Whether reading a counter waits for a GPU."""
        return self._load.is_cuda

    @property
    def most_visits(self) -> int:
        """Experts of all layers."""
        return sum(layer.moe.num_experts for layer in self.config.layers if layer.moe)

    @property
    def load(self) -> np.ndarray:
        """int64 [L, E]: visits of every expert since the start. On a GPU this waits for the steps before."""
        load = np.zeros(self._shape, dtype=np.int64)
        load[self._layers] = self._load.cpu().numpy()
        return load

    @property
    def distinct(self) -> np.ndarray:
        """int64 [L]: experts visited, summed over steps."""
        distinct = np.zeros(self._shape[0], dtype=np.int64)
        distinct[self._layers] = self._distinct.sum(0).cpu().numpy()
        return distinct

    def visited(self, verifying: bool = False) -> int:
        """Experts visited, summed over layers and steps, or steps that verified drafts. On a GPU this waits for the steps
        before."""
        return int((self._distinct[1] if verifying else self._distinct).sum())

    def begin(self, slots_T: Tensor, batch: Batch | None = None) -> None:
        """A forward pass starts; what an earlier one left that did not come to `settle` is forgotten. Events need the
        batch."""
        self._slots, self._batch, self._ids, self._ids_LTK = slots_T, batch, {}, None

    def take(self, ids_LTK: Tensor | None) -> None:
        """A captured graph runs, and this is where its experts will be."""
        self._ids, self._ids_LTK = {}, ids_LTK

    def stacked(self) -> Tensor | None:
        """The experts of all layers of the step [L, T, K], -1 where a layer has fewer than K; None without experts."""
        if not self._ids:
            return None
        K = max(ids_TK.shape[1] for ids_TK in self._ids.values())
        padded = [
            ids_TK if ids_TK.shape[1] == K else F.pad(ids_TK, (0, K - ids_TK.shape[1]), value=-1)
            for ids_TK in self._ids.values()
        ]
        return torch.stack(padded)

    @torch.inference_mode()
    def settle(self) -> None:
        """The step counts."""
        ids_LTK = self.stacked() if self._ids_LTK is None else self._ids_LTK
        if ids_LTK is not None:
            ops.count_routes(ids_LTK, self._load, self._distinct[int(self.verifying)])
        self.routed_steps += 1

    def route(self, layer: int, logits_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        """Called by each MoE layer of the step."""
        self._ids[layer] = ids_TK
        if self.storage.experts is not None:
            self.storage.experts[self._slots, layer, : ids_TK.shape[1]] = ids_TK.to(torch.int16)
        if self.trace.on and self._batch is not None:
            self._emit(layer, logits_TE, ids_TK, weights_TK)

    def _emit(self, layer: int, logits_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        assert self._batch is not None
        src = f"{__name__}:RouteRecorder._emit#top-k"
        moe = self.config.layers[layer].moe
        scores_TE = logits_TE.sigmoid() if moe and moe.scoring == "sigmoid" else logits_TE.softmax(-1)
        # A selection bias and groups choose by other scores: then this gap can be negative, and bounds nothing.
        ids_TK = ids_TK.long()
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
