"""What `tinymoe bench spec` can be asked: options, their checks, and the line that asks the same again."""

import argparse
from pathlib import Path
from typing import Any

from tinymoe.bench.gpu.e2e.models import MODELS
from tinymoe.bench.spec.texts import DOMAINS
from tinymoe.core.model_config import require

TARGETS = {"moe": "quintet-moe", "dense": "quintet-dense"}
DRAFTS: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model", "model": "quintet-draft"},
    "ngram": {"method": "ngram"},
    "self": {"method": "self", "num_experts_per_tok": 1},
}


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
        help="fixed depths (0: could draft, and does not, as a placebo); the largest is also the most that adaptive depth takes",
    )
    add("--no-adaptive", action="store_true", help="fixed depths only")
    add("--tokens", type=int, default=48, help="tokens timed per request, as a mean")
    add(
        "--total",
        type=int,
        default=384,
        help="tokens timed of all requests together, at most (but 6 of each)",
    )
    add(
        "--repeats",
        type=int,
        default=3,
        help="runs of each arm, interleaved, with other prompts each time; more where 8 texts need them",
    )
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
        "--draft-layers",
        type=int,
        default=0,
        help="with --synthetic: drafts come from a dense model of so many layers, as wide as the target",
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
    require(a.draft_layers >= 0, f"--draft-layers must be at least 0, got {a.draft_layers}")
    require(
        not (a.draft_cost and a.draft_layers),
        "--draft-cost says what --draft-layers measures: give one of them",
    )
    require(
        bool(a.synthetic) or not (a.draft_cost or a.draft_layers or a.enforce_eager or a.no_twin),
        "--draft-cost, --draft-layers, --enforce-eager and --no-twin belong to --synthetic",
    )
    possible = [d for d in a.drafts for t in a.targets if d != "self" or t == "moe"]
    require(bool(a.synthetic or possible), "--drafts self needs --targets moe: a dense model has no experts to leave out")  # fmt: skip


def command_line(a: argparse.Namespace) -> str:
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
        *(["draft_cost", "draft_layers", "device"] if a.synthetic else []),
    ):
        words += [f"--{name.replace('_', '-')}", str(getattr(a, name))]
    for name in ("no_adaptive", "no_twin", "enforce_eager"):
        words += [f"--{name.replace('_', '-')}"] if getattr(a, name) else []
    return " ".join([*words, *(["--out", str(a.out)] if a.out else [])])  # fmt: skip


def tokens_of(a: argparse.Namespace, requests: int) -> int:
    """Tokens timed per request: fewer where there are many."""
    return min(a.tokens, max(6, a.total // requests))


def depths_of(a: argparse.Namespace) -> list[int | None]:
    return [*sorted(set(a.depths)), *([] if a.no_adaptive else [None])]
