"""`tinymoe info`: what a model is made of, from its configuration alone (no weights are read)."""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tinymoe.commands.options import add_model_arguments
from tinymoe.core.model_config import ConfigError, ModelConfig, require
from tinymoe.llm import bundled_models, pick_device, resolve_model
from tinymoe.model.families import FAMILIES, model_config_from_hf

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_arguments(parser)


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises ConfigError."""
    path = folder / "config.json"
    require(path.is_file(), f"{folder} has no config.json: give a folder in Hugging Face format")
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error})") from error
    require(isinstance(body, dict), f"{path} must hold a JSON object, got {type(body).__name__}")
    return body


def serving_dtype(body: dict[str, Any], dtype: str, device: str) -> str:
    """Name of the dtype in which LLM(dtype=..., device=...) would hold this model. Raises ConfigError."""
    if dtype == "auto" and pick_device(device).type == "cpu":
        return "float32"
    if dtype == "auto":
        dtype = str(body.get("dtype") or body.get("torch_dtype")).removeprefix("torch.")
    require(dtype in BYTES, f"config.json says dtype {dtype!r}: choose --dtype, one of {', '.join(BYTES)}")
    return dtype


def describe(config: ModelConfig, dtype: str) -> dict[str, object]:
    """Facts about a model, ready to print. Sizes in bytes, if the model and its cache are held in `dtype`."""
    bytes_per_number = BYTES[dtype]
    moe = next((layer.moe for layer in config.layers if layer.moe), None)
    facts: dict[str, object] = {
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "moe_layers": sum(layer.moe is not None for layer in config.layers),
        "hidden_size": config.hidden_size,
        "heads": f"{config.num_attention_heads} query, {config.num_key_value_heads} key/value, width {config.head_dim}",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "parameters": config.num_parameters(),
        "active_parameters": config.num_parameters(active=True),
        "dtype": dtype,
        "weight_bytes": config.num_parameters() * bytes_per_number,
        "kv_bytes_per_token": config.kv_elements_per_token * bytes_per_number,
    }
    if moe is not None:
        facts["experts"] = f"{moe.num_experts}, {moe.top_k} per token, width {moe.intermediate_size}"
        facts["expert_bytes"] = 3 * config.hidden_size * moe.intermediate_size * bytes_per_number
    return facts


def run(arguments: argparse.Namespace) -> int:
    folder = resolve_model(arguments.model)
    body = read_config(folder)
    dtype = serving_dtype(body, arguments.dtype, arguments.device)
    facts = describe(model_config_from_hf(body), dtype)
    if arguments.json:
        print(json.dumps(facts))
        return 0
    table = Table(title=str(arguments.model), show_header=False)
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
    console = Console()
    console.print(table)
    console.print(f"bundled: {', '.join(bundled_models())}")
    console.print(f"families: {', '.join(FAMILIES)}")
    return 0
