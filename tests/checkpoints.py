"""Tiny random checkpoints of every family, made by transformers, and transformers' verdict on each.

CASES[name](root) writes the folder root/name and returns it; `folder(name)` makes each once per process, and
`judge(name)` says what transformers computes from it. All parameters are random, also those that start as zeros or
ones (norms, biases, the selection bias), where a bug would hide.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

NEW_TOKENS = 64
PROMPT_LENGTHS = (1, 9, 23)
SIZES = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
# No end-of-sequence token: continuations have to run to their full length.
IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
E5 = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64, "rope_theta": 500.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1000.0}
DOTS = {"n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_shared_experts": 2}
DOTS |= {"sliding_window": None}


@dataclass(frozen=True)
class Case:
    """One model: options over SIZES, the seed of its weights, whether transformers saves its own fused form."""

    model_type: str
    options: dict[str, Any]
    seed: int
    fused: bool


def case(model_type: str, *, seed: int = 0, fused: bool = False, **options: Any) -> Case:
    return Case(model_type, options, seed, fused)


def _cases() -> dict[str, Case]:
    wide = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 20}
    mscale = {**YARN, "mscale": 1.3, "mscale_all_dim": 0.6, "truncate": False}
    betas = {**YARN, "beta_fast": 8, "beta_slow": 2, "attention_factor": 1.7}
    mixed = ["sliding_attention", "full_attention", "sliding_attention"]
    window = {"use_sliding_window": True, "sliding_window": 5}
    shared = {**E5, "shared_expert_intermediate_size": 20}
    groups = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    return {
        "llama": case("llama"),
        "llama-bias-tied-wide-heads": case("llama", **wide),
        "llama-gelu-mha": case("llama", hidden_act="gelu", num_key_value_heads=4, rms_norm_eps=1e-2),
        "llama-rope-linear": case("llama", rope_parameters={"rope_type": "linear", "factor": 3.0}),
        "llama-rope-llama3": case("llama", rope_parameters=LLAMA3),
        "llama-rope-yarn": case("llama", rope_parameters=YARN),
        "llama-rope-yarn-mscale": case("llama", rope_parameters=mscale, seed=1),
        "qwen3-rope-yarn-betas": case("qwen3", head_dim=16, rope_parameters=betas),
        "mistral": case("mistral", sliding_window=None, head_dim=10),
        "mistral-window": case("mistral", sliding_window=5),
        "qwen2": case("qwen2", tie_word_embeddings=True),
        "qwen2-upper-window": case("qwen2", max_window_layers=1, **window),
        "qwen3": case("qwen3", head_dim=16, tie_word_embeddings=True),
        "qwen3-bias-layer-types": case("qwen3", head_dim=8, attention_bias=True, layer_types=mixed, **window),
        "mixtral": case("mixtral", num_local_experts=5, num_experts_per_tok=2),
        "mixtral-top1-tied": case(
            "mixtral", num_local_experts=3, num_experts_per_tok=1, tie_word_embeddings=True, head_dim=8
        ),
        "mixtral-all-window-fused": case(
            "mixtral", num_local_experts=4, num_experts_per_tok=4, sliding_window=7, seed=1, fused=True
        ),
        "qwen2_moe": case("qwen2_moe", **shared),
        "qwen2_moe-sparse-norm": case(
            "qwen2_moe",
            **shared,
            norm_topk_prob=True,
            num_hidden_layers=4,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            qkv_bias=False,
        ),
        "qwen2_moe-alternating-window": case("qwen2_moe", max_window_layers=2, **shared, **window),
        "qwen3_moe": case("qwen3_moe", **E5, norm_topk_prob=True, head_dim=16, tie_word_embeddings=True),
        "qwen3_moe-top1": case(
            "qwen3_moe", **E5 | {"num_experts": 7, "num_experts_per_tok": 1}, attention_bias=True
        ),
        "qwen3_moe-all-fused": case("qwen3_moe", **E5 | {"num_experts_per_tok": 5}, fused=True),
        "qwen3_moe-sparse-window": case(
            "qwen3_moe", **E5, decoder_sparse_step=2, mlp_only_layers=[0], **window
        ),
        "qwen3_moe-dense-only": case("qwen3_moe", **E5, mlp_only_layers=[0, 1, 2]),
        "olmoe": case("olmoe", num_experts=9, num_experts_per_tok=4),
        "olmoe-clip-norm-bias": case(
            "olmoe",
            num_experts=4,
            num_experts_per_tok=1,
            clip_qkv=0.7,
            norm_topk_prob=True,
            attention_bias=True,
        ),
        "dots1-groups": case("dots1", **DOTS, **groups, first_k_dense_replace=1),
        "dots1-top1": case(
            "dots1", **DOTS | {"n_routed_experts": 7, "n_shared_experts": 1, "num_experts_per_tok": 1}
        ),
        "dots1-all-window-bias": case(
            "dots1",
            **DOTS | {"n_routed_experts": 6, "num_experts_per_tok": 6, "sliding_window": 5},
            n_group=3,
            topk_group=3,
            max_window_layers=1,
            attention_bias=True,
        ),
    }


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Every parameter and saved buffer from one generator, wide enough that greedy choices are decisive."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict(keep_vars=True).items():
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            tensor.copy_(1 + 0.3 * noise)
        elif name.endswith("bias"):
            tensor.copy_(0.3 * noise)
        else:
            tensor.copy_(0.25 * noise)


def write(case: Case, folder: Path) -> Path:
    config_class = transformers.CONFIG_MAPPING[case.model_type]
    config = config_class(**{**SIZES, **IDS, **case.options})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, case.seed)
    model.save_pretrained(folder, save_original_format=not case.fused)
    return folder


CASES: dict[str, Callable[[Path], Path]] = {
    name: partial(lambda case, name, root: write(case, Path(root) / name), case, name)
    for name, case in _cases().items()
}


@cache
def _root() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="tinymoe-checkpoints-")  # removed when the process ends


@cache
def folder(name: str) -> Path:
    """The folder of a case, made once per process. Do not change what is in it."""
    return CASES[name](Path(_root().name))


def prompts(vocab_size: int, lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


@dataclass(frozen=True)
class Verdict:
    """What transformers computes: for each prompt its logits [T, V] and its greedy continuation."""

    prompts: list[list[int]]
    logits: list[torch.Tensor]
    continuations: list[list[int]]


@torch.no_grad()
def verdict(path: Path, new_tokens: int = NEW_TOKENS) -> Verdict:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    asked = prompts(model.config.vocab_size)
    rows = [torch.tensor([prompt]) for prompt in asked]
    logits = [model(row).logits[0] for row in rows]
    greedy = partial(model.generate, max_new_tokens=new_tokens, do_sample=False)
    out = [greedy(row, attention_mask=torch.ones_like(row))[0, row.shape[1] :].tolist() for row in rows]
    return Verdict(asked, logits, out)


@cache
def judge(name: str) -> Verdict:
    return verdict(folder(name))
