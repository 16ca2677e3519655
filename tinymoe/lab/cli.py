"""`tinymoe notebooks`: execute notebooks and store them in their one canonical form."""

import argparse
from importlib import import_module
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    text = "execute, strip what must not be stored, write back"
    sub = actions.add_parser("sync", help=text, description=text)
    sub.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="notebooks; none takes all of --folder"
    )
    sub.add_argument("--folder", type=Path, default=Path("notebooks"), help="where the notebooks lie")


def run(arguments: argparse.Namespace) -> int:
    # Only now, since its packages come with the extra `lab`, and help must not need them.
    changed = import_module("tinymoe.lab.sync").sync(arguments.files, folder=arguments.folder)
    print("\n".join(f"changed: {path}" for path in changed) or "nothing changed")
    return 0
