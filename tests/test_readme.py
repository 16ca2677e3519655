"""The README says nothing that is not so: its commands exist, its core loop and its tree are the real ones, links resolve."""

import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
import textwrap
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
SHELLS = {"", "bash", "sh", "shell", "console"}
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.M | re.S)
readme = pytest.mark.skipif(not README.exists(), reason="README.md is not written yet")


def blocks(text: str, languages: set[str]) -> list[str]:
    return [body for language, body in FENCE.findall(text) if language in languages]


def commands(text: str) -> list[list[str]]:
    """Every make, tinymoe and python -m tinymoe command of the code blocks and of `code` in the text, as words."""
    shell = [block.replace("\\\n", " ") for block in blocks(text, SHELLS) if block not in trees(text)]
    lines = [line for block in shell for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    found = []
    for line in lines:
        lexer = shlex.shlex(re.sub(r"^\s*\$ ", "", line), posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # an apostrophe in prose
            continue
        for operator, group in groupby(words, lambda w: set(w) <= set("|&;")):
            if not operator and (command := ours(list(group))):
                found.append(command)
    return found


def ours(words: list[str]) -> list[str] | None:
    """A command of ours as [make | tinymoe | module, arguments...]; None for any other program."""
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    name = words[0].rpartition("/bin/")[2] if words else ""
    if name in ("make", "tinymoe"):
        return [name, *words[1:]]
    if re.fullmatch(r"python3?", name) and words[1:2] == ["-m"] and words[2].split(".")[0] == "tinymoe":
        return words[2:]
    return None


@cache
def help_of(*words: str) -> str:
    """What `tinymoe WORDS --help` prints; raises LookupError if it does not know the words."""
    run = subprocess.run(
        [sys.executable, "-m", "tinymoe", *words, "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    if run.returncode:
        raise LookupError(f"tinymoe {' '.join(words)} --help: {run.stderr.strip()[-300:]}")
    return run.stdout


def choices(help_text: str) -> set[str]:
    """The sub-commands that argparse lists, as {a,b,c} or a line each."""
    listed = {name for group in re.findall(r"\{([\w,-]+)\}", help_text) for name in group.split(",")}
    return listed | set(re.findall(r"^    (\w[\w-]*)(?:\s|$)", help_text, re.M))


def fault(words: list[str]) -> str | None:
    """What is wrong with one command, or None."""
    program, rest = words[0], words[1:]
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
        missing = [
            w for w in rest if re.fullmatch(r"[\w-]+", w) and w not in targets and not w.startswith("-")
        ]
        return f"the Makefile has no target {missing}" if missing else None
    if program != "tinymoe":
        return None if importlib.util.find_spec(program) else f"no module {program}"
    path: list[str] = []
    for word in rest:
        if word.startswith("-") or word not in choices(help_of(*path)):
            break
        path.append(word)
    if rest and not path and not rest[0].startswith("-"):
        return f"no command {rest[0]!r}; there are {sorted(choices(help_of()))}"
    known = help_of(*path)
    unknown = [w.split("=")[0] for w in rest if w.startswith("--") and w.split("=")[0] not in known]
    return f"tinymoe {' '.join(path)} has no option {unknown}" if unknown else None


def tree_paths(block: str) -> list[str]:
    """The paths that a printed tree names: depth by indentation, one name a line, a remark after it."""
    paths, stack = [], []
    for line in block.splitlines():
        match = re.match(r"^([\s│├└─|`+-]*)([\w./-]+)", line)
        if not match or match[2].strip(".") == "":
            continue
        column = len(match[1])
        stack = [(c, n) for c, n in stack if c < column] + [(column, match[2].rstrip("/"))]
        paths.append("/".join(name for _, name in stack))
    return paths


def trees(text: str) -> list[str]:
    """Code blocks that print a tree: most of their lines begin with a path."""
    named = re.compile(r"^[\s│├└─|`+-]*[\w.-]+(/|\.\w+|/[\w./-]+)(\s|$)")
    found = []
    for block in blocks(text, {"", "text"}):
        lines = [line for line in block.splitlines() if line.strip()]
        if len(lines) >= 3 and 2 * sum(bool(named.match(line)) for line in lines) > len(lines):
            found.append(block)
    return found


def broken_links(text: str, folder: Path) -> list[str]:
    """Links within the repository that lead nowhere: no such file, or no such heading in it."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = folder / (name or "README.md")
        if name and not path.exists():
            found.append(f"{target}: no such file")
        elif (
            anchor and path.suffix == ".md" and anchor not in anchors(text if not name else path.read_text())
        ):
            found.append(f"{target}: no such heading")
    return found


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w -]", "", h.strip().lower()).replace(" ", "-") for h in headings}


@readme
def test_every_command_exists():
    found = commands(README.read_text())
    assert {w[1] for w in found if w[0] == "make" and len(w) > 1} >= {"demo", "test", "lab", "book"}
    faults = {" ".join(words): why for words in found if (why := fault(words))}
    assert not faults


@readme
def test_the_printed_core_loop_is_the_real_one():
    spec = importlib.util.find_spec("tinymoe.engine.engine")
    if spec is None:
        pytest.skip("tinymoe.engine.engine is not written yet")
    step = textwrap.dedent(
        inspect.getsource(importlib.import_module("tinymoe.engine.engine").Engine.step)
    ).strip()
    printed = [b.strip() for b in blocks(README.read_text(), {"python"}) if "def step(self" in b]
    assert printed == [step]


@readme
def test_the_printed_tree_exists():
    printed = trees(README.read_text())
    assert printed, "README.md prints no tree of the repository"
    missing = [path for block in printed for path in tree_paths(block) if not (ROOT / path).exists()]
    assert not missing


@readme
def test_what_a_command_needs_is_said_before_it_is_shown():
    text = README.read_text()
    shown = min(match.start() for match in re.finditer(r"^tinymoe |`tinymoe \w|^from tinymoe", text, re.M))
    assert 0 < text.find("source .venv/bin/activate") < shown
    assert 0 < text.find('pip install -e ".[test]"') < text.find("`tinymoe bench ")


@readme
def test_links_resolve():
    assert broken_links(README.read_text(), ROOT) == []


# ------------------------------------------------------------------------------------------ the checks can fail

SAMPLE = """
Run `make demo`, see [it](book/index.md), [below](#how-it-works), [nowhere](missing.md) or [here](#nothing).

```bash
$ git clone X && cd tinymoe
make test JOBS=4
tinymoe generate "one | two" --max-tokens 8   # a remark
.venv/bin/python -m tinymoe bench engine
python -m tinymoe.core.trace
```

## How it works?

```text
tinymoe/          the engine
  core/           contracts
    trace.py      events
nowhere/
```
```
book/
├── index.md      start
└── _static/
    └── book.css
```
"""


def test_commands_are_read_from_blocks_and_text():
    assert commands(SAMPLE) == [
        ["make", "test", "JOBS=4"],
        ["tinymoe", "generate", "one | two", "--max-tokens", "8"],
        ["tinymoe", "bench", "engine"],
        ["tinymoe.core.trace"],
        ["make", "demo"],
    ]


def test_unknown_targets_and_modules_are_found():
    assert fault(["make", "test", "JOBS=4"]) is None
    assert "no target ['tset']" in str(fault(["make", "tset"]))
    assert fault(["tinymoe.core.trace"]) is None
    assert fault(["tinymoe.core.nothing"]) == "no module tinymoe.core.nothing"


def test_unknown_commands_and_options_are_found(monkeypatch):
    known = {
        (): "usage: tinymoe {bench,info}",
        ("bench",): "usage: {engine}",
        ("bench", "engine"): "--requests N",
    }
    monkeypatch.setitem(globals(), "help_of", lambda *words: known[words])
    assert fault(["tinymoe", "bench", "engine", "--requests=8"]) is None
    assert fault(["tinymoe", "serve"]) == "no command 'serve'; there are ['bench', 'info']"
    assert fault(["tinymoe", "bench", "engine", "--seed"]) == "tinymoe bench engine has no option ['--seed']"


def test_trees_and_links_are_read():
    assert [tree_paths(block) for block in trees(SAMPLE)] == [
        ["tinymoe", "tinymoe/core", "tinymoe/core/trace.py", "nowhere"],
        ["book", "book/index.md", "book/_static", "book/_static/book.css"],
    ]
    assert broken_links(SAMPLE, ROOT) == ["missing.md: no such file", "#nothing: no such heading"]
