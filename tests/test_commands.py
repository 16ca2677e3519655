"""The command line: what is printed where, what is refused and how, and which exit status tells of it."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tinymoe.__main__ import COMMANDS, main
from tinymoe.bench import engine as bench_engine
from tinymoe.core.params import SamplingParams
from tinymoe.llm import LLM

ROOT = Path(__file__).resolve().parent.parent
DRAFT = ["--model", "quintet-draft", "--num-blocks", "16"]
BROKEN = ["--repetition-penalty", "1e-300"]  # bans every token: accepted, and fails at the first one
WHY = "every token is banned"


def shell(*words, stdin=b"", before="pass"):
    """(status, stdout, stderr) of a process of its own."""
    code = f"import sys; {before}; from tinymoe.__main__ import main; sys.exit(main(sys.argv[1:]))"
    run = subprocess.run(
        [sys.executable, "-c", code, *words], input=stdin, capture_output=True, cwd=ROOT, timeout=120
    )
    return run.returncode, run.stdout.decode(), run.stderr.decode()


def one_line(text):
    """No traceback: one line that names the command."""
    assert text.startswith("tinymoe ")
    assert text.count("\n") == 1, text
    return text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--output-tokens", "0"], "--output-tokens must be at least 1, got 0"),
        (["--threads", "-1"], "--threads must be at least 1, got -1"),
        (["--seed", "-1"], "--seed must be at least 0, got -1"),
    ],
    ids=lambda v: v[0] if isinstance(v, list) else "",
)
def test_a_benchmark_that_measures_nothing_is_refused_before_a_model_is_loaded(
    monkeypatch, capsys, words, message
):
    monkeypatch.setattr(bench_engine, "LLM", None)
    assert main(["bench", "engine", *words]) == 1
    assert message in one_line(capsys.readouterr().err)


# What is printed


def test_one_prompt_is_printed_with_its_completion(capsys):
    assert main(["generate", "Es war", *DRAFT, "--temperature", "0", "--max-tokens", "6"]) == 0
    llm = LLM("quintet-draft", num_blocks=16)
    [expected] = llm.generate("Es war", SamplingParams(temperature=0, max_tokens=6))
    assert capsys.readouterr().out == f"Es war{expected.outputs[0].text}\n"


def test_n_completions(capsys):
    words = [
        "generate",
        "Es war",
        *DRAFT,
        "--n",
        "3",
        "--max-tokens",
        "4",
        "--seed",
        "7",
        "--temperature",
        "1",
    ]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    texts = [one["text"] for one in body["completions"]]
    assert len(set(texts)) == 3
    assert shown == "".join(f"[{n} of 3] Es war{text}\n\n" for n, text in enumerate(texts, 1))
    assert {k: body[k] for k in body["completions"][0]} == body["completions"][0]
    assert [len(one["token_ids"]) for one in body["completions"]] == [4, 4, 4]
    assert body["error"] is None


def test_chat_answers_each_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("12+35=\nund dann\n"))
    assert main(["chat", *DRAFT, "--temperature", "0", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out.count("\n") >= 2


def test_the_demo_says_when_its_pages_were_drawn(capsys):
    assert main(["demo", "--max-tokens", "4"]) == 0
    out = capsys.readouterr().out
    # The longest prompts are read in one step (2048 tokens), so all end in step 3 with their fourth token.
    said = " ".join(out.split())
    assert "Taken in step 3, just before the first request (english) ends: A english, B german," in said
    assert " Step 3: " in said  # the caption of that page table
    assert json.loads(out.splitlines()[-1])["requests"] == 7


def demo(capsys, *words):
    """(what is drawn, in one line, the last line's facts)."""
    assert main(["demo", "--max-tokens", "20", *words]) == 0
    *drawn, last = capsys.readouterr().out.splitlines()
    return " ".join(" ".join(drawn).split()), json.loads(last)


def test_the_demo_says_what_speculation_saved(capsys):
    guessed, facts = demo(capsys)
    plain, without = demo(capsys, "--no-speculation")
    answers = [text.split("Page table")[0] for text in (guessed, plain)]
    assert answers[0] == answers[1]
    assert "Speculation" not in plain
    assert (without["draft_tokens"], without["verify_steps"]) == (0, 0)
    assert facts["draft_tokens"] >= facts["verify_steps"] > 0
    assert (
        f"Speculation by looking up, at most 4 tokens ahead: {facts['draft_tokens']} drafted, "
        f"{facts['accepted_tokens']} accepted, in {facts['verify_steps']} of {facts['steps']} steps, as many as seemed to pay."
    ) in guessed
    assert "the texts are those of --no-speculation." in guessed


def test_the_demo_with_a_draft_model_takes_fewer_steps(capsys):
    config = {
        "method": "draft_model",
        "model": "quintet-draft",
        "num_speculative_tokens": 2,
        "adaptive": False,
    }
    _, without = demo(capsys, "--no-speculation")
    for acceptance, words in (("coupled", "are those"), ("exact", "are distributed as those")):
        said, facts = demo(capsys, "--speculative-config", json.dumps(config | {"acceptance": acceptance}))
        assert facts["steps"] < without["steps"] == 20 + 1
        assert (
            f"Speculation by quintet-draft, at most 2 tokens ahead: {facts['draft_tokens']} drafted" in said
        )
        assert f"the texts {words} of --no-speculation." in said
        assert "seemed to pay" not in said
        assert f"which saved {facts['accepted_tokens']} passes" in said


def test_speculation_for_one_prompt(capsys):
    words = ["generate", "3+4=7\n3+4=", "--num-blocks", "16", "--temperature", "0", "--max-tokens", "12"]
    assert main(words) == 0
    plain = capsys.readouterr().out
    assert main([*words, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']) == 0
    assert capsys.readouterr().out == plain


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("ngram", 2, "a JSON object is wanted, got 'ngram'"),
        ("[]", 2, "a JSON object is wanted, got '[]'"),
        ('{"method": "ngram"}', 1, "speculative_config needs num_speculative_tokens"),
        ('{"method": "luck", "num_speculative_tokens": 2}', 1, "method must be"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat", "demo"])
def test_speculation_that_is_refused(capsys, monkeypatch, command, text, status, said):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    words = [command, *DRAFT, "--speculative-config", text]
    if status == 2:
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
    else:
        assert main(words) == 1
    assert said in capsys.readouterr().err


def test_the_demo_cannot_speculate_and_not(capsys):
    words = ["--no-speculation", "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}']
    assert main(["demo", *words]) == 1
    assert "contradict each other: give one of them" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "bytes_a_number"),
    [([], 4 if not torch.cuda.is_available() else 2), (["--dtype", "bfloat16"], 2), (["--device", "cpu"], 4)],
)
def test_info_counts_in_the_dtype_that_would_serve(capsys, words, bytes_a_number):
    assert main(["info", "--json", *words]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kv_bytes_per_token"] == 2 * 2 * 32 * 6 * bytes_a_number  # K and V, heads, width, layers
    assert facts["weight_bytes"] == facts["parameters"] * bytes_a_number
    assert facts["dtype"] == ("float32" if bytes_a_number == 4 else "bfloat16")


def test_info_agrees_with_the_engine(capsys):
    main(["info", "--json", "--model", "quintet-draft"])
    facts = json.loads(capsys.readouterr().out)
    llm = LLM("quintet-draft", num_blocks=16)
    weights = list(llm.engine.runner.model.parameters())
    assert facts["weight_bytes"] == sum(p.numel() * p.element_size() for p in weights)
    assert facts["dtype"] == str(weights[0].dtype).removeprefix("torch.")


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    declared = next(x for x in (ROOT / "pyproject.toml").read_text().splitlines() if x.startswith("version"))
    assert (ended.value.code, capsys.readouterr().out) == (0, f"tinymoe {declared.split(chr(34))[1]}\n")


@pytest.mark.parametrize("word", ["seed", "max-tokens"])
def test_help_tells_the_real_defaults(capsys, word):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    about = text.split(f"--{word} X", 2)[-1].split(" --")[0]
    assert ("engine derives" if word == "seed" else "(default: 64)") in about
    assert "the model's own" not in about


def test_a_terminal_without_a_prompt_is_told_to_type(capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("hi\n"))
    assert main(["generate", *DRAFT, "--max-tokens", "1"]) == 0
    said = capsys.readouterr()
    assert said.err == "Type a prompt; Ctrl-D on an empty line ends it.\n"
    assert said.out.startswith("hi")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert main(["generate", *DRAFT, "--max-tokens", "1"]) == 0
    assert capsys.readouterr().err == ""


# A failed request is a failure


def test_a_failed_request(capsys):
    assert main(["generate", "hi", *DRAFT, *BROKEN]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert one_line(said.err).startswith(f"tinymoe generate: the request failed: {WHY}")


def test_failed_requests_of_a_batch(capsys):
    assert main(["generate", "hi", "ho", "--json", *DRAFT, *BROKEN]) == 1
    said = capsys.readouterr()
    bodies = [json.loads(line) for line in said.out.splitlines()]
    assert [b["finish_reason"] for b in bodies] == ["error", "error"]
    assert all(WHY in b["error"] for b in bodies)
    assert [line.partition(" failed: ")[0] for line in said.err.splitlines()] == [
        "tinymoe generate: prompt 1 of 2",
        "tinymoe generate: prompt 2 of 2",
    ]


def test_a_failed_answer_ends_the_chat(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\nho\n"))
    assert main(["chat", *DRAFT, *BROKEN]) == 1
    assert one_line(capsys.readouterr().err).startswith(f"tinymoe chat: the request failed: {WHY}")


def test_nothing_is_printed_of_a_prompt_that_is_refused(capsys):
    assert main(["generate", "hi " * 3000, *DRAFT]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "max_model_len" in one_line(said.err)


# Refusals


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "hi", "--max", "3"],
        ["chat", "--sys", "x"],
        ["demo", "--max", "3"],
        ["info", "--js"],
        ["info", "--num-blocks", "3"],
        ["bench", "engine", "--rep", "3"],
        ["notebooks", "sync", "--fold", "x"],
        ["train", "--model", "moe", "--corpus", "x", "--out", "y", "--step", "2"],
    ],
    ids=" ".join,
)
def test_no_option_is_abbreviated_or_ignored(capsys, words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert f"tinymoe {words[0]}: error: unrecognized arguments: --" in said
    assert "goes behind --" not in said


def test_a_text_that_looks_like_an_option(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["generate", "-5+3="])
    assert ended.value.code == 2
    assert "goes behind --, as in: tinymoe generate -- -5+3=" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["generate", "a", "--n", "2", "b"])
    assert "arguments: b; all texts stand side by side, with no option between" in capsys.readouterr().err
    assert main(["generate", *DRAFT, "--max-tokens", "1", "--", "-5+3="]) == 0
    assert capsys.readouterr().out.startswith("-5+3=")


@pytest.mark.parametrize("command", ["generate", "chat", "info", "demo"])
@pytest.mark.parametrize("device", ["mps", "meta", "gpu", "cuda:x"])
def test_devices(capsys, command, device):
    with pytest.raises(SystemExit) as ended:
        main([command, "--device", device])
    assert ended.value.code == 2
    assert f"auto, cpu, cuda or cuda:N is wanted, got '{device}'" in capsys.readouterr().err


def test_folders_that_hold_no_model(capsys, tmp_path):
    def refused(*words):
        assert main([*words, "--model", str(tmp_path)]) == 1
        return one_line(capsys.readouterr().err)

    assert "has no config.json" in refused("info")
    assert "has no config.json" in refused("generate", "hi")
    for text, why in (
        ("{", "cannot be read as JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "model_type"),
    ):
        (tmp_path / "config.json").write_text(text)
        assert why in refused("info")


@pytest.mark.parametrize("action", ["train", "tokenizer"])
def test_training_without_texts(capsys, tmp_path, action):
    model = "moe" if action == "train" else "tokenizer"
    words = ["--corpus", str(tmp_path / "none"), "--out", str(tmp_path / "out"), "--steps", "2"]
    assert main(["train", "--model", model, *words]) == 1
    assert "english.train.txt.xz not found; --corpus must hold" in one_line(capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_a_broken_text_for_training(capsys, tmp_path):
    for domain in ("english", "german", "python", "verse"):
        for split in ("train", "valid"):
            (tmp_path / f"{domain}.{split}.txt.xz").write_bytes(b"no xz")
    words = ["--corpus", str(tmp_path), "--out", str(tmp_path / "out"), "--steps", "2", "--workers", "1"]
    assert main(["train", "--model", "moe", *words]) == 1
    assert "cannot be read as xz-compressed UTF-8 text" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "not enough memory: ask for less"),
        (MemoryError("3 TiB"), r"not enough memory (3 TiB): ask for less"),
        (RuntimeError("no such device\nat c10::line 7"), "no such device\n"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left"),
        (ValueError("one\n  two"), "one two\n"),
    ],
)
def test_every_error_is_one_line(capsys, monkeypatch, error, said):
    def run(arguments):
        raise error

    monkeypatch.setattr("tinymoe.commands.info.run", run)
    assert main(["info"]) == 1
    assert one_line(capsys.readouterr().err).startswith(f"tinymoe info: {said}")


def test_too_large_a_cache(capsys):
    assert main(["generate", "hi", "--model", "quintet-draft", "--num-blocks", str(10**12)]) == 1
    one_line(capsys.readouterr().err)


def test_undecodable_text(capsys, monkeypatch):
    for words in (["generate"], ["chat"]):
        for errors in ("strict", "surrogateescape"):  # the latter in the POSIX locale
            piped = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8", errors=errors)
            monkeypatch.setattr(sys, "stdin", piped)
            assert main([*words, *DRAFT]) == 1
            said = capsys.readouterr()
            assert said.out == ""
            assert f"tinymoe {words[0]}: standard input is not UTF-8 text" in one_line(said.err)
    byte = "\udcff"  # as Python shows an argument that cannot be decoded
    for words in (["generate", byte], ["generate", "hi", "--stop", byte], ["chat", "--system", byte]):
        with pytest.raises(SystemExit) as ended:
            main([*words, *DRAFT])
        assert ended.value.code == 2
        assert "not UTF-8 text: '\\udcff'" in capsys.readouterr().err


# In a process of its own


def test_a_reader_that_stops_reading():
    long = ["generate", "hi", "--model", "quintet-draft", "--max-tokens", "300", "--ignore-eos"]
    for words in (long, ["generate", "--help"]):
        with subprocess.Popen(
            [sys.executable, "-m", "tinymoe", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        ) as process:
            assert process.stdout
            assert process.stderr
            if "--help" not in words:
                assert process.stdout.read(2) == b"hi"
            process.stdout.close()
            assert process.stderr.read() == b""
            # argparse itself overlooks that nobody reads, if Python does not buffer.
            assert process.wait(120) in ((141,) if words is long else (0, 141))


def test_help_needs_no_package_of_an_extra():
    gone = "sys.modules.update(dict.fromkeys(['transformers', 'nbformat', 'nbclient', 'ipywidgets', 'anywidget']))"
    each = f"""{gone}
from tinymoe.__main__ import main
for command in {list(COMMANDS)}:
    try:
        main([command, '--help'])
    except SystemExit as ended:
        print(f'status {{ended.code}}')
sys.exit()"""
    status, out, err = shell(before=each)
    assert (status, err) == (0, "")
    helps = " ".join(out.split()).split(" status 0")
    assert len(helps) == len(COMMANDS) + 1
    for (command, (_, about)), text in zip(COMMANDS.items(), helps):
        assert text.strip().startswith(f"usage: tinymoe {command} ")
        assert about in text
    status, out, err = shell("notebooks", "sync", before=gone)
    assert (status, out) == (1, "")
    wanted = "install it in tinymoe's folder with pip install -e '.[lab]'"
    assert err == f"tinymoe notebooks: needs the package 'nbformat': {wanted}\n"
    status, out, err = shell("bench", "engine", before=gone)
    assert (status, out) == (1, "")
    assert (
        "needs the package 'transformers': install it in tinymoe's folder with pip install -e '.[test]'"
        in err
    )
