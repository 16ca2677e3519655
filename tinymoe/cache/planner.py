"""How many blocks the KV cache gets, and the arithmetic to show when that is not enough."""

from typing import NamedTuple

from tinymoe.core.config import EngineConfig
from tinymoe.core.model_config import ConfigError, ModelConfig

DEFAULT_CACHE_BYTES = 1 << 30


class CachePlan(NamedTuple):
    """num_blocks blocks of bytes_per_block bytes, all layers together."""

    num_blocks: int
    bytes_per_block: int

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


def plan_cache(model: ModelConfig, engine: EngineConfig, bytes_per_element: int) -> CachePlan:
    """Size the cache from num_blocks, from kv_cache_bytes, or from what the running sequences can use at most.

    Raises ConfigError if not even one block fits.
    """
    per_block = model.kv_elements_per_token * engine.block_size * bytes_per_element
    if engine.num_blocks is not None:
        return CachePlan(engine.num_blocks, per_block)
    limit = engine.kv_cache_bytes
    most = engine.max_num_seqs * -(-engine.model_len(model) // engine.block_size)
    if limit is None:
        return CachePlan(max(1, min(most, DEFAULT_CACHE_BYTES // per_block)), per_block)
    if limit < per_block:
        raise ConfigError(
            f"kv_cache_bytes ({limit}) is less than one block: {engine.block_size} tokens x "
            f"{model.kv_elements_per_token} numbers x {bytes_per_element} bytes = {per_block} bytes; raise it or lower block_size"
        )
    return CachePlan(limit // per_block, per_block)
