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
from tinymoe.bench.spec.measure import Arm, Timed, against_best, interleave, room, summary
from tinymoe.bench.spec.show import show
from tinymoe.bench.spec.texts import DOMAINS, prompts
from tinymoe.cache.devices import pick_device
from tinymoe.core.config import EngineConfig
from tinymoe.core.model_config import require
from tinymoe.engine.engine import Engine
from tinymoe.llm import resolve_model
from tinymoe.model.decoder import Decoder
from tinymoe.model.weights import load_model
from tinymoe.text import Tokenizer

TARGETS = {"moe": "quintet-moe", "dense": "quintet-dense"}
DRAFTS: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model", "model": "quintet-draft"},
    "ngram": {"method": "ngram"},
    "self": {"method": "self", "num_experts_per_tok": 1},
}
BLOCK = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, metavar="FILE", help="write the results JSON here")
    add("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS), metavar="T", help="moe, dense")
    add("--domains", nargs="+", default=list(DOMAINS), choices=DOMAINS, metavar="D", help="english, sums")
    add(
        "--drafts",
        nargs="+",
        default=list(DRAFTS),
        choices=list(DRAFTS),
        metavar="KIND",
        help="draft_model, ngram, self",
    )
    add("--requests", nargs="+", type=int, default=[1, 4, 16, 64], metavar="N", help="requests at once")
    add(
        "--depths",
        nargs="+",
        type=int,
        default=[0, 1, 2, 4, 8],
        metavar="N",
        help="fixed depths; the largest is also the most that adaptive depth takes",
    )
    add("--no-adaptive", action="store_true", help="fixed depths only")
    add("--tokens", type=int, default=64, help="tokens timed per request, as a mean")
    add(
        "--total",
        type=int,
        default=512,
        help="tokens timed of all requests together, at most (but 8 of each)",
    )
    add("--repeats", type=int, default=3, help="runs of each arm, interleaved")
    add("--threads", type=int, default=2, help="torch threads")
    add("--seed", type=int, default=0, help="seed of the sums and of everything synthetic")
    add(
        "--synthetic",
        nargs="+",
        type=float,
        metavar="RATE",
        help="random weights; drafts are accepted at these rates",
    )
    add(
        "--models",
        nargs="+",
        default=list(MODELS),
        choices=list(MODELS),
        metavar="MODEL",
        help="shapes for --synthetic",
    )
    add("--no-twin", action="store_true", help="with --synthetic: without the dense twins")
    add(
        "--draft-cost",
        type=float,
        default=0.0,
        help="with --synthetic: one drafted place, as a share of a plain step",
    )
    add(
        "--enforce-eager",
        action="store_true",
        help="with --synthetic: plain decoding without CUDA graphs, too",
    )
    add("--device", default="cuda", help="with --synthetic: where")  # fmt: skip


def check(a: argparse.Namespace) -> None:
    """Raises ConfigError, naming the option."""
    for name in ("requests", "tokens", "total", "repeats", "threads"):
        values = getattr(a, name) if isinstance(getattr(a, name), list) else [getattr(a, name)]
        require(min(values) >= 1, f"--{name} must be at least 1, got {min(values)}")
    require(min(a.depths) >= 0 and max(a.depths) <= 32, f"--depths must be in 0..32, got {a.depths}")
    require(max(a.depths) >= 1, "--depths must hold one above 0: without drafts there is nothing to compare")
    require(a.seed >= 0, f"--seed must be at least 0, got {a.seed}")
    for rate in a.synthetic or ():
        require(0 <= rate <= 1, f"--synthetic takes acceptance rates in [0, 1], got {rate}")
    require(0 <= a.draft_cost <= 1, f"--draft-cost is a share of a plain step in [0, 1], got {a.draft_cost}")
    require(
        bool(a.synthetic) or not (a.draft_cost or a.enforce_eager or a.no_twin),
        "--draft-cost, --enforce-eager and --no-twin belong to --synthetic",
    )
    possible = [d for d in a.drafts for t in a.targets if d != "self" or t == "moe"]
    require(bool(a.synthetic or possible), "--drafts self needs --targets moe: a dense model has no experts to leave out")  # fmt: skip


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
            arguments.out, command=command(arguments), rows=rows, controls=controls, ceilings=limits
        )
    show(rows, controls)
    return 0


