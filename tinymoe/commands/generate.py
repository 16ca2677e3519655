"""`tinymoe generate`: complete prompts; one is streamed, several are batched."""

import argparse
import json
import sys
from dataclasses import asdict

from tinymoe.commands.options import add_model_arguments, add_sampling_arguments, make_llm, make_params
from tinymoe.core.model_config import require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="texts to complete; none reads one from standard input"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per prompt instead of text"
    )
    add_model_arguments(parser)
    add_sampling_arguments(parser, max_tokens=64)


def run(arguments: argparse.Namespace) -> int:
    prompts = arguments.prompts or [sys.stdin.read().removesuffix("\n")]
    require(all(prompts), "a prompt is empty: give a text")
    llm = make_llm(arguments)
    params = make_params(arguments, llm)
    if len(prompts) == 1 and params.n == 1 and not arguments.json:
        print(prompts[0], end="", flush=True)
        for delta in llm.stream(prompts[0], params):
            print(delta.text, end="", flush=True)
        print()
        return 0
    for output in llm.generate(prompts, params, use_tqdm=sys.stderr.isatty()):
        if arguments.json:
            one = output.outputs[0]
            body = {"prompt": output.prompt, "text": one.text, "token_ids": one.token_ids}
            body |= {"finish_reason": one.finish_reason, "num_cached_tokens": output.num_cached_tokens}
            print(json.dumps(body | {"metrics": asdict(output.metrics)}))
        else:
            print(f"{output.prompt}{output.outputs[0].text}\n")
    return 0
