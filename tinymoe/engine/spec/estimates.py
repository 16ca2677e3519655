"""What is known, while serving, about how many drafts are kept and what a step and a draft cost."""

import math
from collections import deque
from itertools import combinations
from typing import NamedTuple

import numpy as np

MEMORY = 8  # times remembered of each kind of step; their median counts
PACE, CLIP = 0.05, 0.2  # how fast the pace follows one step, and how far off at most that is taken to be
FADE = 0.97  # weight of an examined draft against the next one: easy and hard stretches of a text take turns
REFIT = 24  # times between two fits
LEAST = 1e-9  # seconds: a coarse clock may see none, one that is set back fewer


class Acceptance:
    """How likely a draft is kept: a mean that forgets, drawn towards `prior` (a number, or what is known of all requests by
    now) while there is little evidence. at: how long its text was when it last changed. Defaults: to forget faster foretells
    the drafts of some texts a little better, and is fooled by luck where nothing changes."""

    __slots__ = ("at", "fade", "kept", "prior", "seen", "weight")

    def __init__(self, prior: "float | Acceptance", weight: float = 16.0, fade: float = FADE):
        self.prior, self.weight, self.fade = prior, weight, fade
        self.kept = self.seen = 0.0
        self.at = 0

    def count(self, accepted: int, drafted: int) -> None:
        """Of `drafted` tokens the first `accepted` were kept; the one behind them, if any, is the last that was examined."""
        fade, examined = self.fade, min(accepted + 1, drafted)
        old, behind = (
            fade**examined,
            fade ** (examined - accepted),
        )  # weights of what was known, and of the last kept one
        self.kept = old * self.kept + behind * (1 - fade**accepted) / (1 - fade)
        self.seen = old * self.seen + (1 - old) / (1 - fade)

    def reach(self, tokens: int) -> None:
        """The text is so long now. What came without drafts may be unlike what was examined: that is forgotten with it."""
        weight = self.fade ** (tokens - self.at)
        self.kept, self.seen, self.at = weight * self.kept, weight * self.seen, tokens

    @property
    def rate(self) -> float:
        prior = self.prior.rate if isinstance(self.prior, Acceptance) else self.prior
        return min(0.99, (self.kept + self.weight * prior) / (self.seen + self.weight))

    @property
    def evidence(self) -> float:
        """How many drafts the rate rests on."""
        return self.seen + self.weight


def chances(rate_S: np.ndarray, evidence_S: np.ndarray, places: int) -> np.ndarray:
    """[S, places]: how likely drafts are kept up to each place, if a rate is known from so many drafts.

    The mean of r^k over a Beta distribution of r: more than the k-th power of its mean, for if many are kept, r is high.
    """
    i = np.arange(places)
    kept_S1, seen_S1 = (rate_S * evidence_S)[:, None], evidence_S[:, None]
    return np.cumprod((kept_S1 + i) / (seen_S1 + i), axis=1)


class Pace:
    """How slow the machine is now. It may have other work, or another clock rate, than when a time was taken; times that are
    divided by the pace they were taken at can be compared."""

    __slots__ = ("slow",)

    def __init__(self) -> None:
        self.slow = 1.0

    def follow(self, seconds: float, expected: float) -> None:
        """A step took so long that was expected to take so long."""
        self.slow *= math.exp(PACE * min(CLIP, max(-CLIP, math.log(seconds / expected))))


