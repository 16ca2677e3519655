"""Paged attention on a GPU against the bytes (decode) or multiplications (prefill) it cannot avoid, and torch's own kernel."""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tinymoe.bench.gpu.moe import ceilings, replay
from tinymoe.bench.gpu.peers import flash_attention_3
from tinymoe.bench.results import timing, write_results
from tinymoe.ops import gpu

HEADS = ((32, 8), (32, 4), (16, 16))
DECODE = [(b, c) for b in (1, 8, 64, 256) for c in (512, 4096, 32768) if b * c <= 64 * 32768]
PREFILL = (2048, 8192, 16384)
HEAD_DIM, PAGE = 128, 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results JSON here")
    parser.add_argument("--repeats", type=int, default=20, help="replays of each")
    parser.add_argument("--vllm", action="store_true", help="measure FlashAttention-3 too, as vLLM ships it")
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs")


def paged(q: Tensor, kv: Tensor, plan: gpu.PagePlan) -> Tensor:
    return gpu.attend(q, kv[0], kv[1], plan)


def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """torch's attention over keys and values that already lie in one piece: it has no pages to follow."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def measure(
    kind: str, heads: tuple[int, int], batch: int, context: int, repeats: int, vllm: bool = False
) -> dict:
    """One row: `batch` sequences of `context` positions; decode has one query each, prefill all of one sequence."""
    (N, G), options = heads, {"device": "cuda", "dtype": torch.bfloat16}
    queries = 1 if kind == "decode" else context
    blocks = context // PAGE
    kv = torch.randn(2, batch * blocks, PAGE, G, HEAD_DIM, **options)
    q = torch.randn(batch * queries, N, HEAD_DIM, **options)
    order = torch.randperm(batch * blocks).view(batch, blocks).numpy()
    spans = [(s * queries, (s + 1) * queries, context, order[s]) for s in range(batch)]
    plan = gpu.plan_pages(spans, None, "cuda")
    ours = replay(partial(paged, q, kv, plan), repeats)
    peers = {}
    if vllm:
        attend = flash_attention_3()
        peers["fa3"] = timing(replay(partial(attend, q, kv, plan.block_tables, queries, context), repeats))
    k, v = (torch.randn(batch, G, context, HEAD_DIM, **options) for _ in "kv")
    q_BNTH = q.view(batch, queries, N, HEAD_DIM).transpose(1, 2)
    peer = replay(partial(dense, q_BNTH, k, v, kind == "prefill"), repeats)
    return {
        "kind": kind,
        "heads": N,
        "kv_heads": G,
        "head_dim": HEAD_DIM,
        "page": PAGE,
        "batch": batch,
        "context": context,
        "dtype": "bfloat16",
        "us": timing(ours),
        "peers": {"torch_sdpa_contiguous": timing(peer), **peers},
    }


def bound_us(row: dict, limits: dict[str, float]) -> float:
    """Decode: keys and values once, at copy bandwidth. Prefill: the unmasked half of the products."""
    if row["kind"] == "decode":
        moved = 2 * 2 * row["batch"] * row["context"] * row["kv_heads"] * row["head_dim"]
        return moved / limits["copy_bytes_per_s"] * 1e6
    return (
        2 * row["heads"] * row["head_dim"] * row["context"] ** 2 * row["batch"] / limits["bf16_flops"] * 1e6
    )


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> int:
    if not gpu.AVAILABLE:
        raise SystemExit("bench attention needs a CUDA device and Triton; torch sees no such device here")
    torch.manual_seed(arguments.seed)
    limits = ceilings()
    cases = [("decode", heads, *case) for heads in HEADS for case in DECODE]
    cases += [("prefill", HEADS[0], 1, context) for context in PREFILL]
    table = Table(title="Attention, microseconds (median)")
    for column in (
        "kind",
        "heads",
        "batch",
        "context",
        "tinymoe",
        "torch, contiguous",
        "FA3",
        "bound",
        "of bound",
    ):
        table.add_column(column, justify="right")
    rows = []
    for case in cases:
        row = measure(*case, arguments.repeats, arguments.vllm)
        row |= {"bound_us": bound_us(row, limits), "seed": arguments.seed}
        rows.append(row)
        ours, peer = row["us"]["median"], row["peers"]["torch_sdpa_contiguous"]["median"]
        shown = (row["kind"], f"{row['heads']}/{row['kv_heads']}", row["batch"], row["context"])
        cells = (
            *shown,
            f"{ours:.1f}",
            f"{peer:.1f}",
            f"{row['peers'].get('fa3', {}).get('median', 0):.1f}",
            f"{row['bound_us']:.1f}",
            f"{row['bound_us'] / ours:.0%}",
        )
        table.add_row(*map(str, cells))
    Console(width=110).print(table)
    if arguments.out:
        command = f"tinymoe bench attention --repeats {arguments.repeats} --out {arguments.out}"
        command += " --vllm" * arguments.vllm
        write_results(arguments.out, command=command, rows=rows, ceilings=limits, packages=["triton"])
    return 0
