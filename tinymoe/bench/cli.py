"""`tinymoe bench`: measure the engine and the models, and write the figures that README, notebooks and book show."""

import argparse

from tinymoe.bench import card, engine, tables
from tinymoe.bench.gpu import attention, kernels, tiles
from tinymoe.bench.gpu.e2e import command as e2e
from tinymoe.bench.gpu.paths import selection
from tinymoe.bench.spec import command as spec

SUITES = {
    "engine": engine,
    "card": card,
    "kernels": kernels,
    "attention": attention,
    "tiles": tiles,
    "e2e": e2e,
    "selection": selection,
    "spec": spec,
    "tables": tables,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    suites = parser.add_subparsers(dest="suite", required=True, metavar="suite")
    for name, module in SUITES.items():
        text = (module.__doc__ or "").splitlines()[0]
        sub = suites.add_parser(name, help=text, description=text)
        module.add_arguments(sub)
        sub.set_defaults(suite_run=module.run)


def run(arguments: argparse.Namespace) -> int:
    return arguments.suite_run(arguments)
