"""`tinymoe generate`: complete prompts; one is streamed, several are batched."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from tinymoe.commands.options import (
    add_engine_arguments,
    add_model_arguments,
    add_sampling_arguments,
    make_llm,
    make_params,
)
from tinymoe.commands.texts import piped, report, stream, text
from tinymoe.core.model_config import require
from tinymoe.core.outputs import RequestOutput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompts",
        nargs="*",
        type=text,
        metavar="PROMPT",
        help="texts to complete; none reads one from standard input; one that begins with - goes behind --",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per prompt instead of text"
    )
    parser.add_argument("--n", type=int, default=1, metavar="N", help="completions per prompt (default: 1)")
    add_model_arguments(parser)
    add_engine_arguments(parser)
    add_sampling_arguments(parser, max_tokens=64)


def run(arguments: argparse.Namespace) -> int:
    if not arguments.prompts and sys.stdin.isatty():
        print("Type a prompt; Ctrl-D on an empty line ends it.", file=sys.stderr)
    prompts = arguments.prompts or [piped(sys.stdin.read).removesuffix("\n")]
    require(all(prompts), "a prompt is empty: give a text")
    llm = make_llm(arguments)
    params = make_params(arguments, llm).clone(n=arguments.n)
    if len(prompts) == 1 and params.n == 1 and not arguments.json:
        outputs = [stream(llm, prompts[0], params, before=prompts[0])]
    else:
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
        for output in outputs:
            print(json.dumps(as_json(output)) if arguments.json else as_text(output))
    return report("generate", outputs)


def as_json(output: RequestOutput) -> dict[str, Any]:
    """text, token_ids and finish_reason are those of the first of `completions`; error is null, or why it failed."""
    completions = [
        {"text": one.text, "token_ids": one.token_ids, "finish_reason": one.finish_reason}
        for one in output.outputs
    ]
    body = {"prompt": output.prompt, **completions[0], "completions": completions, "error": output.error}
    return body | {"num_cached_tokens": output.num_cached_tokens, "metrics": asdict(output.metrics)}


def as_text(output: RequestOutput) -> str:
    """The prompt with its completion, or each of its completions under a number, and an empty line."""
    if output.error:
        return f"{output.prompt}\n"
    if len(output.outputs) == 1:
        return f"{output.prompt}{output.outputs[0].text}\n"
    total = len(output.outputs)
    return "\n".join(f"[{one.index + 1} of {total}] {output.prompt}{one.text}\n" for one in output.outputs)
