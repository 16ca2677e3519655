"""Exercises on the kernels of a Mixture-of-Experts layer."""

import random
from collections.abc import Callable
from itertools import pairwise
from operator import index
from typing import Any

import numpy as np
import torch

from tinymoe.lab.exercises.judge import Unanswered, Verdict, agree, attempt, shown
from tinymoe.lab.widgets.lessons.watch import Stray, Touch, element_name, program_name, watched

BAND = 256  # bytes of nobody around each tensor, so that an address outside is known to be nearest to its own


def align_block_size(answer) -> Verdict:
    """05.1: align_block_size(ids, num_experts, block_m) -> (rows, experts): the pairs sorted by expert, each expert's filled
    up with None to whole blocks of block_m rows, and the expert of each block. The judge knows no order of the experts but
    the ascending one; all else it checks by the properties that a kernel relies on.
    """
    if not callable(answer):
        return Verdict(False, f"write a function align_block_size, got {type(answer).__name__}")
    cases = [([1, 0, 1], 2, 4), ([2, 2, 2, 0], 3, 2), ([0, 0, 0, 0], 2, 2), ([], 2, 4), ([3], 5, 2)]
    r = random.Random(5)
    while len(cases) < 60:
        experts = r.randint(1, 6)
        ids = [r.choice([r.randrange(experts), experts - 1]) for _ in range(r.randint(1, 14))]
        cases.append((ids, experts, r.choice([1, 2, 4])))
    for case in cases:
        got, failure = attempt(answer, *case)
        fault = failure or _fault_of_blocks(got, *case)
        if fault:
            return Verdict(False, f"align_block_size({', '.join(map(shown, case))}) {fault}")
    return Verdict(True, f"{len(cases)} cases: every pair once, in order, and no block with two experts")


def _plain(value: Any) -> Any:
    """An integer of any kind (numpy's, a tensor's) as an int; anything else as it is."""
    try:
        return value if isinstance(value, bool) else index(value)
    except TypeError:
        return value


