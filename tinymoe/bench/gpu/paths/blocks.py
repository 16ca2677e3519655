"""What the size of a block costs and brings: block-sparse experts on a GPU, rows filled up against multiplications a second.

Small blocks fill up few rows, large ones keep the tensor cores busy. TFLOP/s counts what real rows need, so a block that
computes much for nobody shows it. Beside each stands the path of the same layer that sorts and pads nothing.
"""

import argparse
from functools import partial

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from tinymoe.bench.gpu.moe import EVERY, SHAPES, draw, replay
from tinymoe.bench.gpu.paths.costs import loads_of, routed
from tinymoe.bench.results import timing, write_results
from tinymoe.ops import gpu

BLOCKS = (16, 32, 64, 128)
TOKENS = (64, 256, 1024, 4096)


def padding(loads_E: np.ndarray, block: int) -> float:
    """Rows stored over rows that are real."""
    return float((-(-loads_E // block) * block).sum() / max(1, loads_E.sum()))


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> int:
    if not gpu.AVAILABLE:
        raise SystemExit("bench kernels needs a CUDA device and Triton; torch sees no such device here")
    rows, table = [], Table(title="Block-sparse experts")
    for column in ("shape", "tokens", "rows an expert", "block", "padding", "us", "TFLOP/s", "sorted, us"):
        table.add_column(column, justify="right")
    names = ["qwen3-30b-a3b", "mixtral-8x7b"] if arguments.shapes == list(SHAPES) else arguments.shapes
    for name in names:
        s, weights = EVERY[name], draw(name, arguments.seed)
        for tokens in TOKENS:
            generator = torch.Generator("cuda").manual_seed(arguments.seed + tokens)
            layer = routed(name, tokens, weights, 0.0, generator)
            loads_E = loads_of(layer)
            chosen, ids = layer.logits.topk(s.top_k)
            call = (layer.x, ids.int(), chosen.softmax(-1), layer.gate_up, layer.down)
            whole = partial(gpu.moe.fused_moe, layer.x, layer.logits, layer.gate_up, layer.down, s.top_k)
            peer = replay(whole, arguments.repeats)
            for block in BLOCKS:
                samples = replay(partial(gpu.blocked.blocked_sparse, *call, block=block), arguments.repeats)
                if not samples:
                    continue
                us, sorted_us = timing(samples), timing(peer)
                rate = 6 * tokens * s.top_k * s.hidden * s.width / us["median"] / 1e6
                rows.append({
                    "kind": "block", "shape": name, "tokens": tokens, "block": block,
                    "rows_per_expert": tokens * s.top_k / s.experts, "padding": padding(loads_E, block),
                    "us": us, "tflops": rate, "sorted_with_router_us": sorted_us,
                })  # fmt: skip
                shown = (f"{rows[-1]['rows_per_expert']:.0f}", block, f"{rows[-1]['padding']:.2f}", f"{us['median']:.0f}")  # fmt: skip
                table.add_row(name, f"{tokens:,}", *map(str, shown), f"{rate:.0f}", f"{sorted_us['median']:.0f}")  # fmt: skip
    Console(width=120).print(table)
    if arguments.out and rows:
        write_results(
            arguments.out,
            command=f"tinymoe bench kernels --blocks --repeats {arguments.repeats} --out {arguments.out}",
            rows=rows,
            packages=["triton"],
        )
    return 0
