"""`tinymoe train`: train one of the bundled models, or their tokenizer, from a corpus folder."""

import argparse
import json
import os
import shutil
import signal
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from tqdm import tqdm

from tinymoe.core.model_config import require
from tinymoe.experts.balance import MODES, BalanceConfig
from tinymoe.llm import pick_device
from tinymoe.model.families import model_config_from_hf
from tinymoe.model.weights import load_model
from tinymoe.train import evaluate
from tinymoe.train.corpus import (
    SUMS,
    TEXT_DOMAINS,
    Corpus,
    Sampler,
    corpus_file,
    encode_corpus,
    read_documents,
)
from tinymoe.train.corpus.written import WRITTEN, written
from tinymoe.train.loop import STATE, TrainConfig, Trainer, use_grouped, write_json
from tinymoe.train.optimizer import OptimizerConfig
from tinymoe.train.tokenizer import (
    END_OF_TEXT,
    load_tokenizer,
    sample_texts,
    save_tokenizer,
    train_tokenizer,
)

ZOO = Path(__file__).parent.parent / "zoo"
WEIGHTS = "english=.39,german=.22,python=.21,verse=.005,sums=.175"
TOKENIZER_SHARES = {"english": 16, "german": 10, "python": 8, "verse": 0.7}  # million characters each
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def parse_weights(text: str) -> dict[str, float]:
    """ "english=.4,sums=.2" -> {"english": 0.4, "sums": 0.2}. Raises argparse.ArgumentTypeError."""
    try:
        weights = {name: float(value) for name, value in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected DOMAIN=WEIGHT,DOMAIN=WEIGHT,..., got {text!r}") from None
    unknown = sorted(set(weights) - {*TEXT_DOMAINS, SUMS})
    if unknown or any(w <= 0 for w in weights.values()):
        raise argparse.ArgumentTypeError(
            f"domains are {(*TEXT_DOMAINS, SUMS)} with weights above 0, got {text!r}"
        )
    return weights


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", choices=("moe", "dense", "draft", "tokenizer"), required=True, help="what to train")
    add(
        "--corpus",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of DOMAIN.train.txt.xz and DOMAIN.valid.txt.xz",
    )
    add(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for the model, as transformers loads it",
    )
    add("--minutes", type=float, help="budget of the whole command, tokenising and final evaluation included")
    add("--steps", type=int, help="length of the run in steps (with --minutes: whichever ends first)")
    add("--seed", type=int, default=0)
    add("--target", type=Path, metavar="DIR", help="for --model draft: the model it is distilled from")
    add("--temperature", type=float, default=1.0, help="of target and draft in the loss of a distillation")
    add(
        "--written",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of the sequences that the target has written itself, from beginnings in the corpus",
    )
    add("--sequences", type=int, default=49_152, help="with --written: how many it writes")
    add(
        "--config",
        type=Path,
        metavar="DIR",
        help="folder whose config.json is the shape (default: the bundled model's)",
    )
    add("--tokenizer", type=Path, default=ZOO / "quintet-moe", metavar="DIR", help="folder of tokenizer.json")
    add(
        "--weights",
        type=parse_weights,
        default=parse_weights(WEIGHTS),
        help=f"domain weights (default {WEIGHTS})",
    )
    add("--problems", type=int, default=3_000_000, help="size of the generated sums domain")
    add("--batch", type=int, default=128, help="sequences a step")
    add("--length", type=int, default=512, help="tokens a sequence")
    add("--optimizer", choices=("muon", "adamw"), default="muon")
    add("--lr", type=float, default=4e-3, help="peak learning rate")
    add("--weight-decay", type=float, default=0.1)
    add("--warmup", type=int, default=100, help="steps of rising learning rate")
    add(
        "--decay", type=float, default=1.0, help="last share of the run in which the rate falls linearly to 0"
    )
    add("--balance", choices=MODES, default="bias", help="load balancing of the experts")
    add("--aux-weight", type=float, default=0.01, help="weight of the auxiliary loss, a layer")
    add("--z-weight", type=float, default=0.001, help="weight of the router z-loss, a layer")
    add("--bias-rate", type=float, default=0.001, help="step of the selection bias")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of parameters and activations (default bfloat16 on a GPU)",
    )
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--compile", action="store_true", help="torch.compile the forward and backward pass")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes that tokenise")
    add("--cache", type=Path, metavar="DIR", help="keep token streams here")
    add("--state", type=Path, metavar="DIR", help="folder for the resumable state (default OUT/state)")
    add("--resume", action="store_true", help="go on from the state folder, if it holds one")
    add("--save-minutes", type=float, default=1.5, help="time between saves")
    add("--no-eval", action="store_true", help="skip the evaluation at the end")


