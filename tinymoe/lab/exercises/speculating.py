"""Exercises on speculative decoding: the residual distribution, a test that finds rules which change the distribution, and how
far ahead to guess."""

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tinymoe.lab.exercises.judge import Verdict, agree, attempt, same, shown
from tinymoe.lab.frames.view import tenths

V = 4  # tokens of the vocabulary in 16.2
PARTS = 20  # probabilities of 16.1 are multiples of 1/20, so that messages are short
RULES = {
    "right": "the right rule",
    "redraws from p": "a rule that redraws from p instead of the residual",
    "keeps later drafts": "a rule that keeps the second draft although the first was rejected",
}


def residual(answer) -> Verdict:
    """16.1: residual(p, q) -> what a rejected draft is redrawn from, a list that sums to 1; p where p and q are equal."""
    if not callable(answer):
        return Verdict(False, f"write a function residual, got {type(answer).__name__}")

    def as_list(p, q):
        found: Any = answer(p, q)
        return found.tolist() if hasattr(found, "tolist") else found

    return agree("residual", as_list, _residual, _pairs(), tolerance=1e-6)


def _residual(p: Sequence[float], q: Sequence[float]) -> list[float]:
    rest = [max(0.0, a - b) for a, b in zip(p, q)]
    return [x / sum(rest) for x in rest] if sum(rest) else list(p)


def _pairs(cases: int = 60) -> Iterator[tuple[list[float], list[float]]]:
    """p, q: easy ones first; then one of them in a corner, or both."""
    yield [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]
    yield [0.7, 0.2, 0.1], [0.4, 0.3, 0.3]
    yield [0.6, 0.4, 0.0], [0.0, 0.5, 0.5]
    yield [1.0, 0.0, 0.0], [0.25, 0.5, 0.25]
    yield [0.25, 0.5, 0.25], [0.0, 1.0, 0.0]
    yield [0.0, 1.0], [1.0, 0.0]
    yield [0.1, 0.2, 0.7], [0.1, 0.2, 0.7]
    yield [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]
    r = random.Random(16)
    for number in range(cases):
        size = r.randint(2, 6)
        p, q = _distribution(r, size), _distribution(r, size)
        yield p, p[:] if number % 10 == 9 else q


def _distribution(r: random.Random, size: int) -> list[float]:
    """Multiples of 1/PARTS that sum to 1; zeros are frequent."""
    cuts = sorted(r.randint(0, PARTS) for _ in range(size - 1))
    return [(b - a) / PARTS for a, b in zip([0, *cuts], [*cuts, PARTS])]


class Trial(NamedTuple):
    """What a run of a rule gave. counts, wanted: [V * V], how often a pair of tokens came, and its probability."""

    rule: str
    counts: list[int]
    wanted: list[float]


def fits(answer) -> Verdict:
    """16.2: fits(counts, wanted) -> True if counts may well be drawn with the probabilities `wanted`, else False."""
    if not callable(answer):
        return Verdict(False, f"write a function fits, got {type(answer).__name__}")
    seen = dict.fromkeys(RULES, 0)
    for number, (rule, counts, wanted) in enumerate(trials(), 1):
        got, failure = attempt(answer, counts, wanted)
        n, (chi, cells) = sum(counts), chi_square(counts, wanted)
        run = f"run {number}, {n} pairs by {RULES[rule]}"
        if failure:
            return Verdict(False, f"{run}: fits {failure}")
        if str(got) not in ("True", "False"):
            return Verdict(False, f"{run}: True or False is wanted, got {shown(got)[:40]}")
        if (str(got) == "True") != (rule == "right"):
            size = (
                f"the sum is {tenths(round(10 * chi), 10)}" if chi < math.inf else "an impossible pair came"
            )
            mean = f"; where the probabilities are right, it is {cells - 1} on average"
            said = "does not fit" if rule == "right" else "fits"
            return Verdict(False, f"{run}: yours says that it {said}. Over {cells} cells {size}{mean}")
        seen[rule] += 1
    right, *wrong = seen.values()
    return Verdict(True, f"{right} runs of the right rule pass, and {sum(wrong)} of two wrong rules do not")


