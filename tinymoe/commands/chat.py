"""`tinymoe chat`: a conversation in the terminal, streamed."""

import argparse
import sys

from tinymoe.commands.options import (
    add_engine_arguments,
    add_model_arguments,
    add_sampling_arguments,
    make_llm,
    make_params,
)
from tinymoe.commands.texts import piped, report, stream, text
from tinymoe.llm import Prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", type=text, metavar="TEXT", help="system message")
    add_model_arguments(parser)
    add_engine_arguments(parser)
    add_sampling_arguments(parser, max_tokens=128)


def run(arguments: argparse.Namespace) -> int:
    llm = make_llm(arguments)
    params = make_params(arguments, llm)
    tokenizer = llm.get_tokenizer()
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    interactive = sys.stdin.isatty()
    if interactive:
        print("An empty line or Ctrl-D ends the conversation.")
    while True:
        try:
            line = piped(lambda: input("> " if interactive else ""))
        except EOFError:
            line = ""
        if not line:
            return 0
        messages.append({"role": "user", "content": line})
        whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        prompt: Prompt = {"prompt_token_ids": tokenizer.encode(whole, add_special_tokens=False)}
        output = stream(llm, prompt, params)
        if status := report("chat", [output]):
            return status
        messages.append({"role": "assistant", "content": output.outputs[0].text})
