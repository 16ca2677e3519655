"""The bundled models' cards: they agree with the folders they lie in, with each other and with the page, and the command
that measures does so rightly (judged on tiny random models)."""

import argparse
import hashlib
import json
import lzma
import math
import re
import shlex
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

from tinymoe import LLM, SamplingParams
from tinymoe.bench import card as suite
from tinymoe.bench.card.command import ZOO
from tinymoe.bench.card.measure import MODELS, Judge, targets
from tinymoe.bench.card.page import page
from tinymoe.bench.card.record import train_command
from tinymoe.core.model_config import ConfigError
from tinymoe.model.weights import load_model
from tinymoe.train import cli, evaluate
from tinymoe.train.sums import held_out_problems
from tinymoe.train.tokenizer import load_tokenizer, token_lengths

FOLDERS = {name: ZOO / f"quintet-{name}" for name in MODELS}
CPU = torch.device("cpu")
# Written for this test, so in no training text. A model that knows nothing needs 12 bits a token, about 4 a byte.
SLICES = {
    "english": (
        "The doctor put down his cup and looked at her for a long time without speaking. “You were quite right,” he said at "
        "last, “to send for me. I only wish that you had done so before the winter, when there was still something to hope "
        "for.” She made no answer; but when he had gone down the stairs she went to the window, and stood there until the "
        "sound of his horse had died away upon the road."
    ),
    "german": (
        "Der alte Mann stand lange am Fenster und sah auf den Hof hinaus, wo die Kinder im Schnee spielten. »Du hast recht«, sagte "
        "er endlich, »ich hätte nicht so lange warten sollen.« Die Frau antwortete nicht, sondern ging leise aus dem Zimmer und "
        "schloss die Tür hinter sich."
    ),
    "python": (
        "class Counter:\n    def __init__(self, name, start=0):\n        self.name = name\n        self.value = start\n\n"
        "    def add(self, amount):\n        if amount < 0:\n            raise ValueError('amount must not be negative')\n"
        "        self.value += amount\n        return self.value\n\n    def __repr__(self):\n"
        "        return f'{self.__class__.__name__}({self.name!r}, {self.value})'\n"
    ),
}


