"""EngineConfig: how much the engine may hold and schedule; SpeculativeConfig: how it guesses ahead. Names follow vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from tinymoe.core.model_config import ConfigError, ModelConfig, brief, require

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
METHODS = ("draft_model", "ngram", "self")
MOST_DRAFTS = 64  # so many are hardly ever all accepted, and each takes a place in the step of every sequence


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

    method: who proposes tokens. "draft_model": another model, `model` (name or folder) with the same vocabulary; "ngram": what
        followed the last time that the newest tokens were seen, at most prompt_lookup_max (4) and at least prompt_lookup_min
        (2) of them; "self": the model itself with num_experts_per_tok experts a token (default 1).
    num_speculative_tokens: most tokens proposed per step and sequence, at most 64.
    acceptance: "exact" keeps the distribution of sampled tokens (rejection sampling); "coupled" keeps the sampled tokens
        themselves, those of plain decoding. Greedy tokens are those of plain decoding either way.
    adaptive: propose as many as the measured times and acceptance make worthwhile, perhaps none; False: always all.
        What a sampled request gets under "exact" depends on how many were proposed, so a request with a seed of its own
        is always offered all.
    """

    method: Literal["draft_model", "ngram", "self"]
    num_speculative_tokens: int
    model: str | Path | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    num_experts_per_tok: int | None = None
    acceptance: Literal["exact", "coupled"] = "exact"
    adaptive: bool = True

    def __post_init__(self):
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  (frozen dataclass)
        where = "speculative_config: "
        for name, choices in (("method", METHODS), ("acceptance", ("exact", "coupled"))):
            value = getattr(self, name)
            ok = isinstance(value, str) and value in choices
            require(ok, f"{where}{name} must be {' or '.join(map(repr, choices))}, got {brief(value)}")
        owners = {
            "model": "draft_model",
            "prompt_lookup_max": "ngram",
            "prompt_lookup_min": "ngram",
            "num_experts_per_tok": "self",
        }
        for name, method in owners.items():
            value = getattr(self, name)
            require(
                value is None or self.method == method,
                f"{where}{name} belongs to method {method!r}, and the method is {self.method!r}: leave it out",
            )
        if self.method == "draft_model":
            ok = isinstance(self.model, (str, Path)) and str(self.model) != ""
            require(ok, f"{where}model must be the draft's name or folder, got {brief(self.model)}")
        for name, owner, default in (
            (
                "prompt_lookup_max",
                "ngram",
                max(4, self.prompt_lookup_min or 0) if _count(self.prompt_lookup_min) else 4,
            ),
            (
                "prompt_lookup_min",
                "ngram",
                min(2, self.prompt_lookup_max or 2) if _count(self.prompt_lookup_max) else 2,
            ),
            ("num_experts_per_tok", "self", 1),
        ):
            if self.method == owner and getattr(self, name) is None:
                put(name, default)
        for name in (
            "num_speculative_tokens",
            *(n for n in owners if n != "model" and getattr(self, n) is not None),
        ):
            value = getattr(self, name)
            require(_count(value), f"{where}{name} must be an int of at least 1, got {brief(value)}")
        drafts = self.num_speculative_tokens
        require(
            drafts <= MOST_DRAFTS,
            f"{where}num_speculative_tokens must be at most {MOST_DRAFTS}, got {brief(drafts)}",
        )
        require(
            (self.prompt_lookup_min or 0) <= (self.prompt_lookup_max or 0),
            f"{where}prompt_lookup_min ({self.prompt_lookup_min}) exceeds prompt_lookup_max ({self.prompt_lookup_max})",
        )
        require(
            isinstance(self.adaptive, bool),
            f"{where}adaptive must be True or False, got {brief(self.adaptive)}",
        )

    @classmethod
    def of(cls, value: Any) -> "SpeculativeConfig":
        """From a dict, as users write it (a model alone means method "draft_model"). Raises ConfigError."""
        if isinstance(value, SpeculativeConfig):
            return value
        ok = isinstance(value, Mapping)
        require(ok, f"speculative_config must be a dict or None, got {brief(value)}")
        known = [f.name for f in fields(cls)]
        unknown = [key for key in value if key not in known]
        if unknown:
            raise ConfigError(
                f"speculative_config has no option {', '.join(map(brief, unknown))}; known: {', '.join(known)}"
            )
        value = dict(value)
        if value.get("model") is not None:
            value.setdefault("method", "draft_model")
        for name in ("method", "num_speculative_tokens"):
            require(name in value, f"speculative_config needs {name}; got {brief(value)}")
        return cls(**value)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


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
    speculative_config: a dict of SpeculativeConfig's options, or None: {"method": "draft_model", "model": "quintet-draft",
        "num_speculative_tokens": 4}.
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
    speculative_config: SpeculativeConfig | dict[str, Any] | None = None

    def __post_init__(self):
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", SpeculativeConfig.of(self.speculative_config))
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
    def speculation(self) -> SpeculativeConfig | None:
        """speculative_config, checked."""
        return None if self.speculative_config is None else SpeculativeConfig.of(self.speculative_config)

    @property
    def long_prefill(self) -> int:
        return self.long_prefill_token_threshold or max(1, self.max_num_batched_tokens // 2)
