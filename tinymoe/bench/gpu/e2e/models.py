"""Published shapes with random weights: what the end-to-end benchmarks serve, and the workloads that they serve to."""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

MODELS: dict[str, dict[str, Any]] = {
    "olmoe-1b-7b": {
        "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64,
        "num_experts_per_tok": 8, "norm_topk_prob": False, "vocab_size": 50304, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "eos_token_id": 50279, "pad_token_id": 1, "clip_qkv": None, "attention_bias": False,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "decoder_sparse_step": 1,
        "mlp_only_layers": [], "attention_bias": False, "eos_token_id": 151645, "bos_token_id": 151643,
    },
}  # fmt: skip
MAX_MODEL_LEN, MAX_NUM_SEQS = 4096, 256


class Workload(NamedTuple):
    """So many requests at once, tokens in and out of each."""

    requests: int
    tokens_in: int
    tokens_out: int


WORKLOADS = [
    Workload(1, 128, 256),
    Workload(8, 128, 256),
    Workload(64, 512, 256),
    Workload(256, 512, 256),
    Workload(1024, 512, 128),
    Workload(64, 2048, 16),
]


def write_config(name: str, folder: Path) -> Path:
    """A model folder with config.json only, to be filled with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[name]))
    return folder


def prompts_of(workload: Workload, vocab: int, seed: int) -> list[list[int]]:
    """Random ids; equal arguments give equal prompts."""
    rng = random.Random(seed)
    return [
        [rng.randrange(100, vocab - 100) for _ in range(workload.tokens_in)] for _ in range(workload.requests)
    ]
