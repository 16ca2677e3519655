"""Routing traces: which experts every token of every engine step visited, recorded on a CPU and replayed on a GPU.

A trace is a results file whose rows are steps: {"model", "experts", "top_k", "load" (requests of that run), "step",
"tokens", "layers": one string a layer}. An expert is one hexadecimal digit, a token's K experts lie side by side.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tinymoe import LLM, SamplingParams
from tinymoe.bench.results import read_results, write_results
from tinymoe.core.model_config import require

ROOT = Path(__file__).resolve().parents[4]
LOADS = (1, 3, 10, 32, 96, 256)  # requests at once
BUDGET = 512  # tokens of one step, at most
FIRST, LATER = 3, 7  # steps kept of each run: while prompts come in, and after they have


class Step(NamedTuple):
    """ids [L, T, K] of one step."""

    tokens: int
    ids_LTK: np.ndarray

    def loads(self, num_experts: int) -> np.ndarray:
        """Visits [L, E]."""
        return np.stack([np.bincount(ids.ravel(), minlength=num_experts) for ids in self.ids_LTK])


class Trace(NamedTuple):
    experts: int
    top_k: int
    steps: list[Step]


def record(path: Path, command: str, model: str = "quintet-moe", seed: int = 0) -> None:
    """Serve the passages of notebook 02 at each of LOADS and write what the router chose. Raises ConfigError for a model
    with more than 16 experts, or layers that differ."""
    passages = json.loads((ROOT / "notebooks" / "passages.json").read_text())["passages"]
    texts = [text for kind in passages.values() for text in kind]
    rows: list[dict[str, Any]] = []
    for load in LOADS:
        llm = LLM(model, device="cpu", max_num_seqs=max(LOADS), max_num_batched_tokens=BUDGET, seed=seed)
        moe = [layer.moe for layer in llm.model_config.layers if layer.moe]
        shapes = {(layer.num_experts, layer.top_k) for layer in moe}
        require(len(shapes) == 1 and max(shapes)[0] <= 16, f"a trace holds one kind of layer of at most 16 experts, got {shapes}")  # fmt: skip
        (experts, top_k) = shapes.pop()
        tokenizer = llm.get_tokenizer()
        prompts = []
        for i in range(load):  # of different lengths, none equal to another's beginning
            ids = tokenizer.encode(texts[i % len(texts)])
            start = 7 * (i // len(texts)) % max(1, len(ids) - 8)
            prompts.append({"prompt_token_ids": ids[start : start + 16 + 5 * i % 48]})
        params = [SamplingParams(temperature=1.0, seed=seed + i, max_tokens=12 + i % 9) for i in range(load)]
        with llm.engine.trace.record() as events:
            llm.generate(prompts, params)
        steps = steps_of(events.of("route"))
        settled = next((i for i, step in enumerate(steps) if step.tokens <= load), 0)
        first = max(FIRST, settled)
        kept = [*range(min(FIRST, len(steps))), *range(first, min(first + LATER, len(steps)))]
        for i in kept:
            layers = ["".join(f"{e:x}" for e in ids.ravel()) for ids in steps[i].ids_LTK]
            rows.append({"model": model, "experts": experts, "top_k": top_k, "load": load, "step": i, "tokens": steps[i].tokens, "layers": layers})  # fmt: skip
    write_results(path, command=command, rows=rows)


def steps_of(events) -> list[Step]:
    """Route events of an engine -> its steps."""
    steps = []
    for _, batch in events.steps():
        layers: dict[int, list[tuple[int, ...]]] = {}
        for event in batch:
            layers.setdefault(event.layer, []).append(event.experts)
        ids = np.array([layers[layer] for layer in sorted(layers)])
        steps.append(Step(ids.shape[1], ids))
    return steps


def read(path: Path) -> Trace:
    """Raises ResultsError or ConfigError, naming the row, for a file that is no trace."""
    rows = read_results(path)["rows"]
    steps = []
    kinds = {(row.get("experts"), row.get("top_k")) for row in rows}
    require(len(kinds) == 1 and None not in kinds.copy().pop(), f"{path.name}: every row has the same experts and top_k, got {kinds}")  # fmt: skip
    (experts, top_k) = kinds.pop()
    for i, row in enumerate(rows):
        tokens, layers = row.get("tokens"), row.get("layers")
        ok = type(tokens) is int and tokens >= 1 and isinstance(layers, list) and bool(layers)
        ok = ok and all(isinstance(s, str) and len(s) == tokens * top_k for s in layers)
        require(ok, f"{path.name}: rows[{i}] must have tokens and, for each layer, tokens * {top_k} hexadecimal digits")  # fmt: skip
        try:
            ids = np.array([[int(digit, 16) for digit in s] for s in layers]).reshape(-1, tokens, top_k)
        except ValueError:
            ids = np.full((1, 1, 1), experts)
        require(bool((ids < experts).all()), f"{path.name}: rows[{i}] names an expert outside 0..{experts - 1}")  # fmt: skip
        steps.append(Step(tokens, ids))
    return Trace(experts, top_k, steps)
