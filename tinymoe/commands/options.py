"""Options that several commands share: which model, how big an engine, how to sample."""

import argparse
import json
import re
from typing import Any

from tinymoe.commands.texts import text
from tinymoe.core.params import SamplingParams
from tinymoe.llm import LLM, bundled_models

ENGINE = {
    "max_model_len": "longest prompt + output in tokens",
    "max_num_seqs": "sequences that run at once",
    "max_num_batched_tokens": "token budget of one step",
    "block_size": "tokens per KV page",
    "num_blocks": "number of KV pages",
    "kv_cache_bytes": "size of the KV cache instead of num_blocks",
}
SAMPLING: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "tokens to generate at most"),
    "temperature": (float, "0 is greedy"),
    "top_p": (float, "keep the smallest set of tokens with this probability"),
    "top_k": (int, "keep the k most likely tokens, 0 for all"),
    "min_p": (float, "keep tokens with at least this share of the best one's probability"),
    "repetition_penalty": (float, "above 1 discourages tokens that were there"),
    "seed": (int, "seed of the noise"),
}
DEFAULTS = {
    "seed": "one that the engine derives from the request's number"
}  # no model has an opinion on these


def device(argument: str) -> str:
    """An argparse type: what pick_device takes on the machines that the engine is made for."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", argument):
        raise argparse.ArgumentTypeError(f"auto, cpu, cuda or cuda:N is wanted, got {argument!r}")
    return argument


def json_object(argument: str) -> dict[str, Any]:
    """An argparse type: a JSON object."""
    try:
        value = json.loads(argument)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"a JSON object is wanted, got {argument!r} ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"a JSON object is wanted, got {argument!r}")
    return value


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(bundled_models())
    parser.add_argument("--model", default="quintet-moe", help=f"local folder or bundled model ({names})")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--device", type=device, default="auto", help="auto, cpu, cuda, cuda:1, ...")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    for name, words in ENGINE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=None, metavar="N", help=words)
    parser.add_argument(
        "--speculative-config",
        type=json_object,
        default=None,
        metavar="JSON",
        help='speculative decoding, as in {"method": "ngram", "num_speculative_tokens": 4} '
        "(the options of SpeculativeConfig)",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    for name, (kind, words) in SAMPLING.items():
        default = defaults.get(name)
        shown = DEFAULTS.get(name, "the model's own") if default is None else str(default)
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(
            option, type=kind, default=default, metavar="X", help=f"{words} (default: {shown})"
        )
    parser.add_argument(
        "--stop", action="append", type=text, metavar="TEXT", help="end at this text; may be repeated"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on through the end-of-text token")


def make_llm(arguments: argparse.Namespace, **options: Any) -> LLM:
    """The LLM that the arguments ask for."""
    names = (*ENGINE, "speculative_config")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return LLM(arguments.model, dtype=arguments.dtype, device=arguments.device, **{**given, **options})


def make_params(arguments: argparse.Namespace, llm: LLM) -> SamplingParams:
    """The model's own sampling defaults, overridden by what was given."""
    given = {name: getattr(arguments, name) for name in SAMPLING if getattr(arguments, name) is not None}
    if arguments.stop:
        given["stop"] = tuple(arguments.stop)
    return llm.get_default_sampling_params().clone(ignore_eos=arguments.ignore_eos, **given)