def read(name):
    return json.loads((FOLDERS[name] / "card.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def cards():
    return {name: read(name) for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_card_is_of_this_folder(cards, name):
    card, path = cards[name], FOLDERS[name] / cards[name]["weights"]["file"]
    config = json.loads((FOLDERS[name] / "config.json").read_text())
    with safe_open(path, "pt") as file:
        shapes = [file.get_slice(key).get_shape() for key in file.keys()]  # noqa: SIM118
        kinds = {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    assert card["name"] == FOLDERS[name].name
    assert card["parameters"]["total"] == sum(map(math.prod, shapes))
    assert card["weights"]["bytes"] == path.stat().st_size
    assert card["weights"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (card["weights"]["dtype"], kinds) == ("bfloat16", {"BF16"})
    assert card["architecture"].items() <= config.items()
    idle = config.get("num_experts", 0) - config.get("num_experts_per_tok", 0)
    unused = 3 * idle * config["hidden_size"] * config.get("moe_intermediate_size", 0)
    assert card["parameters"]["active"] == card["parameters"]["total"] - unused * config["num_hidden_layers"]


def test_cards_agree_with_each_other(cards):
    moe = cards["moe"]
    for key in ("bits_per_byte", "sums"):
        assert moe["control"][key] == cards["dense"]["evaluation"][key]
    for key in ("acceptance", "agreement"):
        assert moe["draft"][key] == cards["draft"]["evaluation"][key]
    assert (moe["control"]["name"], moe["draft"]["name"]) == ("quintet-dense", "quintet-draft")
    judges = ("python", "torch", "transformers", "tokenizers", "safetensors")
    same = [
        (card["evaluation"]["how"], [card["evaluation"]["versions"][j] for j in judges])
        for card in cards.values()
    ]
    assert same[0] == same[1] == same[2]
    assert len({hashlib.sha256((f / "tokenizer.json").read_bytes()).digest() for f in FOLDERS.values()}) == 1
    for key in ("seed", "weights", "tokens_seen"):
        assert cards["dense"]["training"][key] == moe["training"][key]


def test_targets_are_judged_by_the_figures_of_the_card(cards):
    moe, dense = (cards[n]["evaluation"] for n in ("moe", "dense"))
    load = moe["load"]
    got = {t["what"]: t for t in cards["moe"]["targets"]}
    for domain, bound in {"english": 1.45, "german": 1.54, "python": 1.13}.items():
        bits, control = moe["bits_per_byte"][domain], dense["bits_per_byte"][domain]
        assert got[f"{domain}, bits/byte"]["reached"] == (bits <= bound)
        assert got[f"{domain}, bits/byte minus the control's"]["reached"] == (control - bits >= 0.04 - 1e-9)
    verse = got["verse, bits/byte minus the control's"]
    assert verse["reached"] == (moe["bits_per_byte"]["verse"] <= dense["bits_per_byte"]["verse"] + 0.05)
    assert got["sums, share exact"]["reached"] == (moe["sums"]["exact"] >= 0.98)
    assert got["MaxVio of the worst layer"]["reached"] == all(v <= 0.35 for v in load["max_violation"])
    assert got["dead experts"]["reached"] == (load["dead"] == [])
    assert got["draft: sampling acceptance on english"]["reached"] == (
        cards["draft"]["evaluation"]["acceptance"]["english"] >= 0.64
    )
    size = sum(p.stat().st_size for f in FOLDERS.values() for p in f.iterdir() if p.suffix != ".md")
    cards_size = sum((f / "card.json").stat().st_size for f in FOLDERS.values())
    assert got["bytes of the three folders"]["got"] == size - cards_size
    assert size < 34_000_000
    assert all(t["reached"] for t in got.values())


def test_a_missed_target_is_called_missed(cards):
    found = {name: json.loads(json.dumps(card["evaluation"])) for name, card in cards.items()}
    found["moe"]["bits_per_byte"]["german"] = found["dense"]["bits_per_byte"]["german"] - 0.0399
    found["moe"]["load"]["max_violation"][3] = 0.36
    found["moe"]["load"]["dead"] = [[2, 7]]
    found["draft"]["acceptance"]["english"] = 0.6399
    missed = {t["what"] for t in targets(found, 1_505_001, 34_000_001) if not t["reached"]}
    assert missed == {
        "german, bits/byte minus the control's",
        "MaxVio of the worst layer",
        "dead experts",
        "draft: sampling acceptance on english",
        "draft: parameters, in millions",
        "bytes of the three folders",
    }


@pytest.mark.parametrize("name", MODELS)
def test_page_says_what_the_card_says(cards, name):
    card, text = cards[name], (FOLDERS[name] / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert text == page(card)
    for domain, bits in card["evaluation"]["bits_per_byte"].items():
        row = re.search(rf"^\| {domain}, bits/byte \| ([\d.]+) \|", text, re.M)
        assert row is not None
        assert float(row[1]) == bits
    for word in ("Python Software Foundation; All Rights Reserved", "BSD-3-Clause", "MIT", "public domain"):
        assert word in text
    assert f"{card['parameters']['total']:,} parameters" in text
    assert f"{card['training']['tokens_seen']:,} tokens" in text
    assert text.count("\n") < 120


@pytest.mark.parametrize("name", MODELS)
def test_command_on_the_card_asks_for_that_run(cards, name):
    training = cards[name]["training"]
    words = shlex.split(training["command"])
    assert words[:2] == ["tinymoe", "train"]
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    args = parser.parse_args(words[2:])
    assert (args.model, args.seed, args.weights) == (name, training["seed"], training["weights"])
    assert (args.lr, args.optimizer) == (training["optimizer"]["lr"], training["optimizer"]["name"])
    assert (args.batch, args.length, args.warmup) == tuple(training[k] for k in ("batch", "length", "warmup"))
    assert training["tokens_seen"] == training["steps"] * args.batch * args.length
    if name == "moe":
        assert args.balance == training["balance"]["mode"]


@pytest.mark.parametrize("name", MODELS)
def test_bits_per_byte_of_the_engine_are_transformers(name):
    """The paged engine's prompt log probabilities, against a plain loop over transformers' logits."""
    llm = LLM(f"quintet-{name}", dtype="float32", num_blocks=64)
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDERS[name], dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDERS[name])
    for text in SLICES.values():
        ids = [0, *tokenizer.encode(text, add_special_tokens=False)]
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        output = llm.generate([{"prompt_token_ids": ids}], params)[0]
        ours = -sum(entry[i].logprob for i, entry in zip(ids[1:], output.prompt_logprobs[1:]))
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double()
        theirs = sum((logits[p].logsumexp(0) - logits[p, i]).item() for p, i in enumerate(ids[1:]))
        size = math.log(2) * len(text.encode())
        assert ours / size == pytest.approx(theirs / size, abs=1e-4)
        assert ours / size < 1.5


def test_engine_solves_held_out_sums(cards):
    problems = held_out_problems(200)
    problems = problems.where(problems.three_digits)
    llm = LLM("quintet-moe", dtype="float32")
    outputs = llm.generate(problems.prompts()[:60], SamplingParams(temperature=0, max_tokens=6, stop=["\n"]))
    right = [o.outputs[0].text == str(c) for o, c in zip(outputs, problems.answer.tolist())]
    assert len(right) >= 40
    assert sum(right) / len(right) >= cards["moe"]["evaluation"]["sums"]["exact_three_digits"] - 0.1


def test_judge_counts_the_experts_that_our_router_chooses():
    tokenizer = load_tokenizer(FOLDERS["moe"])
    text = "\n".join(SLICES.values())
    stream = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint16)
    judge, ours = Judge(FOLDERS["moe"]), load_model(FOLDERS["moe"], "float32")
    evaluate.bits_per_byte(judge, stream, token_lengths(tokenizer), window=64, batch=3)
    counts = judge.loads()
    with torch.no_grad():
        parts = [stream[i : i + 65] for i in range(0, len(stream) - 1, 64)]
        total = torch.stack([evaluate.decoder_loads(ours, part, 1, CPU) for part in parts]).sum(0)
    assert counts.sum(1).tolist() == [2 * (len(stream) - 1)] * 6
    assert (counts - total).abs().sum() <= 4  # a near tie may fall either way
    assert judge.loads().sum() == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Tiny random models, a little text, and records of runs that never were."""
    root = tmp_path_factory.mktemp("card")
    common = {"vocab_size": 4096, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    common |= {"num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True, "intermediate_size": 24}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
    for seed, name in enumerate(MODELS):
        family = ("Qwen3Moe" if name == "moe" else "Qwen3", moe if name == "moe" else {})
        torch.manual_seed(seed)
        config = getattr(transformers, f"{family[0]}Config")(
            **common, **family[1], max_position_embeddings=2048, initializer_range=0.3
        )
        model = getattr(transformers, f"{family[0]}ForCausalLM")(config)
        model.to(torch.bfloat16).save_pretrained(root / f"quintet-{name}")
        raw = json.loads((root / f"quintet-{name}" / "config.json").read_text())
        raw |= {"rope_theta": 10000.0, "torch_dtype": raw.pop("dtype")}
        (root / f"quintet-{name}" / "config.json").write_text(json.dumps(raw))
        shutil.copyfile(FOLDERS[name] / "tokenizer.json", root / f"quintet-{name}" / "tokenizer.json")
    texts = {
        "english": SLICES["english"] * 12,
        "german": SLICES["german"] * 3,
        "python": SLICES["python"],
    }
    texts["verse"] = "KING:\nWho knocks so late? My lords, put up your swords.\n"
    for domain, text in texts.items():
        with lzma.open(root / f"{domain}.valid.txt.xz", "wt", encoding="utf-8") as file:
            file.write(text)
    rows = "\n".join(f"| {domain} | a work | {len(text)} |" for domain, text in texts.items())
    (root / "SOURCES.md").write_text(f"| domain | work | characters |\n| --- | --- | --- |\n{rows}\n")
    records = root / "records"
    records.mkdir()
    for name in MODELS:
        config = {"steps": 40, "minutes": None, "batch": 128, "length": 512, "warmup": 7, "decay": 1.0}
        config |= {"dtype": "bfloat16", "compile": False}
        config["optimizer"] = {"name": "muon", "lr": 0.006, "weight_decay": 0.1, "eps": 1e-10}
        config["balance"] = {"mode": "aux", "aux_weight": 0.01, "z_weight": 0.001, "bias_rate": 0.001}
        history = [{"step": i, "loss": 3.0 - i / 100, "tokens_per_s": 1000 + i} for i in range(1, 41)]
        run = {"model": name, "seed": 5, "steps": 40, "tokens_seen": 40 * 128 * 512, "seconds": 12.3}
        run |= {"date": "2026-01-02T03:04:05Z", "device": "a GPU", "torch": "2.11.0", "compiled": False}
        weights = {"english": 0.4, "german": 0.2, "python": 0.2, "verse": 0.05, "sums": 0.15}
        run |= {
            "config": config,
            "history": history,
            "weights": weights,
            "epochs": dict.fromkeys(weights, 1.5),
        }
        (records / f"{name}.json").write_text(json.dumps(run))
        bits = dict.fromkeys(texts, 2.0 + len(name))
        trial = {**run, "evaluation": {"bits_per_byte": bits, "sums": {"exact": 0.25}}}
        (records / f"{name}-short.json").write_text(json.dumps(trial))
    return root


@pytest.fixture
def measured(made, tmp_path):
    return shutil.copytree(made, tmp_path / "measured")


def command(root, *more):
    parser = argparse.ArgumentParser()
    suite.add_arguments(parser)
    arguments = ["--corpus", str(root), "--zoo", str(root), "--problems", "40", "--threads", "1", *more]
    assert suite.run(parser.parse_args(arguments)) == 0
    return {name: json.loads((root / f"quintet-{name}" / "card.json").read_text()) for name in MODELS}


def test_command_measures_the_saved_folders(measured, capsys):
    with pytest.raises(ConfigError, match=r"quintet-dense/card.json'\] not found, .* give --records"):
        command(measured)
    got = command(measured, "--records", str(measured / "records"))
    assert "MISSED   english, bits/byte: " in capsys.readouterr().out
    tokenizer = load_tokenizer(measured / "quintet-moe")
    with lzma.open(measured / "english.valid.txt.xz", "rt", encoding="utf-8") as file:
        text = file.read()
    ids = [0, *tokenizer.encode(text, add_special_tokens=False).ids]
    assert len(ids) > 1025  # whole windows and a rest
    distributions = {}
    for name in MODELS:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            measured / f"quintet-{name}", dtype=torch.float32
        )
        with torch.no_grad():
            windows = [model(torch.tensor([ids[i : i + 512]])).logits[0] for i in range(0, len(ids), 512)]
        distributions[name] = torch.cat(windows).double().softmax(-1)[: len(ids) - 1]
        chosen = distributions[name][torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        bits = -chosen.log2().sum().item() / len(text.encode())
        assert got[name]["evaluation"]["bits_per_byte"]["english"] == pytest.approx(bits, abs=1e-4)
        assert got[name]["evaluation"]["sums"]["problems"] == 40
        assert got[name]["data"]["english"]["valid_bytes"] == len(text.encode())
    kept = torch.minimum(distributions["moe"], distributions["draft"]).sum(-1).mean().item()
    assert got["draft"]["evaluation"]["acceptance"]["english"] == pytest.approx(kept, abs=1e-4)
    assert set(got["draft"]["evaluation"]["acceptance"]) == {*SLICES, "verse", "sums"}
    assert len(got["moe"]["evaluation"]["load"]["max_violation"]) == 2


def test_training_is_told_from_the_records_and_kept_without_them(measured):
    got = command(measured, "--records", str(measured / "records"))
    training = got["dense"]["training"]
    assert training["command"] == (
        "tinymoe train --model dense --corpus DIR --out DIR --seed 5 --steps 40 --warmup 7 --lr 0.006 --balance aux "
        "--weights english=0.4,german=0.2,python=0.2,verse=0.05,sums=0.15"
    )
    assert (training["tokens_per_s"], training["balance"], training["optimizer"]["eps"]) == (
        1020,
        None,
        1e-10,
    )
    assert [p["step"] for p in training["curve"]] == [*range(1, 40, 2), 40]
    assert [t["bits_per_byte"]["english"] for t in training["trials"]] == [7.0]
    assert {name: card["training"] for name, card in command(measured).items()} == {
        name: card["training"] for name, card in got.items()
    }
    (measured / "records" / "draft.json").rename(measured / "records" / "other.json")
    with pytest.raises(ConfigError, match=r"records lacks \['draft.json'\]: the train.json of each run"):
        command(measured, "--records", str(measured / "records"))


def test_some_are_measured_anew_and_the_others_keep_their_figures(measured):
    first = command(measured, "--records", str(measured / "records"))
    folder = measured / "quintet-dense"
    wrong = {**first["dense"], "evaluation": {**first["dense"]["evaluation"], "date": "2001-01-01T00:00:00Z"}}
    (folder / "card.json").write_text(json.dumps(wrong))
    got = command(measured, "--only", "draft")
    assert got["dense"]["evaluation"] == wrong["evaluation"]
    assert got["moe"]["control"] == first["moe"]["control"]
    stamps = ("date", "command")
    for key in first["draft"]["evaluation"]:
        assert key in stamps or got["draft"]["evaluation"][key] == first["draft"]["evaluation"][key]
    assert got["draft"]["evaluation"]["command"] == "tinymoe bench card --corpus DIR --only draft"
    with pytest.raises(ConfigError, match="--only needs draft"):
        command(measured, "--only", "moe")
    wrong["weights"] = {**wrong["weights"], "sha256": "0" * 64}
    (folder / "card.json").write_text(json.dumps(wrong))
    with pytest.raises(ConfigError, match=r"quintet-dense/card.json is of other weights than lie there"):
        command(measured, "--only", "draft", "moe")


def test_sources_must_name_every_domain(measured, tmp_path):
    (tmp_path / "SOURCES.md").write_text("| english | a work | 12 |\n| chess | games | 3 |\n")
    with pytest.raises(ConfigError, match=r"names no work for \['german', 'python', 'verse'\]"):
        command(measured, "--records", str(measured / "records"), "--corpus", str(tmp_path))


def test_command_of_a_distilled_run_names_its_target():
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    default = vars(parser.parse_args(["--model", "draft", "--corpus", "c", "--out", "o"]))
    names = ("steps", "minutes", "batch", "length", "warmup", "decay", "compile")
    config = {
        **{k: default[k] for k in names},
        "optimizer": {"name": default["optimizer"], **{k: default[k] for k in ("lr", "weight_decay")}},
        "balance": {
            "mode": default["balance"],
            **{k: default[k] for k in ("aux_weight", "z_weight", "bias_rate")},
        },
    }
    run = {"model": "draft", "seed": default["seed"], "weights": default["weights"], "config": config}
    assert train_command(run) == (
        "tinymoe train --model draft --corpus DIR --out DIR --target tinymoe/zoo/quintet-moe"
    )
    run |= {"written": {"share": 0.5, "sequences": 7}, "config": {**config, "temperature": 0.6}}
    assert train_command(run).endswith("quintet-moe --temperature 0.6 --written 0.5 --sequences 7")
