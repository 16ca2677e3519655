"""Exercises: every reference solution is accepted, every listed wrong answer refused, and a stub is neutral.

In each stored notebook that has solutions, one kernel runs the cells in order; at an exercise cell it runs the stub, the
wrong answers, and at last the solution, each followed by the cell that checks it.
"""

import json
import os
import random
import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
from lab_simulator import record
from nbclient import NotebookClient

from tinymoe.lab.exercises import judge, speculating
from tinymoe.lab.exercises.catalogue import JUDGES
from tinymoe.lab.exercises.judge import Verdict, agree, decide, same, shown
from tinymoe.lab.frames import pages
from tinymoe.lab.lesson import Lesson
from tinymoe.lab.sync import build

ROOT = Path(__file__).resolve().parent.parent
SOLVED = {
    p.stem: runpy.run_path(str(p)) for p in sorted((ROOT / "notebooks/solutions").glob("[0-9][0-9].py"))
}
STORED = {p.stem[:2]: p for p in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))}
CASES = [(number, exercise) for number, found in SOLVED.items() for exercise in found["SOLUTIONS"]]


def name_of(code, exercise):
    """The variable an answer defines: the last name bound at the top of the cell."""
    scope = dict(CONTEXT)
    try:
        exec(code, scope)
    except NameError as error:
        if not STORED.get(exercise[:2]):
            raise
        pytest.skip(f"{error}: checked inside its notebook only")
    return scope, [k for k in scope if k not in CONTEXT and k not in ("__builtins__", "math")][-1]


def recording():
    events, _ = record(seed=8, num_blocks=30, requests=8, seats=5)
    at = next(i for i in pages.moments(events) if events[i].step == 3)
    return events, at


EVENTS, AT = recording()
CONTEXT = {"events": EVENTS, "at": AT}
COSTS = json.loads((ROOT / "book/results/selection_h200.json").read_text())["controls"]
GIVEN = {
    "07.2": (COSTS,),
    "09.2": (EVENTS, AT),
    "12.1": (EVENTS,),
}  # a check of these takes the notebook's recording


@pytest.mark.parametrize(("number", "exercise"), CASES)
def test_solutions_are_accepted_and_wrong_answers_refused(number, exercise):
    if exercise not in JUDGES:
        pytest.fail(f"{exercise} has a solution but no judge in tinymoe/lab/exercises/catalogue.py")
    given = GIVEN.get(exercise, ())
    scope, name = name_of(SOLVED[number]["SOLUTIONS"][exercise], exercise)
    verdict = decide(JUDGES[exercise], scope[name], *given)
    assert verdict is not None
    assert verdict.ok, verdict.message
    wrong = SOLVED[number]["WRONG"][exercise]
    assert wrong, "list at least one wrong answer"
    for code in wrong:
        scope, name = name_of(code, exercise)
        verdict = decide(JUDGES[exercise], scope[name], *given)
        assert verdict is not None
        assert not verdict.ok, code
        assert verdict.message


@pytest.mark.parametrize("made", [np.array, tuple, torch.tensor], ids=["numpy", "tuple", "torch"])
def test_integers_of_any_kind_make_blocks(made):
    scope = {}
    exec(SOLVED["05"]["SOLUTIONS"]["05.1"], scope)

    def answer(ids, num_experts, block_m):
        rows, experts = scope["align_block_size"](ids, num_experts, block_m)
        return tuple(None if row is None else np.int64(row) for row in rows), made(experts)

    verdict = JUDGES["05.1"](answer)
    assert verdict.ok, verdict.message
    verdict = JUDGES["05.1"](lambda *case: ([float(row or 0) for row in answer(*case)[0]], []))
    assert "which is no pair" in verdict.message


def test_every_judge_has_a_solution():
    assert {exercise for _, exercise in CASES} == set(JUDGES)


# The mechanism


def double(answer):
    return agree("double", answer, lambda n: 2 * n, [(n,) for n in range(1, 51)])


