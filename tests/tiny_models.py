"""Small random models of every shape that the engine serves, and the plain loop that says what they compute.

The judge knows no cache, no batch and no scheduler: it runs the whole sequence again for every token, over a plain
causal attention. Prompts are chosen so that its way is decisive: a last bit that differs cannot turn a choice.
"""

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

import tinymoe.zoo
from tinymoe.core.config import EngineConfig
from tinymoe.core.model_config import LayerConfig, ModelConfig, MoEConfig
from tinymoe.core.outputs import RequestOutput
from tinymoe.core.params import SamplingParams
from tinymoe.engine.engine import Engine
from tinymoe.model.attention import CausalAttend
from tinymoe.model.decoder import Decoder
from tinymoe.model.weights import load_model

VOCAB, NEW = 61, 12
BUNDLED = Path(tinymoe.zoo.__file__).parent / "quintet-moe"


def _config(layers, **options) -> ModelConfig:
    base = {
        "model_type": "random",
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    base |= {"head_dim": 8, "max_position_embeddings": 128}
    return ModelConfig(**{**base, **options}, layers=tuple(layers))


def _moe(**options) -> LayerConfig:
    window = options.pop("sliding_window", None)
    base = {"num_experts": 5, "top_k": 2, "intermediate_size": 16}
    return LayerConfig(moe=MoEConfig(**{**base, **options}), sliding_window=window)


CONFIGS = {
    "dense": _config(
        [LayerConfig(intermediate_size=32)] * 2, qkv_bias=True, mlp_bias=True, num_key_value_heads=4
    ),
    "moe": _config([_moe()] * 2, qk_norm="head", tie_word_embeddings=True),
    "mixed": _config(
        [
            LayerConfig(intermediate_size=32),
            _moe(shared_intermediate_size=12, shared_gate=True, norm_topk_prob=False),
            _moe(num_experts=6, top_k=3, scoring="sigmoid", selection_bias=True, n_group=3, topk_group=2),
        ],
        attention_output_bias=True,
    ),
    "window": _config(
        [_moe(top_k=1, sliding_window=5), _moe(), _moe(sliding_window=9)], num_key_value_heads=1
    ),
    "full": _config([_moe(num_experts=3, top_k=3)] * 2, qk_norm="full", clip_qkv=1.5, head_dim=6),
}
NAMES = [*CONFIGS, *(["quintet-moe"] if (BUNDLED / "model.safetensors").exists() else [])]


def build(name: str) -> Decoder:
    """A model of one's own, to break at will."""
    if name == "quintet-moe":
        return load_model(BUNDLED, dtype="float32").eval()
    model = Decoder(CONFIGS[name]).init_weights(0.35, seed=sorted(CONFIGS).index(name))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias") or "norm" in parameter_name:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@cache
def model(name: str) -> Decoder:
    """The shared one: read only."""
    return build(name)


class Routes:
    """Experts and the narrowest choice of every MoE layer of one forward pass."""

    def __init__(self):
        self.ids: dict[int, torch.Tensor] = {}
        self.gap = float("inf")

    def route(self, layer, logits_TE, ids_TK, weights_TK):
        self.ids[layer] = ids_TK
        scores = logits_TE.sort(-1, descending=True).values
        if ids_TK.shape[1] < scores.shape[1]:
            self.gap = min(self.gap, float((scores[:, :-1] - scores[:, 1:]).min()))


@torch.inference_mode()
def logits_of(decoder: Decoder, ids: list[int], routes: Routes | None = None) -> torch.Tensor:
    """float32 [T, V], the whole sequence at once."""
    attend = CausalAttend(1, len(ids), decoder.config)
    return decoder(torch.tensor(ids), torch.arange(len(ids)), attend, routes)


@dataclass(frozen=True)
class Judged:
    """A prompt, its greedy answer, the logits of every position of both, experts [tokens - 1, L, K], narrowest gap."""

    prompt: list[int]
    answer: list[int]
    logits: torch.Tensor
    experts: dict[int, torch.Tensor]
    gap: float


def judge(decoder: Decoder, prompt: list[int], new: int = NEW) -> Judged:
    ids, gap = list(prompt), float("inf")
    for _ in range(new):
        top = logits_of(decoder, ids)[-1].topk(2)
        gap = min(gap, float(top.values[0] - top.values[1]))
        ids.append(int(top.indices[0]))
    routes = Routes()
    logits = logits_of(decoder, ids[:-1], routes)
    return Judged(list(prompt), ids[len(prompt) :], logits, routes.ids, min(gap, routes.gap * 10))


@cache
def cases(name: str) -> list[Judged]:
    """Decisive prompts of ragged lengths; some begin alike."""
    r, found = random.Random(5), []
    decoder = model(name)
    for length in (1, 2, 7, 16, 17, 33, 40):
        for _ in range(200):
            start = found[-1].prompt[:16] if length > 20 else []
            prompt = start + [r.randrange(decoder.config.vocab_size) for _ in range(length - len(start))]
            judged = judge(decoder, prompt)
            if judged.gap > 1e-4:
                found.append(judged)
                break
        else:
            raise AssertionError(f"{name}: no decisive prompt of {length} tokens")
    return found


def engine(name_or_model: str | Decoder, eos=(), **options) -> Engine:
    decoder = model(name_or_model) if isinstance(name_or_model, str) else name_or_model
    return Engine(decoder, EngineConfig(**{"max_model_len": 128, **options}), eos_token_ids=eos)


def finish(engine: Engine) -> dict[str, RequestOutput]:
    """Step to the end; the last output of every request. No page may be left behind."""
    last = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output
    pool = engine.blocks.pool
    assert pool.num_free == pool.num_blocks
    assert not pool.refs.any()
    return last


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [c.token_ids for c in output.outputs]


GREEDY = SamplingParams(temperature=0, max_tokens=NEW)


def seeded(seed: int, **options) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.9, "seed": seed, "max_tokens": NEW, **options})


@cache
def alone(name: str, index: int, params_key: int) -> list[int]:
    """What a seeded request of case `index` draws in an engine of its own."""
    one = engine(name)
    one.add_request("alone", cases(name)[index].prompt, seeded(params_key))
    return tokens_of(finish(one)["alone"])[0]
