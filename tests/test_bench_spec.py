"""`tinymoe bench spec`: rows say what they must, nobody speculates at depth 0, forced acceptance gives the tokens that the
closed form promises, and options that make no sense are refused."""

import itertools
import json
import re

import numpy as np
import pytest
import torch
from tiny_models import BUNDLED, cases, model

from tinymoe.__main__ import main
from tinymoe.bench import tables
from tinymoe.bench.results import read_results, timing
from tinymoe.bench.spec import command, measure, synthetic, texts
from tinymoe.bench.spec.measure import Arm, Timed, against_best, decode, summary
from tinymoe.core.config import EngineConfig
from tinymoe.core.model_config import ConfigError
from tinymoe.engine.engine import Engine
from tinymoe.engine.spec.drafter import ModelDrafter
from tinymoe.model.weights import load_model
from tinymoe.text import Tokenizer

FIELDS = {
    *("target", "domain", "draft", "requests", "depth", "adaptive", "synthetic", "tok_s", "plain_tok_s", "bound_tok_s"),
    *("acceptance", "distinct_experts"),
}  # fmt: skip
SHAPE = {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "hidden_size": 32, "intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2,
    "norm_topk_prob": False, "vocab_size": 256, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32", "eos_token_id": 1, "attention_bias": False,
}  # fmt: skip
bundled = pytest.mark.skipif(
    not all((BUNDLED.parent / f"quintet-{n}" / "model.safetensors").exists() for n in ("moe", "dense", "draft")),
    reason="the bundled models are missing",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def arguments(*words):
    parser = command.argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(["--threads", "1", "--repeats", "1", *words])


def coin(rate, depth, adaptive=False, **options):
    engine = synthetic.guessing_engine(
        model("moe"), depth, adaptive, num_blocks=400, max_num_seqs=8, **options
    )
    synthetic.set_coin(engine, rate, seed=3)
    return engine


def prompts(requests):
    return [cases("moe")[i].prompt for i in range(1, 1 + requests)]


# The command


@bundled
def test_rows_of_the_bundled_pair(tmp_path, capsys):
    out = tmp_path / "spec_cpu.json"
    words = ["--domains", "sums", "--requests", "1", "3", "--depths", "0", "2", "--tokens", "6", "--repeats", "2", "--threads", "1"]  # fmt: skip
    assert main(["bench", "spec", *words, "--out", str(out)]) == 0
    body = read_results(out)
    rows = body["rows"]
    assert all(row.keys() >= FIELDS for row in rows)
    arms = {(r["target"], r["draft"], r["requests"], r["depth"], r["adaptive"]) for r in rows}
    kinds = [
        ("moe", "draft_model"), ("moe", "ngram"), ("moe", "self"), ("dense", "draft_model"), ("dense", "ngram"),
    ]  # fmt: skip
    expected = {(*k, n, d, d is None) for k in kinds for n in (1, 3) for d in (0, 2, None)}
    assert arms == expected
    assert len(rows) == len(expected)
    for row in rows:
        assert not row["synthetic"]
        assert row["same_as_plain"] == 1.0
        assert row["tok_s"] <= row["bound_tok_s"]
        assert (row["distinct_experts"] is None) == (row["target"] == "dense")
        if row["target"] == "moe":  # 2 of 16 experts for each token
            assert 2 <= row["distinct_experts"] <= 16
        if row["depth"] == 0:
            assert row["acceptance"] is None
            assert row["mean_depth"] == row["verifying_steps"] == 0
    deep = {
        (r["draft"], r["depth"]): r["distinct_experts"]
        for r in rows
        if r["target"] == "moe" and r["requests"] == 3
    }
    assert deep["draft_model", 2] > deep["draft_model", 0]
    assert len(body["controls"]) == 10
    again = re.sub("^tinymoe ", "", body["command"]).split()
    assert again[:2] == ["bench", "spec"]
    assert vars(arguments(*again[2:])) == vars(arguments(*words, "--out", str(out)))
    said = capsys.readouterr()
    assert "times plain (median" in said.out
    assert said.err.count("x plain") == len(rows)


def test_rows_of_random_weights_and_their_twin():
    a = arguments(
        "--synthetic",
        "0.5",
        "0.9",
        "--requests",
        "2",
        "--depths",
        "0",
        "3",
        "--tokens",
        "12",
        "--device",
        "cpu",
    )
    a.models = ["tiny"]
    rows = command.run_synthetic(a, {"tiny": SHAPE})
    assert all(row.keys() >= FIELDS and row["synthetic"] for row in rows)
    labels = [(r["model"], r["target"], r["forced_acceptance"], r["depth"]) for r in rows]
    names = (("tiny", "moe"), ("tiny dense twin", "dense"))
    assert labels == [(*n, rate, d) for n in names for rate in (0.5, 0.9) for d in (0, 3, None)]
    for low, high in zip(rows[:3], rows[3:6]):
        assert low["depth"] != 3 or low["tokens_per_verify"] < high["tokens_per_verify"]
    assert {r["same_as_plain"] for r in rows} == {None}


@pytest.mark.parametrize("apart", [True, False])
def test_random_tokens_visit_nearly_as_many_experts_as_independent_choices(tmp_path, apart):
    """n tokens, k of E experts each: E (1 - (1 - k/E)^n) in expectation; without distinct embeddings far fewer."""
    shape = {**SHAPE, "num_experts": 32, "num_experts_per_tok": 4, "hidden_size": 256}
    one = load_model(synthetic.write_folder(shape, tmp_path), "auto", "cpu", "dummy")
    if apart:
        synthetic.tell_apart(one, seed=1)
    engine = synthetic.guessing_engine(one, 4, False, num_blocks=200, max_model_len=400)
    synthetic.set_coin(engine, 0.5, seed=3)
    ids = np.random.default_rng(0).integers(0, 256, 64).tolist()
    run = decode(Arm("coin", engine, 4), [ids], 60, 390)
    visited, alone = run.experts / run.steps / 2, 32 * (1 - (1 - 4 / 32) ** 5)
    assert visited > 0.85 * alone if apart else visited < 0.75 * alone


def test_a_dense_draft_of_random_weights_is_really_run(monkeypatch):
    drafts, proposed = ModelDrafter.draft, []

    def counted(self, counts, *arguments, **options):
        proposed.append(sum(counts.values()))
        return drafts(self, counts, *arguments, **options)

    monkeypatch.setattr(ModelDrafter, "draft", counted)
    words = [
        "--synthetic",
        "0.6",
        "--requests",
        "2",
        "--depths",
        "0",
        "3",
        "--tokens",
        "24",
        "--device",
        "cpu",
    ]
    a = arguments(*words, "--draft-layers", "1", "--no-twin")
    a.models = ["tiny"]
    plain, deep, free = command.run_synthetic(a, {"tiny": SHAPE})
    assert len(proposed) > 10
    assert max(proposed) == 2 * 3
    assert 0.3 < deep["acceptance"] < 0.9
    assert plain["mean_depth"] == 0
    assert {r["draft_layers"] for r in (plain, deep, free)} == {1}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--depths", "0"], "--depths must hold one above 0"),
        (["--depths", "-1", "2"], r"--depths must be in 0\.\.32"),
        (["--requests", "0"], "--requests must be at least 1, got 0"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--synthetic", "1.5"], r"acceptance rates in \[0, 1\], got 1.5"),
        (["--draft-cost", "0.1"], "belong to --synthetic"),
        (["--draft-layers", "1"], "belong to --synthetic"),
        (["--synthetic", "0.5", "--draft-layers", "-1"], "--draft-layers must be at least 0"),
        (["--synthetic", "0.5", "--draft-layers", "1", "--draft-cost", "0.2"], "give one of them"),
        (["--synthetic", "0.5", "--draft-cost", "2"], "--draft-cost is a share of a plain step"),
        (["--targets", "dense", "--drafts", "self"], "a dense model has no experts to leave out"),
    ],
)
def test_bad_options_are_refused(words, why, capsys):
    assert main(["bench", "spec", *words]) == 1
    assert re.search(why, capsys.readouterr().err)