def _fault_of_blocks(got: Any, ids: list[int], num_experts: int, block_m: int) -> str:
    """What is wrong with (rows, experts), or ""."""
    try:
        rows, experts = ([_plain(value) for value in part] for part in got)
    except (TypeError, ValueError):
        return f"should return two lists, got {shown(got)}"
    said = f"gave rows {shown(rows)} and experts {shown(experts)}"
    for place, pair in enumerate(rows):
        if pair is not None and (type(pair) is not int or not 0 <= pair < len(ids)):
            return f"{said}: row {place} holds {shown(pair)}, which is no pair and not None"
    for pair in range(len(ids)):
        if rows.count(pair) != 1:
            times = "no row" if pair not in rows else f"{rows.count(pair)} rows"
            return f"{said}: pair {pair} has {times}, it should have one"
    if len(rows) % block_m or len(rows) // block_m != len(experts):
        return f"{said}: {len(rows)} rows are not {len(experts)} blocks of {block_m}"
    for n, expert in enumerate(experts):
        mine = rows[n * block_m : (n + 1) * block_m]
        visits = [ids[pair] for pair in mine if pair is not None]
        if len(set(visits)) > 1:
            return f"{said}: block {n} holds pairs of experts {' and '.join(map(str, sorted(set(visits))))}"
        if not visits:
            return f"{said}: block {n} holds no pair, yet a program will read expert {shown(expert)} for it"
        if visits[0] != expert:
            return f"{said}: block {n} holds pairs of expert {visits[0]}, but experts[{n}] is {shown(expert)}"
        if mine != [p for p in mine if p is not None] + [None] * mine.count(None):
            return f"{said}: in block {n} the padding stands before a pair"
    if experts != sorted(experts):
        return f"{said}: the experts do not ascend"
    order = [pair for pair in rows if pair is not None]
    for before, after in pairwise(order):
        if ids[before] == ids[after] and before > after:
            return f"{said}: pair {before} stands before pair {after} of the same expert, so the sort is not stable"
    fewest = sum(-(-ids.count(expert) // block_m) for expert in range(num_experts))
    if len(experts) > fewest:
        return f"{said}: {len(experts)} blocks, but {fewest} are enough"
    return ""


def silu_and_mul(answer, builder) -> Verdict:
    """06.1: a kernel silu_and_mul(gate, up, out, n, BLOCK): out = gate * sigmoid(gate) * up, a block of elements a program.

    builder: triton.runtime.interpreter.interpreter_builder, through which the judge sees every access (all of 06).
    """
    r = torch.Generator().manual_seed(61)

    def play(n: int, block: int) -> tuple[str, str]:
        gate, up, out = _placed((n,), (n,), (n,))
        gate.copy_(torch.randn(n, generator=r) * 3)
        up.copy_(torch.randn(n, generator=r))
        wanted = gate.double() * gate.double().sigmoid() * up.double()
        run = lambda: answer[(-(-n // block),)](gate, up, out, n, BLOCK=block)  # noqa: E731
        return f"n = {n}, BLOCK = {block}", _fault_of_run(run, builder, out, wanted, {"gate": gate, "up": up})

    return _played(answer, "silu_and_mul", play, [(16, 8), (20, 8), (5, 8), (1, 4), (33, 16), (64, 16)])


def row_mean(answer, builder) -> Verdict:
    """06.2: a kernel row_mean(x, out, stride, C, BLOCK): out[r], float32, is the mean of the C numbers of row r of x, float16,
    whose rows begin every `stride` elements. One program a row, BLOCK columns at a time.
    """
    r = torch.Generator().manual_seed(62)

    def play(R: int, C: int, stride: int, block: int, size: float) -> tuple[str, str]:
        (x,) = _placed((R, C), dtype=torch.float16, strides=(stride, 1))
        (out,) = _placed((R,))
        x.copy_((torch.rand(R, C, generator=r) + 0.5) * size if size < 1000 else torch.full((R, C), size))
        run = lambda: answer[(R,)](x, out, stride, C, BLOCK=block)  # noqa: E731
        row = "" if size < 1000 else f" all {size:.0f},"
        said = f"x [{R}, {C}],{row} stride {stride}, BLOCK = {block}"
        return said, _fault_of_run(run, builder, out, x.double().mean(1), {"x": x}, lanes=block)

    cases = [
        (2, 64, 64, 32, 3000),  # a block's sum leaves float16
        (1, 320, 320, 8, 3000),  # a lane's sum does
        (2, 8, 8, 8, 1),
        (3, 10, 10, 8, 1),
        (3, 10, 13, 8, 1),
        (2, 5, 8, 8, 1),
        (2, 40, 40, 16, 3000),
        (1, 1, 3, 4, 1),
    ]
    return _played(answer, "row_mean", play, cases)


def add_up(answer, builder) -> Verdict:
    """06.3: add_up(y, out), which launches a kernel: out [T, H] = sum over the K rows of each token of y [T, K, H], float32.
    out holds NaN before. No element may be stored by one program and touched by another of the same launch.
    """
    r = torch.Generator().manual_seed(63)

    def play(T: int, K: int, H: int) -> tuple[str, str]:
        y, out = _placed((T, K, H), (T, H))
        y.copy_(torch.randn(T, K, H, generator=r))
        return f"y [{T}, {K}, {H}]", _fault_of_run(
            lambda: answer(y, out), builder, out, y.double().sum(1), {"y": y}
        )

    return _played(
        answer, "add_up", play, [(1, 2, 8), (2, 2, 8), (3, 2, 20), (4, 3, 33), (2, 4, 64), (3, 8, 5)]
    )


def _played(answer: Any, name: str, play: Callable, cases: list[tuple]) -> Verdict:
    if name == "add_up" and not callable(answer):
        return Verdict(False, f"write a function {name}, got {type(answer).__name__}")
    if name != "add_up" and not hasattr(answer, "__getitem__"):
        return Verdict(
            False, f"write a kernel {name}, a function under @triton.jit; got {type(answer).__name__}"
        )
    for case in cases:
        said, fault = play(*case)
        if fault:
            return Verdict(False, f"{said}: {fault}")
    return Verdict(True, f"{len(cases)} shapes agree, and every element is stored by one program")


def _placed(
    *shapes: tuple[int, ...], dtype=torch.float32, strides: tuple[int, ...] | None = None
) -> list[torch.Tensor]:
    """Tensors full of NaN, with a band of nobody before, between and after them, in one piece of memory."""
    places, at = [], BAND
    for shape in shapes:
        size = int(np.prod(shape)) if strides is None else (shape[0] - 1) * strides[0] + shape[1]
        places.append((at // dtype.itemsize, shape, size))
        at += -(-size * dtype.itemsize // BAND) * BAND + BAND
    arena = torch.full((at // dtype.itemsize,), torch.nan, dtype=dtype)
    return [
        arena[start : start + size].view(shape)
        if strides is None
        else arena.as_strided(shape, strides, start)
        for start, shape, size in places
    ]


def _fault_of_run(
    run: Callable,
    builder: Any,
    out: torch.Tensor,
    wanted: torch.Tensor,
    given: dict,
    lanes: int | None = None,
) -> str:
    """What is wrong with what a kernel touched, or with the numbers in `out`, or "". lanes: those of each of its loads."""
    before = {name: tensor.clone() for name, tensor in given.items()}
    with watched(builder, out=out, **given) as seen, np.errstate(all="ignore"):
        try:
            run()
        except NotImplementedError:
            raise Unanswered from None
        except Exception as error:
            cause = error.__cause__ or error
            hint = "; is a mask missing, or an offset wrong?" if isinstance(cause, Stray) else ""
            return f"{cause}{hint}" if hint else f"raised {type(cause).__name__}: {cause}"
    if not seen and out.isnan().all():
        raise Unanswered  # the stub's kernel, which does nothing
    if fault := _fault_of_touches(seen, out):
        return fault
    for touch in seen:
        count = len(touch.elements) + len(touch.off)
        if touch.kind == "load" and lanes not in (None, count):
            return (
                f"program {program_name(touch.program)} loads {count} at once, it should load BLOCK = {lanes}"
            )
    for name, tensor in given.items():
        if not torch.equal(tensor, before[name]):
            return f"{name} was changed; it is an input"
    for n, (got, right) in enumerate(zip(out.ravel().tolist(), wanted.ravel().tolist())):
        if not abs(got - right) <= 1e-5 * max(1.0, abs(right)):
            digits = 3 if not abs(got - right) <= 1e-3 else 6
            return f"{element_name('out', n, out.shape)} should be {right:.{digits}f}, got {got:.{digits}f}"
    return ""


def _fault_of_touches(seen: list[Touch], out: torch.Tensor) -> str:
    """An element that nobody stored, or that one program stored and another touched in the same launch."""
    owner: dict[tuple[int, int], tuple[int, ...]] = {}
    for touch in seen:
        if touch.kind == "atomic":
            return f"program {program_name(touch.program)} uses an atomic operation: the order of the sums would be chance"
        for n in touch.elements if touch.kind == "store" and touch.name == "out" else ():
            first = owner.setdefault((touch.launch, n), touch.program)
            if first != touch.program:
                two = f"{program_name(first)} and {program_name(touch.program)}"
                return f"{element_name('out', n, out.shape)} is stored by programs {two}; on a GPU they run at the same time"
    for touch in seen:
        for n in touch.elements if touch.kind == "load" and touch.name == "out" else ():
            stored = owner.get((touch.launch, n), touch.program)
            if stored != touch.program:
                two = f"program {program_name(stored)} and loaded by program {program_name(touch.program)}"
                return (
                    f"{element_name('out', n, out.shape)} is stored by {two}, and which comes first is chance"
                )
    stored = {n for _, n in owner}
    missing = next((n for n in range(out.numel()) if n not in stored), None)
    return "" if missing is None else f"{element_name('out', missing, out.shape)} is stored by no program"


def sort_pairs(answer) -> Verdict:
    """07.1: sort_pairs(ids, num_experts, block_m) -> (order, offsets, tiles), as kernels/sort_tokens.py lays them out.

    ids: the expert of each pair, -1 for a pair of nobody. order: the pairs sorted by expert, stable, without those of
    nobody. offsets: E + 1 row numbers. tiles: (expert, first row), each tile with rows of one expert, at most block_m.
    """

    def reference(ids: list[int], num_experts: int, block_m: int) -> tuple[list, list, list]:
        kept = sorted((expert, pair) for pair, expert in enumerate(ids) if expert >= 0)
        offsets = [sum(expert < e for expert, _ in kept) for e in range(num_experts + 1)]
        tiles = [
            (expert, row) for row, (expert, _) in enumerate(kept) if (row - offsets[expert]) % block_m == 0
        ]
        return [pair for _, pair in kept], offsets, tiles

    cases = [([1, 0, 1], 2, 16), ([2, 2, 2, 0], 3, 2), ([0, -1, 1], 2, 2), ([], 2, 4), ([-1, -1], 3, 4)]
    r = random.Random(7)
    while len(cases) < 60:
        experts = r.randint(1, 6)
        ids = [r.choice([r.randrange(experts), experts - 1, -1]) for _ in range(r.randint(1, 14))]
        cases.append((ids, experts, r.choice([1, 2, 4])))
    return agree("sort_pairs", answer, reference, cases)
