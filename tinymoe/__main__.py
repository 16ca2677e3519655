"""The command line. A command's module is imported only when it is asked for, so that help comes at once and a command
whose packages are not installed does not spoil the others."""

import argparse
import importlib
import os
import re
import shlex
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

COMMANDS = {
    "demo": ("tinymoe.commands.demo", "serve seven prompts at once and draw what happens"),
    "generate": ("tinymoe.commands.generate", "complete one or more prompts"),
    "chat": ("tinymoe.commands.chat", "talk to a model that has a chat template"),
    "info": ("tinymoe.commands.info", "what a model is made of, and what it costs to serve"),
    "bench": ("tinymoe.bench.cli", "measure, and write the results as JSON"),
    "train": ("tinymoe.train.cli", "train a bundled model, or a shape of your own, from a corpus folder"),
    "notebooks": ("tinymoe.lab.cli", "execute and normalise the notebooks of the walkthrough"),
}
# Which extra brings what a command imports.
EXTRAS = {"notebooks": "lab", "bench": "test"}
TAKES_TEXT = ("generate",)


class Parser(argparse.ArgumentParser):
    """No abbreviations: `--n 3` must never mean --num-blocks. Parsers of sub-commands are made of the same class."""

    def __init__(self, **options):
        super().__init__(**{"allow_abbrev": False, **options})


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 1 for an error of the user's input or a failed request, 141 if
    whoever reads the output stopped reading; argparse exits with 2 for wrong arguments."""
    try:
        try:
            return _command(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # As in `tinymoe generate hi | head -c 5`. The interpreter will flush once more: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _command(argv: list[str]) -> int:
    parser = Parser(
        prog="tinymoe", description="A small engine that serves Mixture-of-Experts models and shows how."
    )
    parser.add_argument("--version", action="version", version=f"tinymoe {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    chosen = next((word for word in argv if not word.startswith("-")), None)
    subs = {
        name: commands.add_parser(name, help=text, description=text) for name, (_, text) in COMMANDS.items()
    }
    if chosen in COMMANDS:
        try:
            module = importlib.import_module(COMMANDS[chosen][0])
        except ModuleNotFoundError as error:
            hint = _missing(chosen, error)
            if not {"-h", "--help"} & set(argv):
                return _refuse(chosen, hint)
            subs[chosen].epilog = f"Its options cannot be listed here: it {hint}."
        else:
            module.add_arguments(subs[chosen])
            subs[chosen].set_defaults(run=module.run)
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        _unknown(subs[arguments.command], arguments.command, rest)
    return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    try:
        return arguments.run(arguments) or 0
    except BrokenPipeError:
        raise
    except ModuleNotFoundError as error:
        return _refuse(arguments.command, _missing(arguments.command, error))
    except MemoryError as error:
        why = f" ({error})" if str(error) else ""
        return _refuse(
            arguments.command, f"not enough memory{why}: ask for less, as with a smaller --num-blocks"
        )
    except (ValueError, OSError) as error:
        # Every refusal of tinymoe is one of these and says what to change.
        return _refuse(arguments.command, str(error))
    except RuntimeError as error:
        # torch's: a device that is not there, or memory that is used up. What follows the first line is for its makers.
        return _refuse(arguments.command, str(error).strip().partition("\n")[0] or type(error).__name__)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _refuse(command: str, why: str) -> int:
    print(f"tinymoe {command}: {' '.join(why.split())}", file=sys.stderr)
    return 1


def _unknown(sub: argparse.ArgumentParser, command: str, words: list[str]) -> NoReturn:
    hint, texts = "", [word for word in words if re.match("-(?!-[A-Za-z])", word)]
    if command in TAKES_TEXT and texts:
        hint = f"; a text that begins with - goes behind --, as in: {sub.prog} -- {shlex.quote(texts[0])}"
    elif command in TAKES_TEXT and not words[0].startswith("-"):
        hint = "; all texts stand side by side, with no option between them"
    sub.error(f"unrecognized arguments: {' '.join(words)}{hint}")


def _missing(command: str, error: ModuleNotFoundError) -> str:
    """What to install. A module of tinymoe itself that is missing is no question of packages."""
    if (error.name or "").startswith("tinymoe"):
        raise error
    extra = EXTRAS.get(command)
    hint = f": install it in tinymoe's folder with pip install -e '.[{extra}]'" if extra else ""
    return f"needs the package {error.name!r}{hint}"


def _version() -> str:
    try:
        return version("tinymoe")
    except PackageNotFoundError:  # run from its folder, not installed
        source = Path(__file__).parent.parent / "pyproject.toml"
        return tomllib.loads(source.read_text(encoding="utf-8"))["project"]["version"]


if __name__ == "__main__":
    sys.exit(main())
