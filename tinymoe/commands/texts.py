"""Texts in and out: what was typed or piped, an answer as it comes, and what went wrong with it."""

import argparse
import sys
from collections.abc import Callable, Sequence

from tinymoe.core.model_config import ConfigError
from tinymoe.core.outputs import RequestOutput
from tinymoe.core.params import SamplingParams
from tinymoe.llm import LLM, Prompt


def text(argument: str) -> str:
    """An argparse type: Python hides bytes that are no UTF-8 in lone surrogates, which no tokenizer takes."""
    if not _sound(argument):
        raise argparse.ArgumentTypeError(f"not UTF-8 text: {argument!r}")
    return argument


def piped(read: Callable[[], str]) -> str:
    """read() from standard input. Raises ConfigError if that is no UTF-8 text."""
    try:
        found = read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8 text ({error})") from error
    if not _sound(found):
        raise ConfigError("standard input is not UTF-8 text")
    return found


def _sound(found: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in found)


def stream(llm: LLM, prompt: Prompt, params: SamplingParams, before: str = "") -> RequestOutput:
    """Print `before` and the answer as it comes; returns its last state. Of a request that is refused (RequestError) or
    fails before its first token nothing is printed."""
    engine, shown = llm.engine, -1
    engine.add_request("command line", prompt, params)
    while True:
        for output in engine.step():
            answer = output.outputs[0].text
            if shown < 0 and not output.error:
                print(before, end="")
                shown = 0
            if shown >= 0:
                print(answer[shown:], end="", flush=True)
                shown = len(answer)
            if output.finished:
                if shown >= 0:
                    print()
                return output


def report(command: str, outputs: Sequence[RequestOutput]) -> int:
    """Say on standard error which requests failed and why; the exit status."""
    failed = [(number, output) for number, output in enumerate(outputs, 1) if output.error]
    for number, output in failed:
        which = f"prompt {number} of {len(outputs)}" if len(outputs) > 1 else "the request"
        print(f"tinymoe {command}: {which} failed: {output.error}", file=sys.stderr)
    return 1 if failed else 0
