"""The command: measure, and write card.json and MODEL_CARD.md into every model's folder."""

import argparse
import hashlib
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from tinymoe.bench.card.measure import MODELS, Judge, evaluations, targets
from tinymoe.bench.card.page import page
from tinymoe.bench.card.record import read_training
from tinymoe.bench.results import machine, versions
from tinymoe.core.model_config import ModelConfig, require
from tinymoe.model.families import model_config_from_hf
from tinymoe.train.corpus import TEXT_DOMAINS, encode_corpus
from tinymoe.train.evaluate import WINDOW
from tinymoe.train.tokenizer import load_tokenizer, token_lengths

ZOO = Path(__file__).resolve().parents[2] / "zoo"
CARD, PAGE = "card.json", "MODEL_CARD.md"
HOW = (
    f"transformers' AutoModelForCausalLM in float32 on the CPU, over the whole validation split in {WINDOW}-token windows that "
    "do not overlap; every token but a stream's first is predicted once; bytes are those of the predicted text"
)
SHAPE = (
    *("architectures", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size"),
    *("vocab_size", "max_position_embeddings", "tie_word_embeddings", "rope_theta"),
)  # fmt: skip
_WORK = re.compile(r"^\| *(\w+) *\| *(.+?) *\| *(\d+) *\|$", re.M)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--corpus",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of DOMAIN.valid.txt.xz and SOURCES.md",
    )
    add(
        "--zoo",
        type=Path,
        default=ZOO,
        metavar="DIR",
        help="folder of quintet-moe, quintet-draft and quintet-dense",
    )
    add(
        "--records",
        type=Path,
        metavar="DIR",
        help="folder of moe.json, draft.json and dense.json, the train.json of each run; other JSON files there are "
        "trials (default: keep what the cards say about training)",
    )
    add(
        "--only",
        nargs="+",
        choices=MODELS,
        default=list(MODELS),
        metavar="MODEL",
        help="measure these anew (moe and dense only with draft); the others keep their cards' figures, if these are of the "
        "same weights",
    )
    add("--problems", type=int, default=2000, help="number of held-out sums")
    add("--threads", type=int, default=torch.get_num_threads(), help="torch threads")


def read_sources(corpus: Path) -> dict[str, dict[str, Any]]:
    """Works and characters of every text domain, from the table in SOURCES.md. Raises ConfigError for a domain without."""
    found: dict[str, dict[str, Any]] = {d: {"works": [], "characters": 0} for d in TEXT_DOMAINS}
    for domain, work, characters in _WORK.findall((corpus / "SOURCES.md").read_text(encoding="utf-8")):
        if domain in found:
            found[domain]["works"].append(work)
            found[domain]["characters"] += int(characters)
    empty = [domain for domain, about in found.items() if not about["works"]]
    require(not empty, f"SOURCES.md of the corpus names no work for {empty}")
    return found


def describe(folder: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """A saved model's configuration, and what the card says of it before anything is measured."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = model_config_from_hf(raw)
    weights = folder / "model.safetensors"
    unused = () if not config.is_moe else ("intermediate_size",)
    return config, {
        "name": folder.name,
        "architecture": {k: raw[k] for k in SHAPE if k in raw and k not in unused},
        "parameters": {"total": config.num_parameters(), "active": config.num_parameters(active=True)},
        "weights": {
            "file": weights.name,
            "dtype": raw["torch_dtype"],
            "bytes": weights.stat().st_size,
            "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        },
    }


def kept_evaluation(folder: Path, description: dict[str, Any]) -> dict[str, Any]:
    """What the card in `folder` says was measured. Raises ConfigError if that was of other weights."""
    path = folder / CARD
    require(path.is_file(), f"{folder.name}/{CARD} not found, so its figures cannot be kept: measure it, too")
    card = json.loads(path.read_text(encoding="utf-8"))
    require(
        card["weights"]["sha256"] == description["weights"]["sha256"],
        f"{folder.name}/{CARD} is of other weights than lie there: measure {folder.name}, too",
    )
    return card["evaluation"]


def folder_bytes(folder: Path) -> int:
    """Size of a model's files without its card, which is written afterwards."""
    return sum(p.stat().st_size for p in folder.iterdir() if p.is_file() and p.name not in (CARD, PAGE))


def run(arguments: argparse.Namespace) -> int:
    torch.set_num_threads(arguments.threads)
    folders = {name: arguments.zoo / f"quintet-{name}" for name in MODELS}
    trained, data = read_training(arguments.zoo, arguments.records), read_sources(arguments.corpus)
    tokenizer = load_tokenizer(folders["moe"])
    lengths = np.array(token_lengths(tokenizer))
    valid = encode_corpus(tokenizer, arguments.corpus, "valid", TEXT_DOMAINS, workers=1)
    for domain, stream in valid.items():
        data[domain] |= {"valid_tokens": len(stream), "valid_bytes": int(lengths[stream].sum())}
    about = {name: describe(folder) for name, folder in folders.items()}
    only = [name for name in MODELS if name in arguments.only]
    kept = {name: kept_evaluation(folders[name], about[name][1]) for name in MODELS if name not in only}
    require("draft" in only, "--only needs draft: it is measured against moe, whose figures would be missing")
    judges = {name: Judge(folders[name]) for name in dict.fromkeys([*only, "moe"])}
    found = kept | evaluations(judges, tokenizer, valid, trained["moe"]["weights"], arguments.problems, only)
    wanted = targets(
        found, about["draft"][0].num_parameters(), sum(folder_bytes(folder) for folder in folders.values())
    )
    measured = {
        "command": " ".join(
            ["tinymoe bench card --corpus DIR", *(["--only", *only] if len(only) < len(MODELS) else [])]
        ),
        "how": HOW,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": machine(),
        "versions": versions(["transformers", "tokenizers", "safetensors"]),
    }
    for name, (_, description) in about.items():
        evaluation = found[name] if name in kept else {**measured, **found[name]}
        card = {**description, "training": trained[name], "evaluation": evaluation}
        if name == "moe":
            figures = {k: found["dense"][k] for k in ("bits_per_byte", "sums")}
            card["control"] = {"name": "quintet-dense", **figures}
            card["draft"] = {"name": "quintet-draft"}
            card["draft"] |= {key: found["draft"][key] for key in ("acceptance", "agreement")}
            card["targets"] = wanted
        card["data"] = data
        (folders[name] / CARD).write_text(
            json.dumps(card, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        (folders[name] / PAGE).write_text(page(card), encoding="utf-8")
    show(wanted)
    return 0


def show(wanted: list[dict[str, Any]]) -> None:
    console = Console()
    for row in wanted:
        verdict = "reached" if row["reached"] else "MISSED"
        console.print(f"{verdict:8} {row['what']}: {row['got']} ({row['wanted']})", highlight=False)
