"""How the models were trained, from the records that `tinymoe train` leaves (train.json)."""

import argparse
import json
import math
import shlex
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinymoe.bench.card.measure import MODELS, rounded
from tinymoe.core.model_config import require
from tinymoe.train import cli

CURVE_POINTS = 20


def read_training(zoo: Path, records: Path | None) -> dict[str, dict[str, Any]]:
    """The training section of every card, from records, or (None) from the cards that are there. Raises ConfigError."""
    if records is None:
        cards = {name: zoo / f"quintet-{name}" / "card.json" for name in MODELS}
        missing = [f"{path.parent.name}/{path.name}" for path in cards.values() if not path.is_file()]
        require(
            not missing, f"{missing} not found, so nothing says how the models were trained: give --records"
        )
        return {
            name: json.loads(path.read_text(encoding="utf-8"))["training"] for name, path in cards.items()
        }
    runs = {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in sorted(records.glob("*.json"))}
    missing = [f"{name}.json" for name in MODELS if name not in runs]
    require(not missing, f"{records} lacks {missing}: the train.json of each run under these names")
    others = [run for name, run in runs.items() if name not in MODELS and "evaluation" in run]
    others.sort(key=lambda run: run["config"]["optimizer"]["lr"])
    return {name: training(runs[name], [r for r in others if r["model"] == name]) for name in MODELS}


def training(run: Mapping[str, Any], trials: list[Mapping[str, Any]]) -> dict[str, Any]:
    """What the card says about a run, from its train.json and those of the shorter runs that chose its settings."""
    config, history = run["config"], run["history"]
    kept = [*history[: -1 : max(1, math.ceil(len(history) / CURVE_POINTS))], history[-1]]
    names = ("step", "loss", "max_violation", "acceptance")
    about = {
        "command": train_command(run),
        **{
            k: run[k]
            for k in ("date", "device", "torch", "compiled", "seconds", "seed", "steps", "tokens_seen")
        },
        "tokens_per_s": int(statistics.median(entry["tokens_per_s"] for entry in history)),
        **{k: config[k] for k in ("batch", "length", "dtype", "warmup", "decay", "optimizer")},
        "balance": config["balance"] if run["model"] == "moe" else None,
        "weights": run["weights"],
        "epochs": run["epochs"],
        **{key: run[key] for key in ("written", "corpus_share") if run.get(key)},
        **({"temperature": config["temperature"]} if "temperature" in config else {}),
        "loss": "distillation, nats per token"
        if run["model"] == "draft"
        else "cross-entropy, nats per token",
        "curve": [{k: entry[k] for k in names if k in entry} for entry in kept],
        "trials": [trial(run) for run in trials],
    }
    # Settings as they were given (eps is 1e-10), figures rounded.
    return {**rounded(about), "optimizer": config["optimizer"]}


def trial(run: Mapping[str, Any]) -> dict[str, Any]:
    optimizer, evaluation = run["config"]["optimizer"], run["evaluation"]
    return {
        "optimizer": optimizer["name"],
        "lr": optimizer["lr"],
        "seed": run["seed"],
        "steps": run["steps"],
        "bits_per_byte": evaluation["bits_per_byte"],
        "sums_exact": evaluation["sums"]["exact"],
    }


def train_command(run: Mapping[str, Any]) -> str:
    """The command line that made a run; options at their defaults are left out."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    config, optimizer, balance = run["config"], run["config"]["optimizer"], run["config"]["balance"]
    options = {
        "seed": run["seed"],
        **{k: config[k] for k in ("steps", "minutes", "batch", "length", "warmup", "decay")},
        "optimizer": optimizer["name"],
        **{k: optimizer[k] for k in ("lr", "weight_decay")},
        "balance": balance["mode"],
        **{k: balance[k] for k in ("aux_weight", "z_weight", "bias_rate")},
        "temperature": config.get("temperature", 1.0),
    }
    if run.get("written"):
        options |= {"written": run["written"]["share"], "sequences": run["written"]["sequences"]}
    words = ["tinymoe", "train", "--model", run["model"], "--corpus", "DIR", "--out", "DIR"]
    words += ["--target", "tinymoe/zoo/quintet-moe"] if run["model"] == "draft" else []
    words += ["--compile"] if config["compile"] else []
    for name, value in options.items():
        if value != parser.get_default(name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    if run["weights"] != parser.get_default("weights"):
        words += ["--weights", ",".join(f"{domain}={weight}" for domain, weight in run["weights"].items())]
    return shlex.join(words)