@pytest.mark.parametrize(
    "words", [["--drafts", "oracle"], ["--targets", "gpt"], ["--models", "gpt"], ["--domains", "x"]]
)
def test_unknown_names_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "spec", *words])
    assert "invalid choice" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["bench", "spec", "--synthetic", "0.5"]) == 1
    assert "torch sees no GPU" in capsys.readouterr().err


def test_sequences_longer_than_the_model_are_refused():
    a = arguments("--synthetic", "0.8", "--tokens", "400", "--device", "cpu", "--total", "400")
    a.models = ["tiny"]
    with pytest.raises(ConfigError, match="lower one of them"):
        command.run_synthetic(a, {"tiny": SHAPE})


# Prompts


@bundled
def test_prompts_differ_and_the_sums_are_right():
    tokenizer = Tokenizer(BUNDLED)
    for domain in texts.DOMAINS:
        ids = texts.prompts(domain, 64, 0, tokenizer)
        assert len({tuple(i) for i in ids}) == 64
        assert min(map(len, ids)) >= 8
    for text in texts.sums(5, seed=1):
        *solved, asked = text.split("\n")
        assert len(solved) == texts.SOLVED
        assert all(eval(left) == int(right) for left, right in (line.split("=") for line in solved))
        assert re.fullmatch(r"\d+[-+*]\d+=", asked)


