"""One Mixture-of-Experts layer on a GPU, router logits in and tokens out: ours, a peer, and the roofline, in one run.

Times are CUDA-graph replays with the L2 cache flushed before each, on inputs drawn afresh. The roofline reads the weights
of the experts that this run's routes really hit, once, and the tokens in and out, at the copy bandwidth measured here; or
does the multiplications at the bfloat16 rate measured here, whichever takes longer.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tinymoe import ops
from tinymoe.bench.gpu.peers import vllm_moe
from tinymoe.bench.results import timing, write_results
from tinymoe.ops import gpu, reference


class Shape(NamedTuple):
    experts: int
    top_k: int
    hidden: int
    width: int


SHAPES = {
    "mixtral-8x7b": Shape(8, 2, 4096, 14336),
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "olmoe-1b-7b": Shape(64, 8, 2048, 1024),
    "dsv2-lite": Shape(64, 6, 2048, 1408),
}
# The bundled model's routes (16 experts, 2 a token) at the widths of real layers.
TRACED = {
    f"trace16@{name}": Shape(16, 2, s.hidden, s.width)
    for name, s in zip(("mixtral", "qwen3", "olmoe", "dsv2"), SHAPES.values())
}
EVERY = SHAPES | TRACED
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)


class Layer(NamedTuple):
    """Weights of one layer and the inputs of one measurement, bfloat16 (logits float32)."""

    shape: Shape
    x: Tensor
    logits: Tensor
    gate_up: Tensor
    down: Tensor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results JSON here")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES, help="which layers")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="tokens in the batch")
    parser.add_argument("--repeats", type=int, default=20, help="replays of each; 0 only compiles")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and inputs")
    parser.add_argument(
        "--vllm", action="store_true", help="measure vLLM's kernels too, which must be importable"
    )
    parser.add_argument(
        "--tune", action="store_true", help="time other tiles than the planned ones, and rank them"
    )


def draw(name: str, seed: int) -> tuple[Tensor, Tensor]:
    """gate_up [E, 2I, H] and down [E, H, I] of one layer."""
    s = EVERY[name]
    generator = torch.Generator("cuda").manual_seed(seed)
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    gate_up = torch.randn(s.experts, 2 * s.width, s.hidden, **options) * s.hidden**-0.5
    return gate_up, torch.randn(s.experts, s.hidden, s.width, **options) * s.width**-0.5


def inputs(name: str, tokens: int, weights: tuple[Tensor, Tensor], seed: int) -> Layer:
    s = EVERY[name]
    generator = torch.Generator("cuda").manual_seed(seed + tokens)
    x = torch.randn(tokens, s.hidden, device="cuda", dtype=torch.bfloat16, generator=generator)
    logits = torch.randn(tokens, s.experts, device="cuda", generator=generator)
    return Layer(s, x, logits, *weights)


def ours(layer: Layer) -> Tensor:
    return gpu.moe.fused_moe(layer.x, layer.logits, layer.gate_up, layer.down, layer.shape.top_k)[0]


def invariant(layer: Layer) -> Tensor:
    s = layer.shape
    return gpu.moe.fused_moe(layer.x, layer.logits, layer.gate_up, layer.down, s.top_k, invariant=True)[0]


def torch_grouped(layer: Layer) -> Tensor:
    """The peer in PyTorch alone: sort, two grouped products of the library, weighted sum."""
    K = layer.shape.top_k
    weights_TK, ids_TK = layer.logits.topk(K)
    weights_TK = weights_TK.softmax(-1)
    flat_P = ids_TK.reshape(-1)
    order_P = flat_P.argsort()
    counts_E = flat_P.new_zeros(layer.shape.experts).scatter_add_(0, flat_P, torch.ones_like(flat_P))
    ends_E = counts_E.cumsum(0).int()
    gate_PF, up_PF = F.grouped_mm(layer.x[order_P // K], layer.gate_up.transpose(1, 2), offs=ends_E).chunk(
        2, -1
    )
    y_PD = F.grouped_mm(F.silu(gate_PF) * up_PF, layer.down.transpose(1, 2), offs=ends_E)
    y_PD = y_PD * weights_TK.reshape(-1)[order_P, None].to(y_PD.dtype)
    return torch.zeros_like(layer.x).index_add_(0, order_P // K, y_PD)


def vllm_triton(layer: Layer) -> Tensor:
    """The peer's own kernels."""
    return vllm_moe()(layer.x, layer.logits, layer.gate_up, layer.down, layer.shape.top_k)


