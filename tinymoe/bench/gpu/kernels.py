"""One Mixture-of-Experts layer on a GPU, router logits in and tokens out: ours, a peer, and the roofline, in one run.
With --fit instead: every path through the experts over a grid of tokens and skews, for the cost model; with --blocks: the
block-sparse path at each size of block."""

import argparse

from tinymoe.bench.gpu import moe
from tinymoe.bench.gpu.paths import blocks, costs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    moe.add_arguments(parser)
    parser.add_argument("--fit", action="store_true", help="time the expert paths, and fit the cost model")
    parser.add_argument("--blocks", action="store_true", help="time the block-sparse path by size of block")
    costs.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.blocks:
        return blocks.run(arguments)
    return costs.run(arguments) if arguments.fit else moe.run(arguments)