# The measuring


def test_depth_0_is_plain_decoding():
    ids, most = prompts(3), 100
    plain = Arm("plain", Engine(model("moe"), EngineConfig(num_blocks=400, max_model_len=128)), None, False)
    zero = Arm("zero", coin(1.0, 4, max_model_len=128), 0)
    a, b = decode(plain, ids, 8, most), decode(zero, ids, 8, most)
    assert a.made == b.made == [one[: len(a.made[0])] for one in a.made]
    assert (a.tokens, a.steps) == (b.tokens, b.steps) == (24, 8)
    assert a.experts == b.experts > 0
    assert b.counts == dict.fromkeys(b.counts, 0)
    for one, case in zip(a.made, cases("moe")[1:]):
        assert one[:10] == case.answer[:10]


@pytest.mark.parametrize(("rate", "depth"), [(0.0, 3), (0.5, 2), (0.7, 4), (1.0, 3)])
def test_forced_acceptance_gives_the_expected_tokens(rate, depth):
    """E = 1 + r + r^2 + ... + r^k; n verifications with a standard deviation of at most k/2 each."""
    run = decode(Arm("coin", coin(rate, 4, max_model_len=128), depth), prompts(6), 50, 110)
    n = run.counts["verifications"]
    assert n >= 60
    assert run.counts["draft_tokens"] >= 0.9 * depth * n
    expected = sum(rate**i for i in range(depth + 1))
    error = 0.05 + (4 * depth / 2 / np.sqrt(n) if 0 < rate < 1 else 0)
    assert run.counts["verified_tokens"] / n == pytest.approx(expected, abs=error)
    assert run.counts["verified_tokens"] == n + sum(run.accepted_at)
    if 0 < rate < 1:  # another coin would be noticed
        assert error < abs(expected - sum((rate + 0.3) ** i for i in range(depth + 1)))


def test_a_draft_takes_the_time_that_it_is_told_to():
    engine = coin(0.5, 2, max_model_len=128)
    synthetic.set_draft_cost([engine], 0.01)
    run = decode(Arm("coin", engine, 2), prompts(2), 10, 100)
    assert run.draft_s >= 0.02 * run.counts["verify_steps"] > 0
    assert run.bound <= run.tokens / run.draft_s


def test_the_twin_multiplies_as_many_parameters(tmp_path):
    """Router (8 x 32 a layer) and norms aside, OLMoE's being as wide as its heads together."""
    folders = [
        synthetic.write_folder(c, tmp_path / n) for n, c in (("moe", SHAPE), ("twin", synthetic.twin(SHAPE)))
    ]
    moe, twin = (load_model(f, "auto", "cpu", "dummy").config for f in folders)
    assert not twin.is_moe
    router, norms = 2 * 8 * 32, 2 * 2 * (32 - 8)
    assert moe.num_parameters(active=True) - router - norms == twin.num_parameters(active=True)


def made_up(seconds, tokens=20, verified=20, **more):
    counts = {
        "draft_tokens": 20,
        "accepted_tokens": 10,
        "verify_steps": 10,
        "verifications": 10,
        "verified_tokens": verified,
    }
    base = {
        "seconds": seconds, "tokens": tokens, "whole_seconds": 2 * seconds, "whole_tokens": tokens, "steps": 10,
        "draft_s": 0.25, "verify_s": 0.5, "plain_s": 0.25, "counts": counts, "accepted_at": [7, 3], "drafts_at": [10, 10],
        "experts": 80, "made": [[1, 2, 3]],
    }  # fmt: skip
    return Timed(**{**base, **more})


def test_a_summary_by_hand():
    runs, plain = [made_up(2.0), made_up(4.0), made_up(1.25)], [made_up(4.0, made=[[1, 2]]), made_up(2.0), made_up(5.0, made=[[9]])]  # fmt: skip
    row = summary(runs, plain, layers=2)
    assert (row["tok_s"], row["plain_tok_s"], row["bound_tok_s"]) == (10, 5, 20)
    assert row["speedup"]["median"] == 2.0
    assert row["bound_share"]["median"] == 0.5
    assert (row["acceptance"], row["acceptance_at"], row["tokens_per_verify"]) == (0.5, [0.7, 0.3], 2.0)
    assert row["distinct_experts"] == 4.0
    assert row["same_as_plain"] == pytest.approx(2 / 3)
    assert (row["draft_ms"], row["verify_ms"]) == (25.0, 75.0)