def chi_square(counts: Sequence[int], wanted: Sequence[float]) -> tuple[float, int]:
    """Pearson's sum of (count - expected)² / expected, and over how many cells; infinite if what is impossible came."""
    n, cells = sum(counts), [(c, w) for c, w in zip(counts, wanted) if w > 0]
    if sum(c for c, _ in cells) < n:
        return math.inf, len(cells)
    return sum((c - n * w) ** 2 / (n * w) for c, w in cells), len(cells)


def surprise(counts: Sequence[int], wanted: Sequence[float]) -> float:
    """How far the sum of `chi_square` lies above its mean, in standard deviations; beyond 4 something is wrong."""
    chi, cells = chi_square(counts, wanted)
    return (chi - (cells - 1)) / math.sqrt(2 * (cells - 1))


def trials() -> Iterator[Trial]:
    """The same in every run: 40 runs of the right rule, large and small, with and without impossible tokens, and 17 of wrong ones."""
    for number in range(56):
        rng = np.random.default_rng(162_100 + number)
        rule = "right" if number % 7 < 5 else list(RULES)[number % 7 - 4]
        n = 20_000 if number % 4 == 3 or rule != "right" else 2000
        p1, q1 = _mild(rng, 1)[0], _mild(rng, 1)[0]
        p2, q2 = _mild(rng, V), _mild(rng, V)
        if number % 3 == 2:  # options such as top_k exclude tokens
            p1[rng.integers(V)] = 0
            p2[:, rng.integers(V)] = 0
            p1, p2 = p1 / p1.sum(), p2 / p2.sum(1, keepdims=True)
        yield _trial(rng, n, (p1, p2), (q1, q2), rule)
    # A bug that shows in nothing but one impossible pair.
    second = np.full((V, V), [0.37, 0.33, 0.27, 0.03])
    p = np.full(V, 1 / V), second.copy()
    p[1][0] = [0.38, 0.34, 0.28, 0]
    yield _trial(
        np.random.default_rng(V), 2000, p, (np.array([0.1, 0.3, 0.3, 0.3]), second), "keeps later drafts"
    )


def _trial(
    rng: np.random.Generator, n: int, p: Sequence[np.ndarray], q: Sequence[np.ndarray], rule: str
) -> Trial:
    first, second = two_tokens(rng, n, p, q, rule)
    counts = np.bincount(first * V + second, minlength=V * V)
    return Trial(rule, counts.tolist(), (p[0][:, None] * p[1]).ravel().tolist())


