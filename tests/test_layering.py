"""The layering of the house, read from the syntax tree: who may import whom, and what a room may hold.

`faults(root)` returns one line a fault. It is run on the real tree, and on small broken trees that it must refuse.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {
    "kernels": 0, "core": 1, "zoo": 1, "ops": 2, "cache": 2, "experts": 3, "model": 4, "engine": 5, "llm": 6, "text": 6,
    "lab": 7, "train": 7, "serve": 7, "bench": 8, "commands": 8, "__main__": 9,
}  # fmt: skip
TORCHLESS = ("core", "cache.blocks", "cache.prefix", "engine.scheduler")
MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter"}
MUTATORS = {
    "append",
    "add",
    "update",
    "pop",
    "popitem",
    "setdefault",
    "clear",
    "extend",
    "insert",
    "remove",
    "discard",
}
MAX_LINES, MAX_ROOMS, MAX_NAMES = 300, 8, 8


def rooms(root: Path) -> dict[str, Path]:
    """Dotted name below tinymoe ("" is the package itself) -> file. The kernels are read in their own folder."""
    files = {p: p.relative_to(root / "tinymoe") for p in (root / "tinymoe").rglob("*.py")}
    files = {p: r for p, r in files.items() if r.parts[0] != "kernels"}
    files |= {p: Path("kernels") / p.name for p in (root / "kernels").glob("*.py")}
    return {
        ".".join(r.with_suffix("").parts).removesuffix("__init__").rstrip("."): p for p, r in files.items()
    }


def imports(name: str, path: Path, tree: ast.AST, names: set[str]) -> Iterator[tuple[str, int]]:
    """(what is imported, line): "tinymoe" + "." + a room for our own, the dotted name for others."""
    package = f"tinymoe.{name}".rstrip(".").split(".")[: None if path.stem == "__init__" else -1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *(node.module or "").split(".")]).rstrip(".")
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                deeper = whole.removeprefix("tinymoe.") in names or whole in (
                    "torch.distributed",
                    "tinymoe.kernels",
                )
                yield (whole if deeper else base), node.lineno
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed", node.lineno


def wing(name: str) -> str:
    return name.split(".")[0]


def below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def reach(start: str, graph: dict[str, set[str]]) -> set[str]:
    """Every room that `start` stands on, itself included."""
    seen, todo = set(), [start]
    while todo:
        if (name := todo.pop()) not in seen:
            seen.add(name)
            todo.extend(graph.get(name, ()))
    return seen


def faults(root: Path) -> list[str]:
    found: list[str] = []
    files = rooms(root)
    trees = {name: ast.parse(path.read_text()) for name, path in files.items()}
    edges = {name: list(imports(name, files[name], trees[name], set(files))) for name in files}
    graph = {
        n: {i.removeprefix("tinymoe.") for i, _ in e if below(i, "tinymoe") and i != "tinymoe"}
        for n, e in edges.items()
    }
    for name, path in files.items():
        at = path.relative_to(root)
        found += [f"{at}:{line}: {why}" for i, line in edges[name] if (why := import_fault(name, i, graph))]
        found += [f"{at}:{line}: {why}" for line, why in code_faults(name, trees[name])]
        if path.stem == "utils":
            found.append(f"{at}: name it after its one concept, not utils")
        if (lines := path.read_text().count("\n")) > MAX_LINES and wing(name) != "kernels":
            found.append(f"{at}: {lines} lines, at most {MAX_LINES}: it probably holds two concepts")
    for name in files:
        if below_circle := [other for other in graph[name] if other != name and name in reach(other, graph)]:
            found.append(f"{files[name].relative_to(root)}: circle through {', '.join(sorted(below_circle))}")
        if any(below(name, t) for t in TORCHLESS):
            for room in sorted(reach(name, graph)):
                if any(below(i, "torch") for i, _ in edges.get(room, ())):
                    found.append(f"{files[name].relative_to(root)}: stands on torch, through {room}")
    for folder in {n.rpartition(".")[0] for n in files if "." in n} - {"kernels"}:
        held = sorted(
            {n.removeprefix(f"{folder}.").split(".")[0] for n in files if n.startswith(f"{folder}.")}
        )
        if len(held) > MAX_ROOMS:
            found.append(
                f"tinymoe/{folder.replace('.', '/')}: {len(held)} rooms, at most {MAX_ROOMS}: {', '.join(held)}"
            )
    public = [
        n
        for n in ast.walk(trees.get("", ast.Module([], [])))
        if isinstance(n, ast.Assign) and "__all__" in ast.unparse(n)
    ]
    if public and len(ast.literal_eval(public[0].value)) > MAX_NAMES:
        found.append(f"tinymoe/__init__.py: more than {MAX_NAMES} public names")
    return found


def import_fault(name: str, imported: str, graph: dict[str, set[str]]) -> str | None:
    """Why the room `name` may not import `imported`, or None."""
    mine, floor = wing(name), FLOORS.get(wing(name), 6)
    if mine and mine not in FLOORS:
        return f"the wing {mine} has no floor: add it to FLOORS"
    if below(imported, "triton") and mine != "kernels":
        return "only kernels/ imports triton"
    if below(imported, "torch.distributed") and name not in reach("experts.dispatch", graph):
        return "only experts.dispatch and what it stands on imports torch.distributed"
    if not below(imported, "tinymoe"):
        return None
    theirs = wing(imported.removeprefix("tinymoe").lstrip("."))
    if mine == "kernels":
        return (
            None
            if theirs == "kernels" and imported != "tinymoe"
            else "kernels import torch, triton and each other only"
        )
    if theirs == "kernels":
        return None if mine == "ops" else "only ops imports tinymoe.kernels"
    upper = FLOORS.get(theirs, 6)
    if mine == theirs or upper < floor or (upper == floor == 6 and theirs):
        return None
    return f"{mine or 'tinymoe'} (floor {floor}) may not import {imported} (floor {upper})"


def code_faults(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Imports in functions, environment variables below __main__, mutable state of the module."""
    shared = set()
    for node in ast.walk(
        ast.Module([s for s in tree.body if not isinstance(s, ast.ClassDef | ast.FunctionDef)], [])
    ):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = node.value
            mutable = isinstance(
                value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
            ) or (isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in MUTABLE_CALLS)
            for target in (t.id for t in targets if mutable and isinstance(t, ast.Name)):
                shared.add(target)
                if not target.isupper() and target != "__all__":
                    yield (
                        node.lineno,
                        f"mutable state of the module: {target} (a constant is UPPER_CASE and never changed)",
                    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"mutable state of the module: global {', '.join(node.names)}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Import | ast.ImportFrom):
                    yield inner.lineno, "import inside a function"
                if changed(inner) & shared:
                    yield inner.lineno, f"changes the module's {', '.join(changed(inner) & shared)}"
        if name != "__main__":
            text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.ImportFrom) and node.module == "os"
                else []
            )
            if text in ("os.environ", "os.getenv") or {"environ", "getenv"} & set(names):
                yield node.lineno, "reads the environment: only __main__ may, and passes it on"


