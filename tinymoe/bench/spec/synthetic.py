"""Speculation with acceptance by decree, for models whose weights are random and would accept nothing: every row is marked
synthetic.

Drafts are random tokens, which cost nothing, or a stated share of a plain step for each place of the draft; or what a dense
model with random weights says, which is run like any draft model. The target verifies them in earnest, with all experts that
they route to, and samples behind each; then a seeded coin, not the target, says how many stay. So times are those of real
verification, and what the text would have been is not asked. The coin of a place in a text is the same at every depth, so
that all depths have the same luck. Random tokens of one sequence, through random routers, visit fewer distinct experts than
independent choices would, but (given `tell_apart`) many more than one token; how many is in the rows.
"""

import json
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinymoe.core.config import EngineConfig
from tinymoe.core.sequence import Chunk, Sequence
from tinymoe.engine.engine import Engine
from tinymoe.engine.sampling import Sampled
from tinymoe.engine.sampling.draws import Draw
from tinymoe.engine.sampling.plain import Run
from tinymoe.engine.spec.proposer import Proposer
from tinymoe.engine.spec.speculator import Speculator
from tinymoe.engine.spec.verify import leading_runs
from tinymoe.model.decoder import Decoder


class RandomDrafts(Proposer):
    """Proposes random ids, and lets pass_seconds go by for every place."""

    def __init__(self, engine: Engine, seed: int):
        config, model = engine.config, engine.runner.model
        super().__init__(config, model, None, engine.runner.storage, engine.blocks, engine.trace, ())
        self.vocab = model.config.vocab_size
        self.noise = np.random.default_rng(seed)
        self.pass_seconds = 0.0

    def most(self, seq: Sequence, limit: int) -> int:
        return limit

    def propose(self, counts: dict[Sequence, int]) -> None:
        end = time.perf_counter() + self.pass_seconds * max(counts.values())
        for seq, count in counts.items():
            seq.draft_token_ids = self.noise.integers(0, self.vocab, count).tolist()
        while time.perf_counter() < end:  # sleep() is too coarse for a draft's microseconds
            pass


class CoinSpeculator(Speculator):
    """Keeps each draft with chance `rate`, up to the first that is not kept. Coins belong to the seed of a request and to
    places in its text."""

    def __init__(self, engine: Engine, drafts: Proposer, rate: float, seed: int):
        self.drafts = drafts
        super().__init__(engine.config, drafts, engine.routes, engine.metrics, engine.max_model_len)
        self.rate, self.seed = rate, seed
        self._coins: dict[int, np.ndarray] = {}

    def coins(self, seq: Sequence) -> np.ndarray:
        """[max_model_len] in [0, 1): one for each place of its text."""
        if seq.seed not in self._coins:
            generator = np.random.default_rng((self.seed, 1, seq.seed))
            self._coins[seq.seed] = generator.random(self.max_model_len)
        return self._coins[seq.seed]

    @torch.inference_mode()
    def judge(self, draws: list[Draw], sampled: list[Sampled], logits_RV: Tensor | None) -> list[Run]:
        first = [draw for draw in draws if not draw.ahead]
        runs, at = [], 0
        for draw, kept in zip(first, self._tossed([draw.seq for draw in first])):
            seq, drafts = draw.seq, draw.seq.draft_token_ids
            runs.append(Run(seq, draw.index, [*map(Sampled, drafts[:kept]), sampled[at + kept]]))
            at += len(drafts) + 1
        return runs

    def _kept(self, chunks: Seq[Chunk], drafts: list[list[int]], tokens: list[int]) -> list[int]:
        return self._tossed([chunk.seq for chunk in chunks])

    def _tossed(self, seqs: list[Sequence]) -> list[int]:
        """How many drafts of each sequence the coins keep."""
        coins = [self.coins(seq)[seq.num_tokens :][: len(seq.draft_token_ids)] for seq in seqs]
        return leading_runs(np.concatenate(coins) < self.rate, list(map(len, coins)))


def guessing_engine(
    model: Decoder, depth: int, adaptive: bool, draft: Decoder | None = None, **options: Any
) -> Engine:
    """An engine for set_coin. draft: who proposes; None: nobody, the tokens are random."""
    # Without a draft the method only says that there is none; who really proposes comes with the coin.
    guess: dict[str, Any] = {"method": "ngram"}
    if draft is not None:
        guess = {"method": "draft_model", "model": "random weights", "acceptance": "coupled"}
    guess |= {"num_speculative_tokens": depth, "adaptive": adaptive}
    return Engine(model, EngineConfig(speculative_config=guess, **options), draft=draft)


@torch.no_grad()
def tell_apart(model: Decoder, seed: int) -> Decoder:
    """Give every token an embedding of N(0, 1). Returns the model.

    With weights of 0.02 an embedding is small beside what attention adds, which is nearly the same for all tokens of a
    sequence: they would all be routed alike, and a verification would visit hardly more experts than one token; and a draft
    would say one token again and again.
    """
    weight = model.embed.weight
    generator = torch.Generator(weight.device).manual_seed(seed)
    weight.normal_(0, 1, generator=generator)
    return model


def set_coin(engine: Engine, rate: float, seed: int) -> None:
    """From now on a coin accepts the engine's drafts; what it had learnt about depth is forgotten. No request may run."""
    assert isinstance(engine.spec, Speculator)
    drafts = engine.spec.proposer
    if drafts.drafter is None:
        drafts = RandomDrafts(engine, seed)
    engine.spec = CoinSpeculator(engine, drafts, rate, seed)


def set_draft_cost(engines: Seq[Engine], seconds: float) -> None:
    """What one place of a random draft costs from now on."""
    for engine in engines:
        if isinstance(engine.spec, CoinSpeculator) and isinstance(engine.spec.drafts, RandomDrafts):
            engine.spec.drafts.pass_seconds = seconds


def twin(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of a dense model that multiplies as many parameters a token (router and norms aside): the same attention,
    and one MLP as wide as the experts of a token together."""
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    width *= config.get("num_experts_per_tok", 1)
    kept = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
        "max_position_embeddings", "rms_norm_eps", "rope_theta", "hidden_act", "tie_word_embeddings", "torch_dtype",
    )  # fmt: skip
    return {
        **{name: config[name] for name in kept if name in config},
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "intermediate_size": width,
        "attention_bias": False,
    }


def draft_config(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """config.json of a draft for this model: the first layers of its dense twin."""
    return {**twin(config), "num_hidden_layers": layers}


def write_folder(config: dict[str, Any], folder: Path) -> Path:
    """A model folder with config.json only, to be filled with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
