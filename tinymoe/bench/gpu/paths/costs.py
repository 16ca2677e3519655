"""Every path through the experts over a grid of tokens and skews, timed on a GPU, and the cost model fitted to it.

Each cell draws its tokens and routes anew; a time is the median of CUDA-graph replays with the L2 cache flushed before
each, router included. Skew s: expert r is loved in proportion to 1 / r^s, so 0 spreads evenly.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinymoe.bench.gpu.moe import EVERY, SHAPES, Layer, draw, replay
from tinymoe.bench.results import timing, write_results
from tinymoe.experts.costs import CostModel, Measurement, features, fit, held_out, rows_of
from tinymoe.ops import gpu

GRID = (1, 4, 16, 64, 256, 1024, 4096)
DENSE_GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
SKEWS = (0.0, 0.7, 1.4, 2.8)
FITTED = (*SHAPES, "trace16@qwen3")

Timer = Callable[[str, Layer], float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--skews", nargs="+", type=float, default=list(SKEWS), help="with --fit: how unevenly routes spread"
    )


def grid_of(shape: str) -> Sequence[int]:
    """Numbers of tokens to measure; the trace's own shapes are measured at what a decode step may hold."""
    return DENSE_GRID if shape.startswith("trace16") else GRID


def timed(repeats: int) -> Timer:
    def time_path(path: str, layer: Layer) -> float:
        one = partial(gpu.expert_paths.run, path, layer.x, layer.logits, layer.gate_up, layer.down, layer.shape.top_k)  # fmt: skip
        samples = replay(one, repeats)
        return timing(samples)["median"] if samples else 0.0

    return time_path


def paths_for(tokens: int, experts: int, top_k: int) -> list[str]:
    return [p for p in gpu.expert_paths.PATHS if gpu.expert_paths.serves(p, tokens, experts, top_k)]


def routed(
    name: str, tokens: int, weights: tuple[Tensor, Tensor], skew: float, generator: torch.Generator
) -> Layer:
    """Fresh tokens, and logits that draw experts without replacement by their popularity (Gumbel top-k)."""
    s, device = EVERY[name], weights[0].device
    options: dict[str, Any] = {"device": device, "generator": generator}
    x = torch.randn(tokens, s.hidden, dtype=weights[0].dtype, **options)
    loved = torch.randperm(s.experts, **options) + 1  # not always the first ones
    noise = -torch.log(-torch.log(torch.rand(tokens, s.experts, **options).clamp(1e-7, 1 - 1e-7)))
    return Layer(s, x, noise - skew * torch.log(loved.float()), *weights)


def loads_of(layer: Layer) -> np.ndarray:
    ids = layer.logits.topk(layer.shape.top_k).indices.reshape(-1)
    return torch.bincount(ids, minlength=layer.shape.experts).cpu().numpy()


def measure(
    name: str,
    weights: tuple[Tensor, Tensor],
    time_path: Timer,
    *,
    tokens: Sequence[int],
    skews: Sequence[float],
    seed: int,
    paths: Callable[[int, int, int], list[str]] = paths_for,
) -> list[dict[str, Any]]:
    """Rows {"kind": "cost", "shape", "path", "tokens", "skew", "features", "us"}."""
    s, rows = EVERY[name], []
    for count in tokens:
        for skew in skews:
            generator = torch.Generator(weights[0].device).manual_seed(seed + 1000 * count + int(10 * skew))
            layer = routed(name, count, weights, skew, generator)
            loads_E = loads_of(layer)
            for path in paths(count, s.experts, s.top_k):
                rows.append({
                    "kind": "cost", "shape": name, "path": path, "tokens": count, "skew": skew,
                    "features": list(features(loads_E, count, rows_of(path))), "us": round(time_path(path, layer), 3),
                })  # fmt: skip
    return rows


def measurements(rows: Sequence[dict[str, Any]], shape: str) -> list[Measurement]:
    mine = [r for r in rows if r.get("kind") == "cost" and r["shape"] == shape]
    return [Measurement(r["path"], r["tokens"], tuple(r["features"]), r["us"]) for r in mine]


def fitted(rows: Sequence[dict[str, Any]], shape: str) -> tuple[CostModel, dict[str, Any]]:
    """The cost model of a shape, and how well each law predicts what it has not seen."""
    mine = measurements(rows, shape)
    errors = {law: held_out(mine, law) for law in ("time", "log")}
    model = fit(mine, min(errors, key=errors.__getitem__))
    told = {f"held_out_error_{law}": round(error, 4) for law, error in errors.items()}
    return model, {"kind": "fit", "shape": shape, "law": model.law, "measurements": len(mine), **told}


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> int:
    if not gpu.AVAILABLE:
        raise SystemExit("bench kernels needs a CUDA device and Triton; torch sees no such device here")
    names = FITTED if arguments.shapes == list(SHAPES) else arguments.shapes
    rows, models, fits = [], [], []
    for name in names:
        start = time.perf_counter()
        found = measure(
            name,
            draw(name, arguments.seed),
            timed(arguments.repeats),
            tokens=grid_of(name),
            skews=arguments.skews,
            seed=arguments.seed,
        )
        if not arguments.repeats:
            continue
        model, told = fitted(found, name)
        rows += found
        models += model.to_rows(name)
        fits.append(told)
        errors = ", ".join(f"{law} {told[f'held_out_error_{law}']:.1%}" for law in ("time", "log"))
        print(f"{name}: {len(found)} measurements in {time.perf_counter() - start:.0f} s; held-out error: {errors}", flush=True)  # fmt: skip
    if arguments.out and rows:
        write_results(
            arguments.out,
            command=f"tinymoe bench kernels --fit --repeats {arguments.repeats} --out {arguments.out}",
            rows=[*models, *rows],
            controls=fits,
            packages=["triton"],
        )
    return 0
