"""What the saved models reach, with transformers as the judge, and what they were meant to reach."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from tinymoe.experts.balance import expert_counts
from tinymoe.train import evaluate
from tinymoe.train.corpus import SUMS
from tinymoe.train.tokenizer import token_lengths

MODELS = ("moe", "draft", "dense")


class Judge:
    """A saved folder as transformers loads it: a function from ids [S, L] to logits [S, L, V] that counts the experts chosen."""

    def __init__(self, folder: Path):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config = self.model.config
        self.is_moe = hasattr(config, "num_experts")
        shape = (config.num_hidden_layers, config.num_experts) if self.is_moe else (0, 0)
        self.counts_LE = torch.zeros(shape, dtype=torch.int64)

    def __call__(self, ids_SL: Tensor) -> Tensor:
        if not self.is_moe:
            return self.model(ids_SL, use_cache=False).logits
        out = self.model(ids_SL, use_cache=False, output_router_logits=True)
        for counts_E, logits_TE in zip(self.counts_LE, out.router_logits):
            chosen = logits_TE.topk(self.model.config.num_experts_per_tok).indices
            counts_E += expert_counts(chosen, counts_E.shape[0])
        return out.logits

    def loads(self) -> Tensor:
        """How often each expert was chosen since the last call: [L, E] int64."""
        counts_LE, self.counts_LE = self.counts_LE, torch.zeros_like(self.counts_LE)
        return counts_LE


def rounded(value: Any) -> Any:
    """Floats to four decimals, everywhere inside."""
    if isinstance(value, Mapping):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return round(value, 4) if isinstance(value, float) else value


def evaluations(
    judges: dict[str, Judge],
    tokenizer: Tokenizer,
    valid: dict[str, np.ndarray],
    weights: dict[str, float],
    problems: int,
    only: Sequence[str] = MODELS,
) -> dict[str, dict[str, Any]]:
    """What each of MODELS reaches. `valid`: token streams of the validation text; `weights`: of the domains in training,
    in which their loads are mixed. `only`: whom to measure; the draft is measured against the moe."""
    lengths, found = token_lengths(tokenizer), {}
    streams = {**valid, SUMS: evaluate.sums_stream(tokenizer, problems)}
    for name in only:
        judge = judges[name]
        judge.loads()
        bits, counts = {}, {}
        for domain, stream in tqdm(streams.items(), desc=f"quintet-{name}"):
            value = evaluate.bits_per_byte(judge, stream, lengths)
            counts[domain] = judge.loads()
            if domain != SUMS:  # operands are drawn at random: bits per byte would say little
                bits[domain] = value
        found[name] = {"bits_per_byte": bits, "sums": evaluate.sums_report(judge, tokenizer, problems)}
        if judge.is_moe:
            found[name]["load"] = evaluate.load_report(counts, weights)
    if "draft" not in only:
        return rounded(found)
    found["draft"]["acceptance"] = {
        domain: evaluate.acceptance_rate(judges["moe"], judges["draft"], stream)
        for domain, stream in tqdm(streams.items(), desc="acceptance")
    }
    found["draft"]["agreement"] = {
        domain: evaluate.agreement_rate(judges["moe"], judges["draft"], stream)
        for domain, stream in tqdm(streams.items(), desc="agreement")
    }
    return rounded(found)


def targets(found: dict[str, dict[str, Any]], draft_parameters: int, size: int) -> list[dict[str, Any]]:
    """What was to be reached, what was, and whether: {"what", "wanted", "got", "reached"} each."""
    moe, dense = found["moe"], found["dense"]
    above = {d: rounded(bits - dense["bits_per_byte"][d]) for d, bits in moe["bits_per_byte"].items()}
    rows: list[dict[str, Any]] = []

    def row(what: str, sign: str, bound: float, got: float) -> None:
        reached = got <= bound if sign == "<=" else got >= bound
        rows.append({"what": what, "wanted": f"{sign} {bound:,}", "got": got, "reached": reached})

    for domain, bound in {"english": 1.45, "german": 1.54, "python": 1.13}.items():
        row(f"{domain}, bits/byte", "<=", bound, moe["bits_per_byte"][domain])
    for domain, bound in {"english": -0.04, "german": -0.04, "python": -0.04, "verse": 0.05}.items():
        row(f"{domain}, bits/byte minus the control's", "<=", bound, above[domain])
    row("sums, share exact", ">=", 0.98, moe["sums"]["exact"])
    row("MaxVio of the worst layer", "<=", 0.35, max(moe["load"]["max_violation"]))
    row("dead experts", "<=", 0, len(moe["load"]["dead"]))
    row("draft: sampling acceptance on english", ">=", 0.64, found["draft"]["acceptance"]["english"])
    row("draft: parameters, in millions", "<=", 1.5, round(draft_parameters / 1e6, 2))
    row("bytes of the three folders", "<=", 34_000_000, size)
    return rows
