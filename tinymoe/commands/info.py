"""`tinymoe info`: what a model is made of, from its configuration alone (no weights are read)."""

import argparse
import json

from rich.console import Console
from rich.table import Table

from tinymoe.commands.options import add_model_arguments
from tinymoe.core.model_config import ModelConfig
from tinymoe.llm import bundled_models, resolve_model
from tinymoe.model.families import FAMILIES, model_config_from_hf


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_arguments(parser)


def describe(config: ModelConfig, bytes_per_number: int) -> dict[str, object]:
    """Facts about a model, ready to print. Sizes in bytes."""
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
        "kv_bytes_per_token": config.kv_elements_per_token * bytes_per_number,
    }
    if moe is not None:
        facts["experts"] = f"{moe.num_experts}, {moe.top_k} per token, width {moe.intermediate_size}"
        facts["expert_bytes"] = 3 * config.hidden_size * moe.intermediate_size * bytes_per_number
    return facts


def run(arguments: argparse.Namespace) -> int:
    folder = resolve_model(arguments.model)
    config = model_config_from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    facts = describe(config, 4 if arguments.dtype == "float32" else 2)
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