def changed(node: ast.AST) -> set[str]:
    """Names of collections that this one node changes in place."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return {ast.unparse(node.value)}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return {ast.unparse(node.func.value)}
    return set()


def test_the_house_stands():
    found = faults(ROOT)
    assert not found, "\n".join(found)


def test_every_wing_was_seen():
    """A checker that finds no files would pass anything."""
    assert {"core", "ops", "cache", "experts", "model", "engine"} <= {wing(n) for n in rooms(ROOT)}


LONG = "x = 1\n" * 301
BROKEN = [
    ("core/a.py", "import tinymoe.engine.b", "core (floor 1) may not import tinymoe.engine.b (floor 5)"),
    ("ops/a.py", "from tinymoe.cache import b", "ops (floor 2) may not import tinymoe.cache"),
    ("engine/a.py", "from ..lab import b", "engine (floor 5) may not import tinymoe.lab"),
    ("model/a.py", "from tinymoe import LLM", "model (floor 4) may not import tinymoe (floor 6)"),
    ("train/a.py", "from tinymoe.lab.w import x", "train (floor 7) may not import tinymoe.lab.w"),
    ("attic/a.py", "import math", "the wing attic has no floor"),
    ("model/a.py", "from tinymoe.kernels import fused", "only ops imports tinymoe.kernels"),
    ("model/a.py", "from tinymoe import kernels", "only ops imports tinymoe.kernels"),
    ("ops/a.py", "import triton.language as tl", "only kernels/ imports triton"),
    ("../kernels/a.py", "from tinymoe.core import trace", "kernels import torch, triton and each other only"),
    ("engine/a.py", "import torch.distributed as dist", "only experts.dispatch"),
    ("engine/a.py", "from torch import distributed", "only experts.dispatch"),
    ("engine/a.py", "import torch\ntorch.distributed.barrier()", "only experts.dispatch"),
    ("core/a.py", "import torch", "stands on torch, through core.a"),
    ("engine/scheduler.py", "from tinymoe.cache import storage", "stands on torch, through cache.storage"),
    ("core/a.py", "def f():\n    import json", "import inside a function"),
    ("core/a.py", "import os\nX = os.environ['HOME']", "reads the environment"),
    ("core/a.py", "from os import getenv", "reads the environment"),
    ("core/a.py", "cache = {}", "mutable state of the module: cache"),
    ("core/a.py", "from collections import deque\nqueue = deque()", "mutable state of the module: queue"),
    ("core/a.py", "SEEN = {}\ndef f(k):\n    SEEN[k] = 1", "changes the module's SEEN"),
    ("core/a.py", "SEEN = []\ndef f(k):\n    SEEN.append(k)", "changes the module's SEEN"),
    ("core/a.py", "n = 0\ndef f():\n    global n\n    n += 1", "mutable state of the module: global n"),
    ("core/utils.py", "x = 1", "not utils"),
    ("core/a.py", LONG, "301 lines, at most 300"),
    ("core/a.py", "from tinymoe.core import b", "circle through core.b"),
    ("__init__.py", f"__all__ = {list('abcdefghi')}", "more than 8 public names"),
]


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "tinymoe" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


SOUND = {
    "__init__.py": "from tinymoe.llm import LLM\n__all__ = ['LLM']",
    "__main__.py": "import os\nimport tinymoe\nfrom tinymoe.bench import b\nprint(os.environ)",
    "llm.py": "from tinymoe.text import t\nfrom tinymoe.engine import b",
    "text.py": "LIMITS = {'a': 1}\ndef f():\n    local = []\n    local.append(LIMITS['a'])",
    "core/b.py": "from tinymoe.core import c",
    "core/c.py": "import math",
    "cache/storage.py": "import torch",
    "ops/b.py": "from tinymoe.kernels import fused",
    "../kernels/fused.py": "import triton\nfrom . import sort",
    "../kernels/sort.py": "import triton",
    "experts/dispatch.py": "import torch.distributed as dist",
    "engine/b.py": "from .c import x\nfrom tinymoe.experts import dispatch",
    "engine/c.py": "from tinymoe.core.b import x",
    "bench/b.py": "from tinymoe import LLM",
}


def test_a_sound_house_passes(tmp_path):
    assert faults(tree(tmp_path, SOUND)) == []


@pytest.mark.parametrize(("name", "text", "expected"), BROKEN, ids=[e for _, _, e in BROKEN])
def test_each_fault_is_found(tmp_path, name, text, expected):
    circle = {"core/b.py": "from tinymoe.core import a"} if expected.startswith("circle") else {}
    found = faults(tree(tmp_path, SOUND | circle | {name: text}))
    assert any(expected in line for line in found), found


def test_a_ninth_room_is_found(tmp_path):
    found = faults(tree(tmp_path, SOUND | {f"model/r{i}.py": "" for i in range(9)}))
    assert [line for line in found if line.startswith("tinymoe/model: 9 rooms")]
    found = faults(tree(tmp_path, {f"lab/frames/r{i}.py": "" for i in range(9)}))
    assert [line for line in found if line.startswith("tinymoe/lab/frames: 9 rooms")]
    assert not [line for line in found if line.startswith("tinymoe/lab:")]
