"""How many blocks the KV cache gets, and the arithmetic to show when that is not enough."""

from typing import NamedTuple

import torch

from tinymoe.cache.devices import memory_bytes
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


def plan_cache(
    model: ModelConfig,
    engine: EngineConfig,
    bytes_per_element: int,
    room: int = DEFAULT_CACHE_BYTES,
    beside: int = 0,
) -> CachePlan:
    """Size the cache from num_blocks, from kv_cache_bytes, or from what the running sequences can use at most, but no
    more than `room` bytes. beside: bytes a token for the KV of a draft model. Raises ConfigError if not even one block fits.
    """
    per_block = (model.kv_elements_per_token * bytes_per_element + beside) * engine.block_size
    if engine.num_blocks is not None:
        return CachePlan(engine.num_blocks, per_block)
    limit = engine.kv_cache_bytes
    most = engine.max_num_seqs * -(-engine.model_len(model) // engine.block_size)
    if limit is None:
        return CachePlan(max(1, min(most, room // per_block)), per_block)
    if limit < per_block:
        raise ConfigError(
            f"kv_cache_bytes ({limit}) is less than one block: {engine.block_size} tokens x "
            f"{model.kv_elements_per_token} numbers x {bytes_per_element} bytes"
            + (f" + {beside} bytes a token of the draft" if beside else "")
            + f" = {per_block} bytes; raise it or lower block_size"
        )
    return CachePlan(limit // per_block, per_block)


GRAPHS = 1 << 30  # set aside on a GPU for captured graphs and what libraries take


def room_on_gpu(engine: EngineConfig, free: int, total: int, activations: int, one_sequence: int) -> int:
    """Bytes that a GPU's KV cache may take: what gpu_memory_utilization of its memory leaves beside what is there (the
    weights, other programs), the activations of the largest step, and graphs.

    one_sequence: bytes of the longest sequence's cache. Raises ConfigError with the arithmetic if that does not fit.
    """
    allowed, there = int(engine.gpu_memory_utilization * total), total - free
    room = allowed - there - activations - GRAPHS
    if room < one_sequence:
        raise ConfigError(
            f"the GPU has too little memory: {_gib(total)} x gpu_memory_utilization {engine.gpu_memory_utilization} = "
            f"{_gib(allowed)}, less {_gib(there)} in use (weights, other programs), {_gib(activations)} for a step of "
            f"{engine.max_num_batched_tokens} tokens and {_gib(GRAPHS)} for graphs leaves {_gib(room)} for the KV cache, "
            f"but one sequence of max_model_len takes {_gib(one_sequence)}: raise gpu_memory_utilization, lower "
            "max_model_len or max_num_batched_tokens, or take a smaller model or dtype"
        )
    return room


# What BlockManager and BlockPool hold: a reference count and a free list entry (a pointer and an int) for each block, and
# for each seat a length, a free list entry, and a row of the block tables.
BYTES_PER_BLOCK = 4 + 8 + 32
BYTES_PER_SEAT = 8 + 8 + 32
BYTES_PER_TABLE_ENTRY = 4


def check_room(plan: CachePlan, engine: EngineConfig, model_len: int, device: torch.device) -> None:
    """Raise ConfigError with the arithmetic if the cache exceeds the device's memory, or its books the machine's.

    A memory whose size the system does not tell is taken to suffice.
    """
    device_bytes, host_bytes = memory_bytes(device), memory_bytes(torch.device("cpu"))
    if device_bytes is not None and plan.total_bytes > device_bytes:
        if engine.num_blocks is not None:
            what = "lower num_blocks"
        else:
            what = "lower kv_cache_bytes" if engine.kv_cache_bytes is not None else "lower block_size"
        raise ConfigError(
            f"the KV cache does not fit: {plan.num_blocks} blocks of {engine.block_size} tokens x {plan.bytes_per_block} "
            f"bytes a block = {_gib(plan.total_bytes)}, the memory has {_gib(device_bytes)}; {what}"
        )
    width = -(-model_len // engine.block_size)
    seats = engine.max_num_seqs * (BYTES_PER_SEAT + width * BYTES_PER_TABLE_ENTRY)
    if host_bytes is not None and seats + plan.num_blocks * BYTES_PER_BLOCK > host_bytes:
        raise ConfigError(
            f"the block tables do not fit: max_num_seqs ({engine.max_num_seqs}) x {width} blocks of a sequence x "
            f"{BYTES_PER_TABLE_ENTRY} bytes, and lists of {engine.max_num_seqs} seats and {plan.num_blocks} blocks = "
            f"{_gib(seats + plan.num_blocks * BYTES_PER_BLOCK)}, the machine has {_gib(host_bytes)}; lower max_num_seqs "
            "or max_model_len"
        )


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