def run(args: argparse.Namespace) -> None:
    began = time.monotonic()
    if args.model == "tokenizer":
        train_the_tokenizer(args)
        return
    require(
        args.model != "draft" or args.target is not None,
        "--model draft needs --target, the model to distil from",
    )
    require(0 <= args.written < 1, f"--written is a share, 0 or more and less than 1, got {args.written}")
    require(
        args.model == "draft" or not args.written,
        "--written is text of the model to distil from: it belongs to --model draft",
    )
    require(args.sequences >= 1, f"--sequences must be at least 1, got {args.sequences}")
    template = json.loads(
        ((args.config or ZOO / f"quintet-{args.model}") / "config.json").read_text(encoding="utf-8")
    )
    texts = [d for d in args.weights if d != SUMS]
    for split in ("train",) if args.no_eval else ("train", "valid"):
        for domain in texts:  # before the first minutes are spent
            corpus_file(args.corpus, domain, split)
    device = pick_device(args.device)
    train = TrainConfig(
        steps=args.steps,
        minutes=args.minutes,
        batch=args.batch,
        length=args.length,
        seed=args.seed,
        warmup=args.warmup,
        decay=args.decay,
        dtype=args.dtype or ("bfloat16" if device.type == "cuda" else "float32"),
        compile=args.compile,
        temperature=args.temperature,
        save_minutes=args.save_minutes,
        optimizer=OptimizerConfig(name=args.optimizer, lr=args.lr, weight_decay=args.weight_decay),
        balance=BalanceConfig(
            mode=args.balance, aux_weight=args.aux_weight, z_weight=args.z_weight, bias_rate=args.bias_rate
        ),
    )
    tokenizer = load_tokenizer(args.tokenizer)
    # Before anything touches the device: the tokenising processes are forks of this one.
    corpus = Corpus.read(
        tokenizer,
        args.corpus,
        args.weights,
        seed=args.seed,
        problems=args.problems,
        workers=args.workers,
        cache=args.cache,
    )
    valid = (
        {}
        if args.no_eval
        else encode_corpus(tokenizer, args.corpus, "valid", texts, args.workers, args.cache)
    )
    tqdm.write(
        f"{len(corpus.tokens):,} tokens after {time.monotonic() - began:.0f} s: "
        + str({d: end - first for d, (first, end) in corpus.spans.items()})
    )
    teacher = None if args.target is None else use_grouped(load_model(args.target, train.dtype, device))
    weights = args.weights
    if teacher is not None and args.written:
        rows_SL = written(
            teacher, corpus, weights, sequences=args.sequences, length=args.length + 1,
            end_of_text=tokenizer.encode(END_OF_TEXT, add_special_tokens=False).ids[0], seed=args.seed, cache=args.cache,
        )  # fmt: skip
        corpus = corpus.extended(WRITTEN, rows_SL)
        scale = (1 - args.written) / sum(weights.values())
        weights = {**{d: w * scale for d, w in weights.items()}, WRITTEN: args.written}
        tqdm.write(f"{rows_SL.size:,} tokens written after {time.monotonic() - began:.0f} s")
    sampler = Sampler(corpus, weights, args.batch, args.length, args.seed)
    trainer = Trainer(model_config_from_hf(template), train, sampler, device, teacher)
    state = args.state or args.out / "state"
    if args.resume and (state / STATE).is_file():
        trainer.load_state(state)
        tqdm.write(f"resumed at step {trainer.step}")

    def stop(signum: int, frame: object) -> None:
        trainer.stop = True

    handlers = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
    extra = {k: v for k, v in template.items() if k != "dtype"}

    def report() -> dict:
        return {
            "model": args.model,
            "seed": args.seed,
            "steps": trainer.step,
            "progress": trainer.progress,
            "tokens_seen": trainer.tokens_seen(),
            "epochs": {d: round(e, 3) for d, e in sampler.epochs().items()},
            "weights": args.weights,
            "written": {"share": args.written, "sequences": args.sequences} if args.written else None,
            "seconds": round(time.monotonic() - began, 1),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "compiled": trainer.forward is not trainer.objective,
            "config": asdict(train),
            "history": trainer.history,
        }

    def save(_: Trainer) -> None:
        export(trainer, args.out, args.tokenizer, extra)
        write_json(args.out / "train.json", report())
        trainer.save_state(state)

    reserve = 0 if args.no_eval or device.type == "cpu" else 25  # seconds kept for the evaluation
    trainer.run(save, time.monotonic() - began + reserve)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if valid:
        result = evaluate.training_report(trainer.model, teacher, tokenizer, valid, args.weights, device)
        tqdm.write(json.dumps(result))
        write_json(args.out / "train.json", {**report(), "evaluation": result})
    tqdm.write(
        f"{args.out}: {trainer.step} steps, {trainer.tokens_seen():,} tokens, {time.monotonic() - began:.0f} s"
    )


def export(trainer: Trainer, out: Path, tokenizer: Path, extra: dict) -> None:
    """Write the model and what belongs to it, each file replaced in one move."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as partial:
        trainer.export(Path(partial), extra)
        for name in TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, Path(partial, name))
        for path in Path(partial).iterdir():
            os.replace(path, out / path.name)


def train_the_tokenizer(args: argparse.Namespace) -> None:
    domains = [d for d in args.weights if d != SUMS]
    documents = {d: read_documents(args.corpus, d, "train") for d in domains}
    budget = {d: int(1e6 * TOKENIZER_SHARES[d]) for d in domains}
    vocabulary = json.loads(
        ((args.config or ZOO / "quintet-moe") / "config.json").read_text(encoding="utf-8")
    )
    tokenizer = train_tokenizer(sample_texts(documents, budget), vocabulary["vocab_size"])
    save_tokenizer(tokenizer, args.out, vocabulary["max_position_embeddings"])
    tqdm.write(f"{args.out / 'tokenizer.json'}: {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="tinymoe train", description=__doc__, allow_abbrev=False)
    add_arguments(parser)
    run(parser.parse_args())