def test_lesson_prints_the_same_lines_in_every_state(capsys):
    lesson = Lesson("05", judges={"05.1": double, "05.2": double, "06.1": double})
    assert lesson.check("05.1", ...) is None
    lesson.check("05.1", lambda n: ...)
    lesson.recap()
    lesson.check("05.1", lambda n: 3 * n)
    lesson.recap()
    lesson.check("05.1", lambda n: n + n)
    lesson.check("05.2", lambda n: 1 / 0)
    lesson.check("05.2", 7)
    lesson.recap()
    assert capsys.readouterr().out.splitlines() == [
        "[05.1] not answered yet",
        "[05.1] not answered yet",
        "Lesson 05: 0 of 2 exercises solved (05.1 open, 05.2 open).",
        "[05.1] not yet: double(1) should be 2, got 3",
        "Lesson 05: 0 of 2 exercises solved (05.1 not yet, 05.2 open).",
        "[05.1] correct: 50 cases agree",
        "[05.2] not yet: double(1) raised ZeroDivisionError: division by zero; it should be 2",
        "[05.2] not yet: write a function double, got int",
        "Lesson 05: 1 of 2 exercises solved (05.1 correct, 05.2 not yet).",
    ]
    with pytest.raises(KeyError, match=r"lesson 05 has no exercise '06.1'; it has 05.1, 05.2"):
        lesson.check("06.1", ...)
    with pytest.raises(ValueError, match="a lesson has two digits"):
        Lesson("5")


def test_what_was_solved_stays_solved(capsys):
    lesson = Lesson("05", judges={"05.1": double})
    lesson.check("05.1", lambda n: ...)
    lesson.check("05.1", lambda n: 2 * n)
    for again in (lambda n: ..., lambda n: n, ...):
        lesson.check("05.1", again)
        lesson.recap()
    said = capsys.readouterr().out.splitlines()
    assert said[2::2] == [
        "[05.1] not answered yet",
        "[05.1] not yet: double(1) should be 2, got 1",
        "[05.1] not answered yet",
    ]
    assert set(said[3::2]) == {"Lesson 05: 1 of 1 exercises solved (05.1 correct)."}


