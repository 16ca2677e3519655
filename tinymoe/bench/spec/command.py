"""Speculative decoding, measured: kinds of drafts by depth by requests at once, each beside plain decoding and its bound.

On the CPU the bundled pair speaks for itself, quintet-dense being the control without experts. With --synthetic: published
shapes with random weights and acceptance by decree (tinymoe.bench.spec.synthetic), each with a dense twin. How a run is
timed, and what the bound means, stands in tinymoe.bench.spec.measure.
"""

import argparse
import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tinymoe.bench.gpu.e2e.models import MODELS, Workload, prompts_of
from tinymoe.bench.gpu.moe import ceilings
from tinymoe.bench.results import write_results
from tinymoe.bench.spec import synthetic
from tinymoe.bench.spec.measure import Arm, Timed, against_best, decode, interleave, room, summary
from tinymoe.bench.spec.options import (
    DRAFTS,
    TARGETS,
    add_arguments,
    check,
    command_line,
    depths_of,
    tokens_of,
)
from tinymoe.bench.spec.show import show
from tinymoe.bench.spec.texts import prompts
from tinymoe.cache.devices import pick_device
from tinymoe.core.config import EngineConfig
from tinymoe.core.model_config import require
from tinymoe.engine.engine import Engine
from tinymoe.llm import resolve_model
from tinymoe.model.decoder import Decoder
from tinymoe.model.weights import load_model
from tinymoe.text import Tokenizer

__all__ = ["add_arguments", "run"]
BLOCK = 16
TURN_S = 0.03  # seconds of one arm before the next one's turn, on a CPU
TEXTS = 8  # that every figure sees at least: one text is easier to guess than another
Cells = dict[int, list[list[list[int]]]]  # requests at once -> sets of so many prompts, one set a run


def run(arguments: argparse.Namespace) -> int:
    check(arguments)
    torch.set_num_threads(arguments.threads)
    if arguments.synthetic:
        rows = run_synthetic(arguments, MODELS)
    else:
        rows = [row for target in arguments.targets for row in run_bundled(target, arguments)]
    controls = against_best(rows)
    if arguments.out:
        limits = ceilings() if rows[0]["device"] == "cuda" else {"threads": arguments.threads}
        write_results(
            arguments.out, command=command_line(arguments), rows=rows, controls=controls, ceilings=limits
        )
    show(rows, controls)
    return 0