def hand_made_rows():
    base = {
        "model": "quintet-moe",
        "domain": "english",
        "draft": "ngram",
        "requests": 1,
        "plain_tok_s": 100.0,
    }
    fixed = {0: 99.0, 2: 120.0, 4: 90.0}
    rows = [
        {**base, "depth": d, "adaptive": d is None, "tok_s": s, "bound_tok_s": 150.0, "speedup": timing([s / 100]), "bound_share": timing([s / 150])}
        for d, s in [*fixed.items(), (None, 114.0)]
    ]  # fmt: skip
    slower = [timing([row["tok_s"] / 200]) for row in rows]
    return rows + [
        {**row, "requests": 16, "plain_tok_s": 200.0, "speedup": times} for row, times in zip(rows, slower)
    ]


def test_arms_take_turns_and_the_clock_sees_only_their_own(monkeypatch):
    """On a clock that every step of an arm moves by a number of its own, and the others, too."""
    clock, log = [0.0], []
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    arms = []
    for name, seconds in (("plain", 1.0), ("slow", 3.0), ("quick", 0.5)):
        engine = Engine(model("moe"), EngineConfig(num_blocks=400, max_model_len=128))
        step = engine.step

        def stepped(collect=True, step=step, name=name, seconds=seconds):
            clock[0] += seconds
            log.append(name)
            return step(collect=collect)

        engine.step = stepped
        arms.append(Arm(name, engine, None, False))
    runs = measure.interleave(arms, [prompts(2), prompts(2)], 12, 120, turn_s=2.0)
    for name, seconds in (("plain", 1.0), ("slow", 3.0), ("quick", 0.5)):
        assert [run.steps for run in runs[name]] == [12, 12]
        assert [run.seconds for run in runs[name]] == [12 * seconds] * 2
    turns = [len(list(group)) for _, group in itertools.groupby(log)]
    assert max(turns) < 12  # nobody runs through
    assert runs["plain"][0].made == runs["slow"][0].made
    whole = measure.interleave(arms, [prompts(2)], 12, 120)
    assert whole["slow"][0].seconds == 36


def test_a_coin_falls_alike_at_every_depth():
    """What is kept of the first two drafts does not depend on whether there is a third: the coin belongs to the place."""
    ids, kept = prompts(2), {}
    for depth in (2, 4):
        engine, verdicts = coin(0.6, 4, max_model_len=128), {}
        tossed = engine.spec._tossed

        def spying(seqs, tossed=tossed, verdicts=verdicts):
            found = tossed(seqs)
            for seq, n in zip(seqs, found):
                for place in range(min(n + 1, len(seq.draft_token_ids))):
                    verdicts[seq.seed, seq.num_tokens + place] = place < n
            return found

        engine.spec._tossed = spying
        decode(Arm("coin", engine, depth), ids, 20, 120, seed=5)
        kept[depth] = verdicts
    both = kept[2].keys() & kept[4].keys()
    assert len(both) > 10
    assert all(kept[2][place] == kept[4][place] for place in both)
    assert len({kept[2][place] for place in both}) == 2
    assert {seed for seed, _ in both} == {5, 6}


def test_adaptive_depth_is_held_against_the_best():
    one, many = against_best(hand_made_rows())
    assert (one["best_depth"], one["ratio"], one["best_of_its_bound"]) == (
        2,
        pytest.approx(0.95),
        pytest.approx(0.8),
    )
    assert (many["best_depth"], many["ratio"]) == (0, pytest.approx(0.57))
    assert (one["placebo"], many["placebo"]) == pytest.approx((0.99, 0.495))


def test_the_table_for_the_readme(monkeypatch, tmp_path):
    body = {
        "schema": 1, "command": "tinymoe bench spec", "commit": "0" * 40, "date": "2026-11-29T00:00:00Z",
        "machine": {"cpu": "x", "cores": 2, "memory_gb": 24.0, "gpu": None, "gpus": 0},
        "versions": {"python": "3.11", "torch": "2"}, "ceilings": {}, "rows": hand_made_rows(), "controls": [],
    }  # fmt: skip
    (tmp_path / "spec_cpu.json").write_text(json.dumps(body))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    table = tables.spec_cpu()
    assert "| target, text, draft | 1 request | 16 requests |" in table
    assert "| quintet-moe, english, ngram | 1.20 (depth 2), 1.14 | 0.60 (depth 2), 0.57 |" in table
    assert "on 2 cores (x), torch 2" in table
