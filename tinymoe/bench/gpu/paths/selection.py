"""Choosing the expert path of each step by its routes: regret on a recorded trace, replayed at real widths on a GPU.

Every step of the trace is timed on every path, layer by layer, with the routes it really had. Regret is the time of the
chosen path, selection included, over that of the best path of that step, less one. Beside it stand what served engines do
(the best path for the number of tokens, measured with even routes), each single path, and choosing at random.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from tinymoe.bench.gpu.moe import TRACED, Layer, draw, replay
from tinymoe.bench.gpu.paths import costs, routes
from tinymoe.bench.results import timing, write_results
from tinymoe.experts.costs import CostModel, bucket_of
from tinymoe.experts.selection import Selector
from tinymoe.ops import gpu

TRACE = routes.ROOT / "book" / "results" / "routing_trace.json"
Times = Mapping[str, float]  # path -> microseconds of a step, all its layers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results JSON here")
    parser.add_argument("--trace", type=Path, default=TRACE, metavar="FILE", help="the recorded routes")
    parser.add_argument(
        "--record", action="store_true", help="record the routes of the bundled model on the CPU instead"
    )
    parser.add_argument("--shapes", nargs="+", default=["trace16@qwen3"], choices=TRACED, help="which widths")
    parser.add_argument("--skews", nargs="+", type=float, default=list(costs.SKEWS), help="of the fit's grid")
    parser.add_argument("--repeats", type=int, default=9, help="replays of each; 0 only compiles")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and inputs")


def by_tokens(rows: Sequence[dict[str, Any]], shape: str) -> dict[int, str]:
    """For each bucket the path that was fastest with even routes: what an engine tuned by the number of tokens takes."""
    found: dict[int, dict[str, list[float]]] = {}
    for r in rows:
        if r["shape"] == shape and r["skew"] == min(row["skew"] for row in rows):
            found.setdefault(bucket_of(r["tokens"]), {}).setdefault(r["path"], []).append(r["us"])
    return {b: min(paths, key=lambda path: float(np.mean(paths[path]))) for b, paths in found.items()}


def follow(
    selector: Selector, tokens_S: Sequence[int], loads_SLE: Sequence[np.ndarray], times_S: Sequence[Times]
) -> list[str]:
    """The path of every step, chosen before its routes are known. Raises KeyError for a path that was not timed."""
    chosen = []
    for tokens, loads_LE, times in zip(tokens_S, loads_SLE, times_S):
        path = selector.choose(tokens)
        times[path]
        chosen.append(path)
        selector.observe(tokens, loads_LE)
    return chosen


def selection_us(selector: Selector, tokens_S: Sequence[int], loads_SLE: Sequence[np.ndarray]) -> float:
    """Microseconds on this CPU of one choice and the update after it, median over rounds of the whole trace."""
    rounds = []
    for _ in range(20):
        start = time.perf_counter()
        for tokens, loads_LE in zip(tokens_S, loads_SLE):
            selector.choose(tokens)
            selector.observe(tokens, loads_LE)
        rounds.append((time.perf_counter() - start) / len(tokens_S) * 1e6)
    return float(np.median(rounds))


def evaluate(
    model: CostModel,
    tuned: Mapping[int, str],
    tokens_S: Sequence[int],
    loads_SLE: Sequence[np.ndarray],
    times_S: Sequence[Times],
    top_k: int,
    cost_us: float,
    planned_S: Sequence[float] | None = None,
) -> list[dict[str, Any]]:
    """One row a policy: mean, 95th percentile and worst regret against the per-step oracle, and the time of the whole
    trace over that of the best single path, less one. cost_us is added to every step of the selector."""
    experts = loads_SLE[0].shape[1]
    best_S = np.array([min(times.values()) for times in times_S])
    selector = Selector(model, experts, top_k)
    chosen = follow(selector, tokens_S, loads_SLE, times_S)
    hindsight = []  # the model, told this step's routes: what is left is the model's own error
    for tokens, loads_LE in zip(tokens_S, loads_SLE):
        predicted = selector.predict(tokens, loads_LE)
        hindsight.append(min(predicted, key=predicted.__getitem__))
    nearest = [min(tuned, key=lambda b: (abs(np.log2(b / bucket_of(t))), b)) for t in tokens_S]
    everywhere = [path for path in times_S[0] if all(path in times for times in times_S)]
    policies: dict[str, np.ndarray] = {
        "selector": np.array([times[path] for times, path in zip(times_S, chosen)]) + cost_us,
        "selector, told the routes": np.array([times[path] for times, path in zip(times_S, hindsight)]),
        "by tokens only": np.array([times[tuned[b]] for times, b in zip(times_S, nearest)]),
        "at random": np.array([np.mean(list(times.values())) for times in times_S]),
        **{f"always {path}": np.array([times[path] for times in times_S]) for path in everywhere},
    }
    if planned_S is not None:
        policies["planned tiles"] = np.array(planned_S)
    single = min(policies[f"always {path}"].sum() for path in everywhere)
    rows = []
    for name, us_S in policies.items():
        regret_S = us_S / best_S - 1
        rows.append({
            "kind": "regret", "policy": name, "mean_regret": float(regret_S.mean()),
            "p95_regret": float(np.percentile(regret_S, 95)), "worst_regret": float(regret_S.max()),
            "against_best_single": float(us_S.sum() / single - 1), "us": float(us_S.sum()),
        })  # fmt: skip
    rows[0] |= {"selection_us": cost_us, "switches": selector.switches, "steps": len(times_S)}
    return rows


def replayed(ids_TK: np.ndarray, name: str, weights, generator: torch.Generator) -> Layer:
    """Fresh tokens whose logits choose these experts, in this order."""
    s = TRACED[name]
    T = ids_TK.shape[0]
    options: dict[str, Any] = {"device": weights[0].device, "generator": generator}
    logits = -torch.rand(T, s.experts, **options) - 9
    order = torch.arange(s.top_k, 0, -1, device=logits.device).float().expand(T, -1)
    logits.scatter_(1, torch.from_numpy(ids_TK.astype(np.int64)).to(logits.device), order.contiguous())
    return Layer(s, torch.randn(T, s.hidden, dtype=weights[0].dtype, **options), logits, *weights)


def time_steps(
    name: str, weights, steps: Sequence[routes.Step], repeats: int, seed: int
) -> tuple[list[dict[str, float]], list[float]]:
    """Of every step: microseconds of each path, and of the tiles planned by the number of tokens, over all layers."""
    time_path, s = costs.timed(repeats), TRACED[name]
    times_S: list[dict[str, float]] = []
    planned_S: list[float] = []
    generator = torch.Generator(weights[0].device).manual_seed(seed)
    for step in steps:
        total = dict.fromkeys(costs.paths_for(step.tokens, s.experts, s.top_k), 0.0)
        planned = 0.0
        for ids_TK in step.ids_LTK:
            layer = replayed(ids_TK, name, weights, generator)
            for path in total:
                total[path] += time_path(path, layer)
            samples = replay(lambda: gpu.moe.fused_moe(layer.x, layer.logits, layer.gate_up, layer.down, s.top_k), repeats)  # noqa: B023  # fmt: skip
            planned += timing(samples)["median"] if samples else 0.0
        times_S.append(total)
        planned_S.append(planned)
    return times_S, planned_S


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> int:
    if arguments.record:
        routes.record(arguments.out or TRACE, f"tinymoe bench selection --record --out {arguments.out or TRACE.relative_to(routes.ROOT)}")  # fmt: skip
        return 0
    if not gpu.AVAILABLE:
        raise SystemExit("bench selection needs a CUDA device and Triton; torch sees no such device here")
    trace = routes.read(arguments.trace)
    tokens_S = [step.tokens for step in trace.steps]
    loads_SLE = [step.loads(trace.experts) for step in trace.steps]
    rows, controls, table = [], [], Table(title="Regret of choosing an expert path, selection included")
    for column in ("widths", "policy", "mean", "95 %", "worst", "against best single"):
        table.add_column(column, justify="right")
    for name in arguments.shapes:
        start, weights = time.perf_counter(), draw(name, arguments.seed)
        grid = costs.measure(
            name,
            weights,
            costs.timed(arguments.repeats),
            tokens=costs.grid_of(name),
            skews=arguments.skews,
            seed=arguments.seed,
        )
        middle = time.perf_counter()
        times_S, planned_S = time_steps(name, weights, trace.steps, arguments.repeats, arguments.seed)
        print(f"{name}: grid {middle - start:.0f} s, trace {time.perf_counter() - middle:.0f} s", flush=True)
        if not arguments.repeats:
            continue
        model, told = costs.fitted(grid, name)
        cost = selection_us(Selector(model, trace.experts, trace.top_k), tokens_S, loads_SLE)
        found = evaluate(
            model, by_tokens(grid, name), tokens_S, loads_SLE, times_S, trace.top_k, cost, planned_S
        )
        print(f"{name}: law {model.law}, {told}, selection {cost:.1f} us a step of {len(loads_SLE[0])} layers", flush=True)  # fmt: skip
        for row in found:
            shares = (row["mean_regret"], row["p95_regret"], row["worst_regret"], row["against_best_single"])
            table.add_row(name, row["policy"], *(f"{share:+.1%}" for share in shares))
        rows += [{"shape": name, **row} for row in found if row["policy"].startswith("selector")]
        rows += model.to_rows(name)
        controls += [{"shape": name, **row} for row in found if not row["policy"].startswith("selector")]
        controls += [told, *grid]
        controls += [{"kind": "step", "shape": name, "tokens": t, "planned_us": p, "us": times} for t, p, times in zip(tokens_S, planned_S, times_S)]  # fmt: skip
    Console(width=120).print(table)
    if arguments.out and rows:
        write_results(
            arguments.out,
            command=f"tinymoe bench selection --shapes {' '.join(arguments.shapes)} --repeats {arguments.repeats} --out {arguments.out}",
            rows=rows,
            controls=controls,
            packages=["triton"],
        )
    return 0
