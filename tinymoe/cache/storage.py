"""The tensors behind the blocks: keys and values of every layer, and (on request) the experts of every token."""

import numpy as np
import torch
from torch import Tensor

from tinymoe.core.model_config import ModelConfig


class KVStorage:
    """kv [L, 2, num_blocks, block_size, G, H] in the model's dtype, pages and rows: each layer's keys and values, by block
    [num_blocks, block_size, G, H] and by slot [num_slots, G, H]; experts [num_slots + 1, L, K] int16 or None (the last
    is where slot -1, padding of a captured graph, writes).

    Experts live beside the keys they were computed with, so they survive prefix hits, copies and preemption.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        keep_experts: bool = False,
    ):
        L, G, H = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        self.block_size = block_size
        # Never-written slots may be read under a mask: they must hold finite numbers, or 0 · NaN would leak through.
        self.kv = torch.zeros(L, 2, num_blocks, block_size, G, H, dtype=dtype, device=device)
        self.pages = [
            (k_cache, v_cache) for k_cache, v_cache in self.kv
        ]  # views, made once: a step asks often
        self.rows = [(k_cache.flatten(0, 1), v_cache.flatten(0, 1)) for k_cache, v_cache in self.pages]
        self.experts: Tensor | None = None
        if keep_experts and config.is_moe:
            shape = (num_blocks * block_size + 1, L, config.max_top_k)
            self.experts = torch.full(shape, -1, dtype=torch.int16, device=device)

    def write(self, layer: int, slots_T: Tensor, k_TGH: Tensor, v_TGH: Tensor) -> None:
        """Put one layer's keys and values at their slots [T] int64."""
        k_rows, v_rows = self.rows[layer]
        k_rows.index_copy_(0, slots_T, k_TGH)
        v_rows.index_copy_(0, slots_T, v_TGH)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (old, new), in order: a block may be copied and then overwritten in one step."""
        for old, new in pairs:
            self.kv[:, :, new].copy_(self.kv[:, :, old])
            if self.experts is not None:
                size = self.block_size
                self.experts[new * size : (new + 1) * size].copy_(self.experts[old * size : (old + 1) * size])

    def experts_of(self, blocks: np.ndarray, num_tokens: int) -> np.ndarray | None:
        """Experts of a sequence's first `num_tokens` tokens, int16 [num_tokens, L, K]."""
        if self.experts is None:
            return None
        position = np.arange(num_tokens)
        slots = (
            blocks[position // self.block_size].astype(np.int64) * self.block_size
            + position % self.block_size
        )
        return self.experts[torch.from_numpy(slots)].cpu().numpy()