def _mild(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Distributions [rows, V] without rare tokens: a chi-square sum wants at least five expected in a cell."""
    raw = rng.random((rows, V)) ** 2 + 0.12
    return raw / raw.sum(1, keepdims=True)


def two_tokens(
    rng: np.random.Generator, n: int, p: Sequence[np.ndarray], q: Sequence[np.ndarray], rule: str
) -> tuple[np.ndarray, np.ndarray]:
    """int [n] each: the first two tokens of n sequences under a rule of RULES, two drafts in the first step.

    p, q: (of the first token [V], of the second behind each first one [V, V]).
    """
    (p1, p2), (q1, q2) = p, q
    draft1 = _draw(rng, np.broadcast_to(q1, (n, V)))
    draft2 = _draw(rng, q2[draft1])
    kept1, first = _verify(rng, np.broadcast_to(p1, (n, V)), np.broadcast_to(q1, (n, V)), draft1, rule)
    # After a rejection the next step drafts again, behind the redrawn token.
    behind = np.where(kept1, draft2, _draw(rng, q2[first]))
    _, second = _verify(rng, p2[first], q2[first], behind, rule)
    return first, np.where(kept1, second, draft2) if rule == "keeps later drafts" else second


def _verify(
    rng: np.random.Generator, p: np.ndarray, q: np.ndarray, drafts: np.ndarray, rule: str
) -> tuple[np.ndarray, np.ndarray]:
    """(which drafts stay, the tokens) for rows of p and q [n, V]."""
    at = np.arange(len(drafts))
    kept = rng.random(len(drafts)) * q[at, drafts] < p[at, drafts]
    rest = np.maximum(p - q, 0)
    rest = np.where(rest.sum(1, keepdims=True) > 0, rest, p)
    again = _draw(rng, p if rule == "redraws from p" else rest / rest.sum(1, keepdims=True))
    return kept, np.where(kept, drafts, again)


def _draw(rng: np.random.Generator, rows: np.ndarray) -> np.ndarray:
    """One token of each row [n, V], by the inverse of the running sum."""
    return (rng.random((len(rows), 1)) >= rows.cumsum(1)[:, :-1]).sum(1)


def best_depth(answer) -> Verdict:
    """17.1: best_depth(alpha, a, b, c, d, U, most) -> how many drafts, 0..most, make most expected tokens a second."""
    if not callable(answer):
        return Verdict(False, f"write a function best_depth, got {type(answer).__name__}")
    found = []
    for alpha, a, b, c, d, visits, most in _situations():
        speed = [_tokens(alpha, k) / (a + b * visits[k + 1] + c * (k + 1) + d * k) for k in range(most + 1)]
        best = max(range(most + 1), key=lambda k: (round(speed[k], 9), -k))
        case = (
            f"alpha = {shown(alpha)}, a = {a}, b = {b}, c = {c}, d = {d}, U = {shown(visits)}, most = {most}"
        )
        got, failure = attempt(answer, alpha, a, b, c, d, visits, most)
        if failure:
            return Verdict(False, f"{case}: best_depth {failure}; it should be {best}")
        if not same(got, best):
            why = f"depth {best} makes {shown(speed[best])} tokens a unit of time"
            if isinstance(got, int) and 0 <= got <= most:
                why += f", depth {got} makes {shown(speed[got])}"
            return Verdict(False, f"{case}: it should be {best}, got {shown(got)}: {why}")
        found.append((best, most))
    none, full = sum(best == 0 for best, _ in found), sum(best == most for best, most in found)
    return Verdict(
        True, f"{len(found)} situations agree: in {none} nothing is drafted, in {full} as much as may be"
    )


def _tokens(alpha: float, depth: int) -> float:
    """Expected tokens of a verification, outcome by outcome: the first `kept` drafts stay and the next one goes, or all stay."""
    lost = sum((kept + 1) * alpha**kept * (1 - alpha) for kept in range(depth))
    return lost + (depth + 1) * alpha**depth


def _situations(cases: int = 120) -> Iterator[tuple[float, int, int, int, int, list[float], int]]:
    """alpha, a, b, c, d, U, most: easy ones and corners first. U[n] belongs to n tokens; U[0] is 0. Without near ties."""
    flat, steep = [0.0, 1.0, 1.0, 1.0, 1.0], [0.0, 2.0, 4.0, 6.0, 8.0]
    yield 0.8, 10, 0, 0, 0, flat, 3  # only starting costs: draft all
    yield 0.5, 0, 1, 0, 0, steep, 3  # every token visits experts of its own: none
    yield 0.0, 10, 1, 1, 0, flat, 3
    yield 1.0, 10, 1, 1, 1, steep, 3
    yield 0.9, 1, 0, 0, 40, flat, 3  # the draft costs more than the step
    r = random.Random(17)
    while cases:
        experts, top_k = r.choice([(8, 2), (16, 2), (64, 8), (128, 8), (1, 1)])
        most = r.randint(1, 6)
        own = r.uniform(0.5, 1)  # tokens of a text visit fewer
        visits = [
            0.0,
            *(
                round(top_k + own * (experts - top_k) * (1 - (1 - top_k / experts) ** n), 1)
                for n in range(most + 1)
            ),
        ]
        alpha = round(r.choice([0.3, 0.6, 0.9]) + r.uniform(-0.1, 0.1), 2)
        case = (
            alpha,
            r.randint(0, 60),
            r.randint(1, 5),
            r.randint(0, 6),
            r.choice([0, 0, 2, 10]),
            visits,
            most,
        )
        speed = sorted(
            _tokens(alpha, k) / (case[1] + case[2] * visits[k + 1] + case[3] * (k + 1) + case[4] * k)
            for k in range(most + 1)
        )
        if speed[-1] > 1.002 * speed[-2]:
            cases -= 1
            yield case