@pytest.mark.parametrize(
    ("number", "exercise", "given", "message"),
    [
        ("12", "12.1", (), 'needs events, as in lesson.check("12.1", answer, events); got 0'),
        ("09", "09.2", (EVENTS,), 'needs events, at, as in lesson.check("09.2", answer, events, at); got 1'),
        ("09", "09.1", (EVENTS,), 'needs nothing, as in lesson.check("09.1", answer); got 1'),
    ],
)
def test_a_check_says_what_it_needs(number, exercise, given, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        Lesson(number).check(exercise, ..., *given)


def test_lesson_fixes_the_seeds():
    threads = torch.get_num_threads()
    try:
        draws = []
        for _ in range(2):
            Lesson("00", seed=3)
            draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
        assert draws[0] == draws[1]
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_predictions_are_scored(capsys):
    lesson = Lesson("09")
    quiz = lesson.predict(EVENTS, AT, "alloc", num_blocks=30)
    lesson.predict(EVENTS, AT, "free", num_blocks=30)
    lesson.recap()
    quiz.choice = quiz.frame["answer"]
    lesson.recap()
    out = capsys.readouterr().out
    assert "Predictions: 0 of 2 made, 0 right." in out
    assert "Predictions: 1 of 2 made, 1 right." in out


def test_answers_cannot_change_the_cases():
    def spoil(counts):
        counts.clear()
        return 0

    assert agree("f", spoil, lambda c: len(c) * 0, [([1, 2],)]).ok
    assert "should be 2, got 0" in agree("f", spoil, len, [([1, 2],)]).message


def test_comparison():
    assert same((1.0, [2]), (1, (2,)))
    assert not same(True, 1)
    assert not same(1, True)
    assert not same("1", 1)
    assert not same((1,), (1, 2))
    assert same(0.1 + 0.2, 0.3)
    assert not same(None, 0)
    assert shown((1.0, 0.33333333, [2], "x")) == "(1, 0.3333, [2], 'x')"
    assert shown((1,)) == "(1,)"


def test_stub_by_exception():
    def stub(n):
        raise NotImplementedError

    assert decide(double, stub) is None
    assert decide(lambda answer: Verdict(answer == 3, "three"), 3) == (True, "three")
    assert judge.attempt(lambda: 5) == (5, "")


def test_named_counter_examples():
    def pool_of(**methods):
        return type("Pool", (), {"__init__": lambda self, n: None, **methods})

    verdict = decide(JUDGES["09.1"], pool_of(alloc=lambda self: 5))
    assert verdict.message == "Pool(2), then alloc() should give 0, but gave 5"
    assert decide(JUDGES["09.1"], pool_of()).message == "Pool has no method alloc"
    frame = pages.frame(EVENTS, AT)
    owned = next(b for b, o in enumerate(frame["owners"]) if o)
    assert f"block {owned} is owned by" in decide(JUDGES["09.2"], owned, EVENTS, AT).message
    steps = sorted({e.step for e in EVENTS if e.kind == "chunk"})
    budget = next(e.budget for e in EVENTS if e.kind == "step")
    plan = [{e.seq: e.stop - e.start for e in EVENTS if e.kind == "chunk" and e.step == s} for s in steps[:3]]
    seq = next(iter(plan[0]))
    from_zero = [
        e._replace(step=e.step - 1) for e in EVENTS
    ]  # the engine counts from 0, the simulator from 1
    for change, message in (
        ({seq: budget + 1}, f"step 0: {budget + 1} tokens are more than the budget of {budget}"),
        ({99: 1}, "step 0: there is no sequence 99"),
        ({seq: "all"}, "step 0: A needs a number of tokens, got 'all'"),
        ({seq: 1}, "of the budget are left although somebody could use them"),
    ):
        assert message in decide(JUDGES["12.1"], [change, *plan[1:]], from_zero).message
    assert decide(JUDGES["12.1"], plan, EVENTS).ok
    for events, third in ((from_zero, 2), (EVENTS, 3)):  # as the recording counts, whatever that is
        wrong = decide(JUDGES["12.1"], [*plan[:2], {99: 1}], events).message
        assert wrong == f"step {third}: there is no sequence 99"
    with pytest.raises(ValueError, match="the recording has only 0 steps"):
        decide(JUDGES["12.1"], plan, EVENTS[:1])


@pytest.mark.parametrize("rule", speculating.RULES)
def test_runs_of_each_rule_have_its_own_distribution(rule):
    """Oracle: the joint distribution of two tokens in closed form, for the wrong rules as well."""
    rng = np.random.default_rng(1)
    (p1, q1), (p2, q2), n = rng.dirichlet([2] * 4, 2), rng.dirichlet([2] * 4, (2, 4)), 50_000
    again1, again2 = np.maximum(p1 - q1, 0), np.maximum(p2 - q2, 0)
    if rule == "redraws from p":
        again1, again2 = p1, p2
    kept1, kept2 = np.minimum(p1, q1), np.minimum(p2, q2)
    again1 = again1 / again1.sum()
    again2 = again2 / again2.sum(1, keepdims=True)
    second = kept2 + (1 - kept2.sum(1, keepdims=True)) * again2
    first = kept1 + (1 - kept1.sum()) * again1
    wanted = first[:, None] * second
    if rule == "keeps later drafts":
        wanted = kept1[:, None] * second + again1[:, None] * ((q1 - kept1) @ q2)
    a, b = speculating.two_tokens(rng, n, (p1, p2), (q1, q2), rule)
    counts = np.bincount(a * 4 + b, minlength=16).tolist()
    assert abs(speculating.surprise(counts, wanted.ravel().tolist())) < 4
    others = speculating.surprise(counts, (p1[:, None] * p2).ravel().tolist())
    assert (abs(others) < 4) == (rule == "right")


def test_speculation_is_judged_by_chi_square():
    assert speculating.chi_square([10, 20, 0], [0.5, 0.5, 0]) == (pytest.approx(10 / 3), 2)
    assert speculating.chi_square([10, 20, 1], [0.5, 0.5, 0]) == (float("inf"), 2)
    found = list(speculating.trials())
    assert [sum(t.rule == rule for t in found) for rule in speculating.RULES] == [40, 8, 9]
    assert found == list(speculating.trials())
    small = [n * w for t in found for n in [sum(t.counts)] for w in t.wanted if w]
    assert min(small) > 5
    said = decide(JUDGES["16.2"], lambda counts, wanted: False).message
    assert said.startswith(
        "run 1, 2000 pairs by the right rule: yours says that it does not fit. Over 16 cells the"
    )
    assert said.endswith("; where the probabilities are right, it is 15 on average")
    assert (
        "an impossible pair came"
        in decide(
            JUDGES["16.2"],
            lambda c, w: speculating.surprise([x for x, y in zip(c, w) if y], [y for y in w if y]) < 4,
        ).message
    )
    assert "True or False is wanted, got 0.5" in decide(JUDGES["16.2"], lambda c, w: 0.5).message
    assert (
        "raised ZeroDivisionError"
        in decide(JUDGES["16.2"], lambda c, w: bool([x / y for x, y in zip(c, w)])).message
    )

    def as_tensor(p, q):
        return torch.tensor(speculating._residual(p, q), dtype=torch.float64)

    assert decide(JUDGES["16.1"], as_tensor).ok
    assert decide(JUDGES["16.1"], lambda p, q: p).message == (
        "residual([0.5, 0.3, 0.2], [0.2, 0.5, 0.3]) should be [1, 0, 0], got [0.5, 0.3, 0.2]"
    )


# In the notebooks


def inject(notebook, folder, solutions, wrong):
    """{exercise: {"stub": text, "wrong": [texts], "solution": text}} of the checks' outputs, one kernel for all."""
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    said, tried = {}, {}
    with client.setup_kernel():

        def run(index, source=None):
            cell = notebook.cells[index]
            if source is not None:
                cell.source = source
            client.execute_cell(cell, index)
            return "".join(o.get("text", "") for o in cell.outputs)

        for index, cell in enumerate(notebook.cells):
            if cell.cell_type != "code":
                continue
            exercise = cell.metadata.get("exercise")
            if exercise:
                tried[exercise] = index
                run(index)
                continue
            checked = [e for e in tried if f'check("{e}"' in cell.source and e not in said]
            for e in checked:
                answers = {"stub": run(index), "wrong": []}
                for code in wrong[e]:
                    run(tried[e], code)
                    answers["wrong"].append(run(index))
                run(tried[e], solutions[e])
                answers["solution"] = run(index)
                said[e] = answers
            if not checked:
                run(index)
    return said


def assert_judged(said, solutions, wrong):
    assert said.keys() == solutions.keys(), "every exercise needs a cell with its id, a check and a solution"
    for exercise, answers in said.items():
        assert f"[{exercise}] not answered yet" in answers["stub"]
        assert f"[{exercise}] correct: " in answers["solution"]
        assert len(answers["wrong"]) == len(wrong[exercise]) >= 1
        assert all(f"[{exercise}] not yet: " in text for text in answers["wrong"])


def test_injection_on_a_made_notebook(tmp_path):
    """The mechanism itself, and that it notices an answer which is wrongly accepted."""
    cells = [
        ("code", f"import sys; sys.path[:0] = [{str(ROOT)!r}]"),
        ("code", 'from tinymoe.lab import Lesson\nlesson = Lesson("10")'),
        (
            "code",
            "hit_tokens = ...  # write hit_tokens(cached, salt, prompt, block_size)",
            {"exercise": "10.1"},
        ),
        ("code", 'lesson.check("10.1", hit_tokens)'),
        ("code", "lesson.recap()"),
    ]
    solutions = {"10.1": SOLVED["10"]["SOLUTIONS"]["10.1"]}
    wrong = {"10.1": SOLVED["10"]["WRONG"]["10.1"][:1]}
    notebook = build(cells, "10_prefixes")
    said = inject(notebook, tmp_path, solutions, wrong)
    assert_judged(said, solutions, wrong)
    assert "1 of 2 exercises solved (10.1 correct, 10.2 open)" in notebook.cells[-1].outputs[0].text
    accepted = {"10.1": {**said["10.1"], "wrong": [said["10.1"]["solution"]]}}
    with pytest.raises(AssertionError):
        assert_judged(accepted, solutions, wrong)


@pytest.mark.slow
@pytest.mark.parametrize("number", [n for n in STORED if n in SOLVED])
def test_injection_in_stored_notebooks(number, monkeypatch):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    solutions, wrong = SOLVED[number]["SOLUTIONS"], SOLVED[number]["WRONG"]
    if any("# needs triton" in code for code in solutions.values()) and find_spec("triton") is None:
        pytest.skip("the answers are kernels, and Triton is not installed here")
    notebook = nbformat.read(STORED[number], as_version=4)
    assert_judged(inject(notebook, STORED[number].parent, solutions, wrong), solutions, wrong)


def test_every_stored_exercise_has_a_solution():
    for number, path in STORED.items():
        cells = nbformat.read(path, as_version=4).cells
        ids = {c.metadata["exercise"] for c in cells if c.metadata.get("exercise")}
        assert ids <= SOLVED.get(number, {"SOLUTIONS": {}})["SOLUTIONS"].keys(), path.name
