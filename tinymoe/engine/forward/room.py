"""The KV cache of an engine, as large as there is room: what a step needs beside it is tried, not guessed."""

import torch
from torch import Tensor

from tinymoe.cache.blocks import BlockManager
from tinymoe.cache.planner import CachePlan, check_room, plan_cache, room_on_gpu
from tinymoe.cache.storage import KVStorage
from tinymoe.core.config import EngineConfig
from tinymoe.core.model_config import ConfigError
from tinymoe.core.trace import Trace
from tinymoe.model.decoder import Decoder


def build_cache(
    model: Decoder, config: EngineConfig, max_model_len: int, trace: Trace, draft: Decoder | None = None
) -> tuple[BlockManager, KVStorage]:
    """Pages and their accounting, with room for the KV of a draft model. Raises ConfigError with the arithmetic if they do
    not fit."""
    weight = model.norm.weight
    plan = plan_for(model, config, max_model_len, draft)
    check_room(plan, config, max_model_len, weight.device)
    blocks = BlockManager(
        plan.num_blocks,
        config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        trace=trace,
    )
    storage = KVStorage(
        model.config,
        plan.num_blocks,
        config.block_size,
        weight.dtype,
        weight.device,
        keep_experts=config.return_routed_experts,
    )
    return blocks, storage


def plan_for(
    model: Decoder, config: EngineConfig, max_model_len: int, draft: Decoder | None = None
) -> CachePlan:
    """The KV cache for this model on its device, a draft's in the same blocks. Raises ConfigError with the arithmetic if it
    does not fit."""
    weight = model.norm.weight
    size, device = weight.element_size(), weight.device
    beside = 0
    if draft is not None:
        beside = draft.config.kv_elements_per_token * draft.norm.weight.element_size()
    chosen = config.num_blocks is not None or config.kv_cache_bytes is not None
    if device.type != "cuda" or chosen:
        return plan_cache(model.config, config, size, beside=beside)
    activations = activation_bytes(model, config)
    free, total = torch.cuda.mem_get_info(device)
    longest = -(-max_model_len // config.block_size) * config.block_size
    one_sequence = longest * (model.config.kv_elements_per_token * size + beside)
    room = room_on_gpu(config, free, total, activations, one_sequence)
    return plan_cache(model.config, config, size, room, beside)


@torch.inference_mode()
def activation_bytes(model: Decoder, config: EngineConfig) -> int:
    """What the largest step takes at its peak, in bytes of GPU memory: one is run, without attention.

    Raises ConfigError if it does not fit.
    """
    device, tokens = model.norm.weight.device, config.max_num_batched_tokens
    ids = torch.arange(tokens, device=device) % model.config.vocab_size
    rows = torch.arange(min(tokens, config.max_num_seqs), device=device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        model(ids, torch.zeros_like(ids), _no_attention, None, rows).softmax(-1)
        torch.cuda.synchronize(device)
    except torch.cuda.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of {tokens} tokens does not fit beside the weights into the GPU's memory ({error}): lower "
            "max_num_batched_tokens or max_num_seqs"
        ) from error
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


def _no_attention(layer: int, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor) -> Tensor:
    return q_TNH
