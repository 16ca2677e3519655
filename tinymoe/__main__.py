"""The command line. A command's module is imported only when it is asked for, so that help comes at once and a command
whose packages are not installed does not spoil the others."""

import argparse
import importlib
import sys

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


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 1 for an error of the user's input, 2 for wrong arguments."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="tinymoe", description="A small engine that serves Mixture-of-Experts models and shows how."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, (module_name, text) in COMMANDS.items():
        # add_help of the commands that are not chosen is never reached, so their modules need not be loaded.
        sub = commands.add_parser(name, help=text, description=text)
        if name == chosen:
            module = _load(name, module_name)
            if module is None:
                return 1
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments) or 0
    except (ValueError, TypeError) as error:
        # Every refusal of tinymoe is one of these and says what to change.
        print(f"tinymoe {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _load(command: str, module_name: str):
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tinymoe"):
            raise
        extra = EXTRAS.get(command)
        hint = f": install it with pip install 'tinymoe[{extra}]'" if extra else ""
        print(f"tinymoe {command} needs the package {error.name!r}{hint}", file=sys.stderr)
        return None


if __name__ == "__main__":
    sys.exit(main())
