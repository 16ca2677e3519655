"""EngineConfig: how much the engine may hold and schedule. Names follow vLLM."""

from dataclasses import dataclass
from typing import Literal

from tinymoe.core.model_config import ModelConfig, brief, require

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits and modes of one engine.

    max_model_len: longest prompt + output, in tokens, at least one each; None takes the model's max_position_embeddings.
    max_num_seqs: sequences that run at once. max_num_batched_tokens: token budget of one step.
    block_size: tokens per KV page. num_blocks or kv_cache_bytes: size of the KV cache (give at most one;
        neither: room for max_num_seqs sequences of max_model_len, at most 1 GiB, on a GPU at most what
        gpu_memory_utilization leaves).
    enable_prefix_caching: keep finished pages and share equal prefixes.
    policy: "fcfs" or "priority" (lower value first, as in vLLM; SGLang's sign is the opposite).
    long_prefill_token_threshold: a prompt with more tokens left than this is long; long prompts together get at
        most half of the budget while a short one waits. 0 takes half of max_num_batched_tokens.
    return_routed_experts: keep the experts of every token and return them.
    seed: source of the seeds of requests that bring none.
    Only on a GPU: gpu_memory_utilization, the share of its memory that weights, activations and cache may take;
        enforce_eager, decode without CUDA graphs (starts faster, runs slower); async_scheduling, start the next decode
        step before this one's tokens are known (the tokens are the same); batch_invariant, the same bits for a
        request whoever shares its batch.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    enable_prefix_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0
    return_routed_experts: bool = False
    seed: int = 0
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    async_scheduling: bool = True
    batch_invariant: bool = False

    def __post_init__(self):
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            value = getattr(self, name)
            ok = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            require(ok, f"{name} must be an int of at least 1, got {brief(value)}")
        for name, least in (("max_model_len", 2), ("num_blocks", 1), ("kv_cache_bytes", 1)):
            value = getattr(self, name)
            ok = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least)
            require(ok, f"{name} must be None or an int of at least {least}, got {brief(value)}")
        flags = (
            "enable_prefix_caching",
            "return_routed_experts",
            "enforce_eager",
            "async_scheduling",
            "batch_invariant",
        )
        for name in flags:
            value = getattr(self, name)
            require(isinstance(value, bool), f"{name} must be True or False, got {brief(value)}")
        value = self.gpu_memory_utilization
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1
        require(ok, f"gpu_memory_utilization must be a number in (0, 1], got {brief(value)}")
        require(
            self.num_blocks is None or self.kv_cache_bytes is None,
            f"give num_blocks or kv_cache_bytes, not both (got {self.num_blocks} and {self.kv_cache_bytes})",
        )
        require(
            self.policy in ("fcfs", "priority"),
            f"policy must be 'fcfs' or 'priority', got {brief(self.policy)}",
        )
        value = self.long_prefill_token_threshold
        ok = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        require(ok, f"long_prefill_token_threshold must be an int of at least 0, got {brief(value)}")
        ok = isinstance(self.seed, int) and not isinstance(self.seed, bool) and 0 <= self.seed < 2**63
        require(ok, f"seed must be an int in 0..2^63-1, got {brief(self.seed)}")

    def model_len(self, model: ModelConfig) -> int:
        """max_model_len, or the model's own limit. Raises ConfigError if it exceeds what the model was built for."""
        limit = model.max_position_embeddings
        require(
            self.max_model_len is None or self.max_model_len <= limit,
            f"max_model_len ({self.max_model_len}) exceeds the model's max_position_embeddings ({limit})",
        )
        return self.max_model_len or limit

    @property
    def long_prefill(self) -> int:
        return self.long_prefill_token_threshold or max(1, self.max_num_batched_tokens // 2)
