"""Which tiles are fastest: up and down of one MoE layer, each alone, on a GPU. What it finds goes into kernels/fused_moe.py."""

import argparse
from functools import partial

import torch

from tinymoe.bench.gpu.moe import SHAPES, TOKENS, Layer, draw, inputs, replay
from tinymoe.bench.results import timing
from tinymoe.ops import gpu


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES, help="which layers")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="tokens in the batch")
    parser.add_argument("--repeats", type=int, default=12, help="replays of each; 0 only compiles")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and inputs")


DECODE = [(4, 1024, 4, 1), (8, 256, 4, 1), (8, 512, 4, 1), (8, 512, 4, 3), (16, 256, 4, 1), (16, 256, 4, 3), (16, 256, 8, 3), (16, 512, 4, 1), (32, 128, 4, 1), (32, 256, 8, 2), (4, 256, 4, 1), (8, 128, 4, 4)]  # fmt: skip
SWAPPED = [(64, 64, 4, 5), (64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 8, 3), (128, 64, 4, 4), (128, 128, 4, 2), (128, 128, 8, 3), (64, 256, 4, 2)]  # fmt: skip
WIDE = {
    64: [(64, 64, 4, 4), (64, 64, 8, 4), (128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (256, 64, 8, 3)],
    128: [(64, 64, 4, 4), (64, 64, 8, 4), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (256, 64, 8, 3), (256, 64, 8, 4)],
}  # fmt: skip


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> int:
    """Rank the tiles of up and down, each alone, per shape and number of tokens; with --repeats 0, only compile."""
    if not gpu.AVAILABLE:
        raise SystemExit("bench tiles needs a CUDA device and Triton; torch sees no such device here")
    for name in arguments.shapes:
        weights = draw(name, arguments.seed)
        for tokens in arguments.tokens:
            layer = inputs(name, tokens, weights, arguments.seed)
            pairs = tokens * layer.shape.top_k
            if pairs <= 64:
                report(name, tokens, 0, decode_arms(layer), arguments.repeats)
            if 16 < pairs <= 32 * layer.shape.experts:
                arms = tile_arms(layer, 16, [(*t, 1, True) for t in SWAPPED])
                report(name, tokens, 16, arms, arguments.repeats)
            if pairs >= 16 * layer.shape.experts:
                for block_m, tiles in WIDE.items():
                    tried = [(*t, g, False, tma) for t in tiles for g in (4, 16) for tma in (False, True)]
                    arms = tile_arms(layer, block_m, tried)
                    report(name, tokens, block_m, arms, arguments.repeats)
    return 0


def report(name: str, tokens: int, block_m: int, arms: dict, repeats: int) -> None:
    found: dict[str, list] = {}
    for (which, tile), run_arm in arms.items():
        try:
            times = replay(run_arm, repeats)
        except Exception as reason:  # a tile the compiler or the device refuses is a finding, not a failure
            print(
                name,
                tokens,
                block_m,
                which,
                tuple(tile),
                "refused:",
                type(reason).__name__,
                str(reason)[:80],
                flush=True,
            )
            continue
        if times:
            found.setdefault(which, []).append((timing(times)["median"], tuple(tile)))
    for which, results in found.items():
        best = ", ".join(f"{us:.1f} {tile}" for us, tile in sorted(results)[:3])
        print(f"{name} M={tokens} block_m={block_m} {which}: {best}", flush=True)


def decode_arms(layer: Layer) -> dict:
    s, arms = layer.shape, {}
    tokens = layer.x.shape[0]
    planned = gpu.moe.Plan(0, gpu.moe.DecodeTile(16, 256, 4, 1), gpu.moe.DecodeTile(8, 256, 4, 1))
    out, ids, weights = gpu.moe.fused_moe(
        layer.x, layer.logits, layer.gate_up, layer.down, s.top_k, use=planned
    )
    h = torch.randn(tokens * s.top_k, s.width, device="cuda", dtype=torch.bfloat16)
    for tile in (gpu.moe.DecodeTile(*t) for t in DECODE):
        arms["up", tile] = partial(
            gpu.moe.decode_up, layer.x, layer.logits, None, layer.gate_up, h, ids, weights, None, tile
        )
        arms["down", tile] = partial(
            gpu.moe.decode_down, h, ids, weights, layer.down, out, None, None, None, tile
        )
    return arms


def tile_arms(layer: Layer, block_m: int, tiles: list[tuple]) -> dict:
    s, arms = layer.shape, {}
    weights, ids = layer.logits.topk(s.top_k)
    ids, weights = ids.int(), weights.softmax(-1)
    order = gpu.sort_tokens.sort_tokens(ids, s.experts, block_m)
    h = torch.randn(ids.numel(), s.width, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(ids.numel(), s.hidden, device="cuda", dtype=torch.bfloat16)
    for tile in (gpu.grouped_gemm.Tile(*t) for t in tiles):
        if tile.block_n <= 128:
            arms["up", tile] = partial(gpu.grouped_gemm.up, layer.x, layer.gate_up, order, h, s.top_k, tile)
        arms["down", tile] = partial(gpu.grouped_gemm.down, h, layer.down, weights, order, y, tile)
    arms["sort", ()] = partial(gpu.sort_tokens.sort_tokens, ids, s.experts, block_m)
    return arms