def sizes(cells: Cells, a: argparse.Namespace, model: Decoder) -> dict[str, Any]:
    """Engine options with room for the largest of the cells."""
    most = {
        n: room([p for one in sets for p in one], tokens_of(a, n), max(a.depths)) for n, sets in cells.items()
    }
    limit = model.config.max_position_embeddings
    longest = max(most.values())
    require(longest <= limit, f"--tokens {a.tokens} at depth {max(a.depths)} may need sequences of {longest} tokens, and the model takes {limit}: lower one of them")  # fmt: skip
    blocks = max(n * (-(-length // BLOCK) + 1) for n, length in most.items()) + 8
    return {"num_blocks": blocks, "block_size": BLOCK, "max_num_seqs": max(cells), "max_model_len": longest}


def run_bundled(target: str, a: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one bundled target, over domains, requests and drafts."""
    folder = resolve_model(TARGETS[target])
    model, tokenizer = load_model(folder, "float32"), Tokenizer(folder)
    drafts = [d for d in a.drafts if d != "self" or model.config.is_moe]
    dense = load_model(resolve_model("quintet-draft"), "float32") if "draft_model" in drafts else None
    rows = []
    for domain in a.domains:
        cells = {}
        for n in a.requests:
            runs_of = max(a.repeats, -(-TEXTS // n))
            every = prompts(domain, n * runs_of, a.seed, tokenizer)
            cells[n] = [every[i * n : (i + 1) * n] for i in range(runs_of)]
        options = sizes(cells, a, model)
        arms = [Arm("plain", Engine(model, EngineConfig(**options)), None, False)]
        kinds: dict[str, str] = {}
        for kind in drafts:
            draft = dense if kind == "draft_model" else None
            mine = []
            for depth in depths_of(a):  # an engine each: they take turns
                guess = speculation(kind, depth is None, max(a.depths))
                config = EngineConfig(speculative_config=guess, **options)
                mine.append(Arm(f"{kind} {depth}", Engine(model, config, draft=draft), depth))
            kinds |= {arm.name: kind for arm in mine}
            arms += mine
        for n, sets in cells.items():
            runs = interleave(arms, sets, tokens_of(a, n), options["max_model_len"], TURN_S)
            about = {"model": TARGETS[target], "domain": domain, "requests": n, "synthetic": False}
            rows += rows_of(
                runs, arms, {name: {"draft": kind} for name, kind in kinds.items()}, about, model, a
            )
    return rows


def speculation(kind: str, adaptive: bool, most: int) -> dict[str, Any]:
    return {**DRAFTS[kind], "num_speculative_tokens": most, "adaptive": adaptive}


def rows_of(
    runs: dict[str, list[Timed]],
    arms: list[Arm],
    labels: dict[str, dict[str, Any]],
    about: dict[str, Any],
    model: Decoder,
    a: argparse.Namespace,
) -> list[dict[str, Any]]:
    """One row per arm that speculates; also printed in short, since a whole run takes minutes."""
    layers = sum(layer.moe is not None for layer in model.config.layers)
    weight = model.norm.weight
    rows = []
    for arm in arms[1:]:
        measured = summary(runs[arm.name], runs["plain"], layers)
        rows.append({
            "target": "moe" if layers else "dense", **about, **labels[arm.name], "depth": arm.depth,
            "adaptive": arm.depth is None, **measured, "tokens": tokens_of(a, about["requests"]), "mode": "greedy",
            "dtype": str(weight.dtype).removeprefix("torch."), "seed": a.seed, "device": weight.device.type,
        })  # fmt: skip
        row = rows[-1]
        print(
            f"{row['model']} {row['domain']} {row['requests']} {arm.name}: {row['tok_s']:.0f} tok/s, "
            f"{row['speedup']['median']:.2f} x plain, {row['bound_share']['median']:.3f} of the bound",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    return rows


def run_synthetic(a: argparse.Namespace, shapes: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of published shapes and their dense twins."""
    device = pick_device(a.device)
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for name in a.models:
            configs = {name: shapes[name]}
            if not a.no_twin:
                configs[f"{name} dense twin"] = synthetic.twin(shapes[name])
            for label, config in configs.items():
                folder = synthetic.write_folder(config, Path(root) / label.replace(" ", "-"))
                draft = None
                if a.draft_layers:
                    small = synthetic.draft_config(config, a.draft_layers)
                    there = synthetic.write_folder(small, folder / "draft")
                    draft = synthetic.tell_apart(load_model(there, "auto", device, "dummy"), a.seed + 1)
                model = synthetic.tell_apart(load_model(folder, "auto", device, "dummy"), a.seed)
                rows += run_shape(label, model, draft, a)
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    return rows


def run_shape(
    label: str, model: Decoder, draft: Decoder | None, a: argparse.Namespace
) -> list[dict[str, Any]]:
    """Rows of one model with random weights, over requests and rates."""
    vocab = model.config.vocab_size
    cells = {
        n: [prompts_of(Workload(n, 64, 1), vocab, a.seed + n + 1000 * i) for i in range(a.repeats)]
        for n in a.requests
    }
    options = sizes(cells, a, model) | {"enable_prefix_caching": False, "enforce_eager": a.enforce_eager}
    plain = Arm("plain", Engine(model, EngineConfig(**options)), None, False)
    engines = [
        synthetic.guessing_engine(model, max(a.depths), free, draft, **options) for free in (False, True)
    ]
    arms = [plain, *(Arm(f"coin {depth}", engines[depth is None], depth) for depth in depths_of(a))]
    rows = []
    for rate in a.synthetic:
        for engine in engines:
            synthetic.set_coin(engine, rate, a.seed)
        label_of = {
            "draft": "coin", "forced_acceptance": rate, "draft_cost": a.draft_cost, "draft_layers": a.draft_layers,
        }  # fmt: skip
        labels = dict.fromkeys([arm.name for arm in arms], label_of)
        for n, sets in cells.items():
            tokens, most = tokens_of(a, n), options["max_model_len"]
            if a.draft_cost:
                step = decode(plain, sets[0], tokens, most)
                synthetic.set_draft_cost(engines, a.draft_cost * step.seconds / step.steps)
            runs = interleave(arms, sets, tokens, most)
            about = {"model": label, "domain": "random", "requests": n, "synthetic": True}
            rows += rows_of(runs, arms, labels, about, model, a)
    for row in rows:
        row["same_as_plain"] = None  # a coin decided
    return rows