class Times:
    """The last few times of one kind of thing. middle: their median, the shorter one of two."""

    __slots__ = ("_known", "middle")

    def __init__(self) -> None:
        self._known: deque[float] = deque(maxlen=MEMORY)
        self.middle = math.inf

    def __len__(self) -> int:
        return len(self._known)

    def add(self, seconds: float) -> None:
        self._known.append(max(seconds, LEAST))
        self.middle = sorted(self._known)[(len(self._known) - 1) // 2]


class Curve(NamedTuple):
    """How far measured steps of one kind are off the line, by their numbers of tokens [N], ascending."""

    n_N: np.ndarray
    off_N: np.ndarray


Kind = tuple[int, bool]  # sequences in the step, by powers of two, and whether drafts are verified


class CostModel:
    """Seconds of a step of n tokens: a + b U(n) + c n, and d more if it verifies drafts; a, b, c, d >= 0.

    U(n) is the number of distinct experts that steps of n tokens have visited. d is what the host does about drafts, and what
    a GPU idles meanwhile. The line is fitted to all steps; what those of one kind are off it is remembered beside it.
    """

    def __init__(self, most_experts: float = math.inf, pace: Pace | None = None):
        self.most_experts = most_experts  # of all layers together
        self.pace = pace or Pace()
        self.a = self.b = self.c = self.d = 0.0
        self._times: dict[Kind, dict[int, Times]] = {}
        self._curves: dict[Kind, Curve] = {}
        self._experts: dict[int, float] = {}
        self._counted = np.zeros((2, 0))  # n and U(n)
        self._new = 0  # times since the last fit

    def __len__(self) -> int:
        """How many different steps have been seen."""
        return sum(map(len, self._times.values()))

    def __contains__(self, n: int) -> bool:
        """Whether the experts of a step of n tokens have been counted."""
        return _near(n) in self._experts

    def observe(
        self, sequences: int, n: int, experts: float | None, seconds: float, rare: bool = False
    ) -> None:
        """A step of n tokens, newest ones of so many sequences and drafts, visited so many distinct experts (summed over
        layers; None: as many as before) and took so long. rare: it was an unusual one of its kind, whose time counts only
        while there is no other."""
        kind, n, seconds = (sequences.bit_length(), n > sequences), _near(n), max(seconds, LEAST)
        if experts is not None:
            known = self._experts.get(n, experts)
            self._experts[n] = 0.8 * known + 0.2 * experts
        elif n not in self._experts:
            return
        if rare and kind in self._times:
            return
        times = self._times.setdefault(kind, {}).setdefault(n, Times())
        if len(times) >= MEMORY // 2:
            self.pace.follow(seconds, times.middle * self.pace.slow)
        times.add(seconds / self.pace.slow)
        self._new += 1
        if len(times) <= 2 or self._new >= REFIT:
            self._new = 0
            self._fit()

    def _fit(self) -> None:
        known = sorted(self._experts.items())
        self._counted = np.array(known, dtype=float).T
        points = [
            (kind, n, times.middle, len(times))
            for kind, steps in sorted(self._times.items())
            for n, times in sorted(steps.items())
        ]
        n_P, t_P, count_P = np.array([point[1:] for point in points], dtype=float).T
        u_P = np.array([self._experts[point[1]] for point in points])
        drafts_P = np.array([float(point[0][1]) for point in points])
        X, weight = np.stack([np.ones_like(n_P), u_P, n_P, drafts_P], 1), np.sqrt(count_P) / t_P
        w = _least_squares(X * weight[:, None], t_P * weight)
        self.a, self.b, self.c, self.d = w.tolist()
        off_P = t_P - X @ w
        # Little is believed of one time that is too long, for a clock errs upwards; one that is short was possible.
        off_P = np.where(off_P < 0, off_P, off_P * count_P / (count_P + 2))
        start = 0
        for kind, steps in sorted(self._times.items()):
            part = slice(start, start + len(steps))
            self._curves[kind] = Curve(n_P[part], off_P[part])
            start += len(steps)

    def experts(self, n: np.ndarray) -> np.ndarray:
        """U(n), for n of any shape: measured, between measurements on a line, beyond them with the last slope in log n."""
        known, u = self._counted
        if len(known) < 2:
            return np.full(n.shape, u[0] if len(u) else 0.0)
        x, known = np.log(n), np.log(known)
        slope = max(0.0, u[-1] - u[-2]) / (known[-1] - known[-2])
        return np.minimum(np.interp(x, known, u) + slope * np.maximum(0, x - known[-1]), self.most_experts)

    def seconds(self, sequences: int, n: np.ndarray) -> np.ndarray:
        """Predicted, for so many sequences and numbers of tokens of any shape: n = sequences has no drafts. What has been
        measured is known better than the line through it tells."""
        drafts = n > sequences
        line = self.a + self.b * self.experts(n) + self.c * n + self.d * drafts
        size = sequences.bit_length()
        off = np.where(drafts, self._off(size, True, n), self._off(size, False, n))
        return self.pace.slow * np.maximum(line + off, LEAST)

    def _off(self, size: int, drafts: bool, n: np.ndarray) -> np.ndarray:
        """As steps of this kind are off the line, or of the nearest size that has been seen."""
        near = [kind for kind in self._curves if kind[1] == drafts]
        if not near:
            return np.zeros(n.shape)
        return np.interp(n, *self._curves[min(near, key=lambda kind: abs(kind[0] - size))])


class DraftTimes:
    """Seconds that drafts take, by the number of sequences (powers of two) and of passes."""

    def __init__(self, pace: Pace | None = None):
        self.pace = pace or Pace()
        self._times: dict[int, dict[int, Times]] = {}

    def observe(self, sequences: int, passes: int, seconds: float) -> None:
        known = self._times.setdefault(sequences.bit_length(), {})
        known.setdefault(passes, Times()).add(seconds / self.pace.slow)

    def seconds(self, sequences: int, passes_M: np.ndarray) -> np.ndarray:
        """[M]: as measured for the nearest number of sequences, between numbers of passes on a line."""
        if not self._times:
            return np.zeros(len(passes_M))
        size = sequences.bit_length()
        known = self._times[min(self._times, key=lambda s: abs(s - size))]
        passes, times = [0, *sorted(known)], [0.0, *(known[k].middle for k in sorted(known))]
        beyond = np.maximum(0, passes_M - passes[-1]) * times[-1] / passes[-1]
        return self.pace.slow * (np.interp(passes_M, passes, times) + beyond)


def _near(n: int) -> int:
    """n, from 32 on rounded to one of 16 numbers an octave: steps hardly differ, and each number must be measured."""
    part = 1 << max(0, n.bit_length() - 5)
    return (n + part // 2) // part * part


def _least_squares(X: np.ndarray, y: np.ndarray) -> np.ndarray:
    """argmin |Xw - y| over w >= 0: with few columns, the best of all supports on which the optimum is positive. If that is so
    on the support of all, it is the best."""
    columns, best, least = X.shape[1], np.zeros(X.shape[1]), float(y @ y)
    scale = np.maximum(np.linalg.norm(X, axis=0), 1e-12)
    for size in range(columns, 0, -1):
        for support in map(list, combinations(range(columns), size)):
            A = X[:, support] / scale[support]
            w = np.linalg.solve(A.T @ A + 1e-6 * np.eye(size), A.T @ y)
            error = float(((A @ w - y) ** 2).sum())
            if (w >= 0).all() and error < least:
                best, least = np.zeros(columns), error
                best[support] = w / scale[support]
                if size == columns:
                    return best
    return best