def command(a: argparse.Namespace) -> str:
    """The line that repeats the measurement."""
    words = ["tinymoe bench spec"]
    lists = [
        "requests",
        "depths",
        *(["synthetic", "models"] if a.synthetic else ["targets", "domains", "drafts"]),
    ]
    for name in lists:
        words += [f"--{name}", *map(str, getattr(a, name))]
    for name in (
        "tokens",
        "total",
        "repeats",
        "threads",
        "seed",
        *(["draft_cost", "device"] if a.synthetic else []),
    ):
        words += [f"--{name.replace('_', '-')}", str(getattr(a, name))]
    for name in ("no_adaptive", "no_twin", "enforce_eager"):
        words += [f"--{name.replace('_', '-')}"] if getattr(a, name) else []
    return " ".join([*words, *(["--out", str(a.out)] if a.out else [])])  # fmt: skip


def tokens_of(a: argparse.Namespace, requests: int) -> int:
    """Tokens timed per request: fewer where there are many."""
    return min(a.tokens, max(8, a.total // requests))


def depths_of(a: argparse.Namespace) -> list[int | None]:
    return [*sorted(set(a.depths)), *([] if a.no_adaptive else [None])]


def sizes(cells: dict[int, list[list[int]]], a: argparse.Namespace, model: Decoder) -> dict[str, Any]:
    """Engine options with room for the largest of the cells {requests: prompts}."""
    most = {n: room(p, tokens_of(a, n), max(a.depths)) for n, p in cells.items()}
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
        cells = {n: prompts(domain, n, a.seed, tokenizer) for n in a.requests}
        options = sizes(cells, a, model)
        arms = [Arm("plain", Engine(model, EngineConfig(**options)), None, False)]
        kinds: dict[str, str] = {}
        for kind in drafts:
            engines = [
                Engine(
                    model,
                    EngineConfig(speculative_config=speculation(kind, adaptive, max(a.depths)), **options),
                    draft=dense if kind == "draft_model" else None,
                )
                for adaptive in (False, True)
            ]
            mine = [Arm(f"{kind} {depth}", engines[depth is None], depth) for depth in depths_of(a)]
            kinds |= {arm.name: kind for arm in mine}
            arms += mine
        for n, ids in cells.items():
            runs = interleave(arms, ids, tokens_of(a, n), options["max_model_len"], a.repeats)
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
                rows += run_shape(label, load_model(folder, "auto", device, "dummy"), a)
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    return rows


def run_shape(label: str, model: Decoder, a: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one model with random weights, over requests and rates."""
    vocab = model.config.vocab_size
    cells = {n: prompts_of(Workload(n, 64, 1), vocab, a.seed + n) for n in a.requests}
    options = sizes(cells, a, model) | {"enable_prefix_caching": False, "enforce_eager": a.enforce_eager}
    plain = Arm("plain", Engine(model, EngineConfig(**options)), None, False)
    engines = [synthetic.guessing_engine(model, max(a.depths), free, **options) for free in (False, True)]
    arms = [plain, *(Arm(f"coin {depth}", engines[depth is None], depth) for depth in depths_of(a))]
    rows = []
    for rate in a.synthetic:
        for engine in engines:
            synthetic.set_coin(engine, rate, a.seed)
        label_of = {"draft": "coin", "forced_acceptance": rate, "draft_cost": a.draft_cost}
        labels = dict.fromkeys([arm.name for arm in arms], label_of)
        for n, ids in cells.items():
            tokens, most = tokens_of(a, n), options["max_model_len"]
            if a.draft_cost:
                step = interleave([plain], ids, tokens, most, 1)["plain"][0]
                synthetic.set_draft_cost(engines, a.draft_cost * step.seconds / step.steps)
            runs = interleave(arms, ids, tokens, most, a.repeats)
            about = {"model": label, "domain": "random", "requests": n, "synthetic": True}
            rows += rows_of(runs, arms, labels, about, model, a)
    for row in rows:
        row["same_as_plain"] = None  # a coin decided
    return rows
