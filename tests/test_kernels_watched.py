"""The exercises whose answers are kernels, judged while Triton's interpreter runs them (TRITON_INTERPRET=1, make kernels).

tests/test_exercises.py puts the same answers into the stored notebook; here the messages are read, too.
"""

import os
import re
import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 (make kernels)", allow_module_level=True)

from triton.runtime.interpreter import interpreter_builder as builder

from tinymoe.kernels import rms_norm
from tinymoe.lab.exercises.catalogue import JUDGES
from tinymoe.lab.exercises.judge import decide
from tinymoe.lab.widgets.lessons.watch import watched

ROOT = Path(__file__).resolve().parent.parent
SOLVED = runpy.run_path(str(ROOT / "notebooks/solutions/06.py"))
NAMES = {"06.1": "silu_and_mul", "06.2": "row_mean", "06.3": "add_up"}


@pytest.fixture
def judged(tmp_path):
    """judged(exercise, code): the verdict; Triton wants kernels to come from a file."""

    def judge(exercise, code):
        path = tmp_path / "answer.py"
        path.write_text("import triton\nimport triton.language as tl\n\n\n" + code)
        return decide(JUDGES[exercise], runpy.run_path(str(path))[NAMES[exercise]], builder)

    return judge


@pytest.mark.parametrize("exercise", NAMES)
def test_solutions_are_accepted(judged, exercise):
    assert judged(exercise, SOLVED["SOLUTIONS"][exercise]) == (
        True, f"{8 if exercise == '06.2' else 6} shapes agree, and every element is stored by one program",
    )  # fmt: skip


def test_a_tile_of_all_rows_is_accepted_too(judged):
    assert judged("06.3", SOLVED["TILE"]).ok


def test_so_are_two_launches(judged):
    """Zeroed by one program and filled by others: that is no race, the launches follow each other."""
    zero = """
@triton.jit
def zero_kernel(out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, 0.0, mask=i < n)


"""
    start = "    T, K, H = y.shape\n"
    both = (
        SOLVED["SUM"]
        .replace("def add_up", zero.strip() + "\n\n\ndef add_up")
        .replace(start, start + "    zero_kernel[(1,)](out, T * H, BLOCK=triton.next_power_of_2(T * H))\n")
    )
    assert judged("06.3", both).ok


SAID = {
    "06.1": [
        "program 2 loads gate + 20, outside gate",
        "program 2 stores to out + 20, outside out",
        "out[0] is stored by programs 0 and 1",
        "out[1] is stored by programs 0 and 1",
        "out[15] is stored by no program",
        "program 2 loads gate + 20, outside gate",
        "out[0] should be",
        "out[0] should be",
    ],
    "06.2": [
        "program 1 loads x + 10, between two rows of x",
        "out[0] should be 3000.000, got inf",
        "x [1, 320], all 3000, stride 320, BLOCK = 8: out[0] should be 3000.000, got inf",
        "x [2, 64], all 3000, stride 64, BLOCK = 32: out[0] should be 3000.000, got inf",
        "out[0] should be 1.036377, got 1.036133",
        "x [3, 10], stride 10, BLOCK = 8: out[0] should be 1.069, got nan",
        "program 0 loads 1024 at once, it should load BLOCK = 32",
        "program 2 loads x + 30, outside x",
        "out[0] should be",
        "out[0] should be",
        "out[0] should be",
        "out[0] should be",
        "program 0 loads x + ",
        "out[0] is stored by programs 0 and 1",
    ],
    "06.3": [
        "out[0, 0] is stored by programs 0 and 1; on a GPU they run at the same time",
        "program 0 uses an atomic operation",
        "out[0, 0] is stored by programs (0, 0) and (0, 1)",
        "out[0, 16] is stored by no program",
        "out[0, 0] should be",
        "out[0, 0] should be",
        "program 3 loads y + 396, outside y",
        "out[0, 0] is stored by no program",
    ],
}


@pytest.mark.parametrize(("exercise", "n"), [(e, n) for e, said in SAID.items() for n in range(len(said))])
def test_each_mistake_is_named(judged, exercise, n):
    assert len(SAID[exercise]) == len(SOLVED["WRONG"][exercise])
    verdict = judged(exercise, SOLVED["WRONG"][exercise][n])
    assert not verdict.ok
    assert SAID[exercise][n] in verdict.message


def test_an_address_in_a_tensor_of_ones_own_is_told(judged):
    """A kernel may touch what it was given; the judge cannot see into other tensors."""
    start = "    T, K, H = y.shape\n"
    mine = SOLVED["SUM"].replace(start, start + "    mine, out = out, y.new_zeros(10_000_000)\n")
    assert "stores to an address in no tensor that you were given" in judged("06.3", mine).message


def test_the_race_has_the_right_numbers(judged, tmp_path):
    """So it is found by who touched what, and by nothing else."""
    path = tmp_path / "race.py"
    path.write_text("import triton\nimport triton.language as tl\n\n\n" + SOLVED["WRONG"]["06.3"][0])
    y, out = torch.randn(3, 2, 20, generator=torch.Generator().manual_seed(0)), torch.full((3, 20), torch.nan)
    runpy.run_path(str(path))["add_up"](y, out)
    assert torch.allclose(out, y.sum(1), atol=1e-6)


def test_stubs_and_strange_answers(judged):
    stub = "@triton.jit\ndef silu_and_mul(gate, up, out, n, BLOCK: tl.constexpr):\n    ...\n"
    assert judged("06.1", stub) is None
    assert judged("06.3", "def add_up(y, out):\n    ...\n") is None
    assert decide(JUDGES["06.3"], ..., builder) is None
    for exercise in NAMES:
        assert re.match(r"write a (kernel|function) \w+", decide(JUDGES[exercise], 7, builder).message)
    loader = SOLVED["SILU"].replace("tl.store(out + i, ", "tl.store(gate + i, ")
    assert "out[0] is stored by no program" in judged("06.1", loader).message
    twice = SOLVED["SILU"] + "    tl.store(up + i, u + 1, mask=inside)\n"
    assert "up was changed; it is an input" in judged("06.1", twice).message
    assert "raised NameError" in judged("06.1", SOLVED["SILU"].replace("inside = ", "outside = ")).message


def test_a_kernel_of_the_engine_under_watch():
    x, weight = torch.randn(3, 40)[:, :20], torch.ones(20)
    out = torch.full((3, 20), torch.nan)
    with watched(builder, x=x, weight=weight, out=out) as seen:
        rms_norm.rms_norm_kernel[(3,)](
            x, x, weight, out, out, 1e-6, X_STRIDE=40, RESIDUAL_STRIDE=40, D=20, DP=32, ADD=False
        )
    assert [(t.program, t.kind, t.name, len(t.off)) for t in seen[:3]] == [
        ((0,), "load", "x", 12), ((0,), "load", "weight", 12), ((0,), "store", "out", 12),
    ]  # fmt: skip
    assert [t.elements for t in seen if t.name == "out"] == [
        tuple(range(20 * n, 20 * n + 20)) for n in range(3)
    ]