def routing(layer: Layer, router: Tensor) -> Tensor:
    """The router alone: logits from the tokens, then experts and weights."""
    logits_TE = ops.linear_float32(layer.x, router)
    return ops.topk_softmax(logits_TE, layer.shape.top_k)[0]


def replay(run: Callable[[], object], repeats: int) -> list[float]:
    """Microseconds of each replay of `run`'s CUDA graph, the L2 cache flushed before; [] for no repeats."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    if not repeats:
        return []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    times = []
    for i in range(repeats + 3):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) * 1e3)
    return times


def ceilings() -> dict[str, float]:
    """Copy bandwidth in bytes/s (read plus written) and the rate of a bfloat16 product of 8192-cubed in FLOP/s."""
    x = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    copy = 4 * x.numel() / (timing(replay(lambda: torch.add(x, 1, out=y), 10))["median"] * 1e-6)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    rate = 2 * 8192**3 / (timing(replay(lambda: a @ b, 10))["median"] * 1e-6)
    return {"copy_bytes_per_s": copy, "bf16_flops": rate}


def roofline_us(shape: Shape, tokens: int, distinct: int, limits: dict[str, float]) -> float:
    weights = 3 * shape.hidden * shape.width
    moved = 2 * (distinct * weights + 2 * tokens * shape.hidden)
    flops = 2 * tokens * shape.top_k * weights
    return max(moved / limits["copy_bytes_per_s"], flops / limits["bf16_flops"]) * 1e6


def launches(layer: Layer) -> int:
    """Kernels that one layer starts."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ours(layer)
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.device_type.name == "CUDA")


def error(layer: Layer) -> float:
    """Relative error of our answer for the first 64 tokens, against the reference in float32."""
    rows = slice(0, 64)
    got = ours(layer)[rows].float()
    wanted = reference.fused_moe(
        layer.x[rows].float(),
        layer.logits[rows],
        layer.gate_up.float(),
        layer.down.float(),
        layer.shape.top_k,
    )[0]
    return ((got - wanted).norm() / wanted.norm()).item()


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> int:
    if not gpu.AVAILABLE:
        raise SystemExit("bench kernels needs a CUDA device and Triton; torch sees no such device here")
    limits = ceilings()
    rows, table = [], Table(title="One MoE layer, microseconds (median)")
    for column in (
        "shape",
        "tokens",
        "distinct",
        "tinymoe",
        "torch grouped",
        "vLLM",
        "router",
        "invariant",
        "roofline",
        "of roof",
        "error",
    ):
        table.add_column(column, justify="right")
    for name in arguments.shapes:
        weights = draw(name, arguments.seed)
        for tokens in arguments.tokens:
            layer = inputs(name, tokens, weights, arguments.seed)
            distinct = len(layer.logits.topk(layer.shape.top_k).indices.unique())
            peers = [torch_grouped, *([vllm_triton] if arguments.vllm else [])]
            arms = {
                f.__name__: replay(partial(f, layer), arguments.repeats) for f in (ours, *peers, invariant)
            }
            router = torch.randn(layer.shape.experts, layer.shape.hidden, device="cuda", dtype=torch.bfloat16)
            arms["routing"] = replay(partial(routing, layer, router), arguments.repeats)
            if not arguments.repeats:
                continue
            times = {arm: timing(samples) for arm, samples in arms.items()}
            roof, off = roofline_us(layer.shape, tokens, distinct, limits), error(layer)
            rows.append(
                {
                    "shape": name,
                    "dtype": "bfloat16",
                    "mode": "cuda graph, L2 flushed",
                    "seed": arguments.seed,
                    "tokens": tokens,
                    "distinct": distinct,
                    "us": times["ours"],
                    "invariant_us": times["invariant"],
                    "roofline_us": roof,
                    "launches": launches(layer),
                    "relative_error": off,
                    "router_us": times["routing"],
                    "peers": {f.__name__: times[f.__name__] for f in peers},
                }
            )
            order = ("ours", "torch_grouped", "vllm_triton", "routing", "invariant")
            cells = [times[arm]["median"] if arm in times else 0.0 for arm in order]
            shown = (
                name,
                tokens,
                distinct,
                *(f"{c:.1f}" for c in (*cells, roof)),
                f"{roof / cells[0]:.0%}",
                f"{off:.1e}",
            )
            table.add_row(*map(str, shown))
        del weights
    Console(width=120).print(table)
    if arguments.out and rows:
        write_results(
            arguments.out,
            command=f"tinymoe bench kernels --repeats {arguments.repeats} --out {arguments.out}"
            + " --vllm" * arguments.vllm,
            rows=rows,
            ceilings=limits,
            packages=["triton"],
        )
    return 0
