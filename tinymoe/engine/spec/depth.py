"""How many tokens to propose: as many as the measured acceptance, verify times and draft times make worthwhile.

On a Mixture of Experts a longer verification visits more experts, so speculation can lose (Cascade, arXiv 2506.20675), and may
win again in batches that visit them all anyhow (MoESD, arXiv 2505.19645). So nothing is assumed: a step of n tokens is taken
to cost a + b U(n) + c n, with U the distinct experts that steps of n tokens have really visited.
"""

import math
from collections import deque
from itertools import combinations

import numpy as np

MEMORY = 8  # times remembered for each number of tokens; their lower quartile counts: a clock errs upwards
GAIN = 1.03  # a change of depth must promise 3 % more tokens per second
REST, LONGEST_REST = 24, 96  # steps between two looks at whether speculation would pay, while it does not
FADE = 0.93  # weight of an examined draft against the next one: easy and hard stretches of a text take turns
WORTH_A_TRY = (
    0.8  # of plain decoding's speed must be promised before a number of requests not met before is tried
)
REFIT = 24  # times between two fits
COUNTED = 8  # steps between two whose experts are counted, where that waits for a GPU


class Acceptance:
    """How likely a draft is kept: a mean that forgets, drawn towards `prior` (a number, or what is known of all requests by
    now) while there is little evidence."""

    __slots__ = ("fade", "kept", "prior", "seen", "weight")

    def __init__(self, prior: "float | Acceptance", weight: float = 4.0, fade: float = FADE):
        self.prior, self.weight, self.fade = prior, weight, fade
        self.kept = self.seen = 0.0

    def count(self, accepted: int, drafted: int) -> None:
        """Of `drafted` tokens the first `accepted` were kept; the one behind them, if any, is the last that was examined."""
        for place in range(min(accepted + 1, drafted)):
            self.kept = self.fade * self.kept + (place < accepted)
            self.seen = self.fade * self.seen + 1

    @property
    def rate(self) -> float:
        prior = self.prior.rate if isinstance(self.prior, Acceptance) else self.prior
        return min(0.99, (self.kept + self.weight * prior) / (self.seen + self.weight))


class CostModel:
    """Seconds of a step of n tokens: a + b U(n) + c n with a, b, c >= 0, fitted to what has been measured."""

    def __init__(self, most_experts: float = math.inf):
        self.most_experts = most_experts  # of all layers together
        self._seconds: dict[int, deque[float]] = {}
        self._experts: dict[int, float] = {}
        self.a, self.b, self.c = 0.0, 0.0, 0.0
        self._new = 0  # times since the last fit
        self._n = self._t = self._u = self._off = np.zeros(0)

    def __len__(self) -> int:
        return len(self._seconds)

    def __contains__(self, n: int) -> bool:
        """Whether a step of n tokens has been seen."""
        return n in self._experts

    def observe(self, n: int, experts: float | None, seconds: float) -> None:
        """A step of n tokens visited so many distinct experts (summed over layers; None: as many as before) and took so
        long."""
        if experts is not None:
            known = self._experts.get(n, experts)
            self._experts[n] = 0.8 * known + 0.2 * experts
        elif n not in self:
            return
        known = self._seconds.setdefault(n, deque(maxlen=MEMORY))
        known.append(max(seconds, 1e-9))
        self._new += 1
        if len(known) < 4 or self._new >= REFIT:
            self._new = 0
            self._fit()

    def _fit(self) -> None:
        self._n = np.array(sorted(self._seconds), dtype=float)
        self._u = np.array([self._experts[int(n)] for n in self._n])
        self._t = np.array([_low(self._seconds[int(n)]) for n in self._n])
        count = np.array([len(self._seconds[int(n)]) for n in self._n])
        X, weight = np.stack([np.ones_like(self._n), self._u, self._n], 1), np.sqrt(count) / self._t
        w = _least_squares(X * weight[:, None], self._t * weight)
        self.a, self.b, self.c = w.tolist()
        off = self._t - X @ w
        # Little is believed of one time that is too long, for a clock errs upwards; one that is short was possible.
        self._off = np.where(off < 0, off, off * count / (count + 2))

    def experts(self, n: np.ndarray) -> np.ndarray:
        """U(n), for n of any shape: measured, between measurements on a line, beyond them with the last slope in log n."""
        if len(self._n) < 2:
            return np.full(n.shape, self._u[0] if len(self._u) else 0.0)
        x, known = np.log(n), np.log(self._n)
        slope = max(0.0, self._u[-1] - self._u[-2]) / (known[-1] - known[-2])
        u = np.interp(x, known, self._u) + slope * np.maximum(0, x - known[-1])
        return np.minimum(u, self.most_experts)

    def seconds(self, n: np.ndarray) -> np.ndarray:
        """Predicted, for numbers of tokens of any shape. What has been measured is known better than the line through it tells."""
        line = self.a + self.b * self.experts(n) + self.c * n
        if not len(self._n):
            return line
        return np.maximum(line + np.interp(n, self._n, self._off), 1e-9)


def _low(times: deque[float]) -> float:
    return sorted(times)[(len(times) - 1) // 4]


def _least_squares(X: np.ndarray, y: np.ndarray) -> np.ndarray:
    """argmin |Xw - y| over w >= 0: with three columns, the best of all supports on which the optimum is positive."""
    best, least = np.zeros(X.shape[1]), float(y @ y)
    scale = np.maximum(np.linalg.norm(X, axis=0), 1e-12)
    for size in range(1, X.shape[1] + 1):
        for columns in map(list, combinations(range(X.shape[1]), size)):
            A = X[:, columns] / scale[columns]
            w = np.linalg.solve(A.T @ A + 1e-6 * np.eye(size), A.T @ y)
            error = float(((A @ w - y) ** 2).sum())
            if (w >= 0).all() and error < least * (1 - 1e-4):
                best, least = np.zeros(X.shape[1]), error
                best[columns] = w / scale[columns]
    return best


class Depth:
    """Chooses depths, step by step. most: num_speculative_tokens; most_experts: of all layers together."""

    def __init__(self, most: int, most_experts: float = math.inf):
        self.most = most
        self.steps = CostModel(most_experts)
        self.acceptance = Acceptance(0.7, weight=2.0, fade=0.99)  # of all requests
        self._passes: dict[int, dict[int, deque[float]]] = {}  # sequences -> passes of a draft -> seconds
        # First, to have something to compare. Runs of 0: on a GPU a step that follows another at once is a cheaper one.
        self._trials = [most, 0, 0, 0, 1, most, 0, 0, max(1, most // 2), most, 0, 0]
        self._met: set[int] = set()  # numbers of sequences, by powers of two, that have been tried
        self._level, self._deepest = 0.0, 0  # drafts per sequence, and passes, last time
        self._rest, self._rested = REST, 0
        self._rates: list[float] = []
        self._turn = self._steps = 0

    def observe_draft(self, sequences: int, passes: int, seconds: float) -> None:
        """Drafting `passes` tokens for so many sequences took so long."""
        known = self._passes.setdefault(sequences, {})
        known.setdefault(passes, deque(maxlen=MEMORY)).append(seconds)

    def draft_seconds(self, sequences: int, passes: np.ndarray) -> np.ndarray:
        """Of so many passes [M] for so many sequences: as measured for the nearest number of them, between numbers of passes
        on a line."""
        if not self._passes:
            return np.zeros(len(passes))
        nearest = self._passes[min(self._passes, key=lambda s: abs(math.log(s / sequences)))]
        known = [0, *sorted(nearest)]
        times = [0.0, *(_low(nearest[k]) for k in known[1:])]
        beyond = np.maximum(0, passes - known[-1]) * times[-1] / known[-1]
        return np.interp(passes, known, times) + beyond

    def choose(self, rates: list[float], limits: list[int], others: int = 0) -> list[int]:
        """Depths for sequences with these acceptance rates, at most `limits`; `others` more decode in the step.

        For each number of passes that the draft may make, drafts are added in the order of the chance that they are reached
        and kept; what promises the most expected tokens per second of the whole step is taken.
        """
        if not any(limits):
            return [0] * len(limits)
        S = len(limits)
        self._meet(S, others)
        if self._trials or not len(self.steps):
            depth = self._trials.pop(0) if self._trials else self.most
            return [min(depth, limit) for limit in limits]
        if not self._level and self._rested % 4 and rates == self._rates:
            return self._at_rest(limits)  # little can have changed
        self._rates = rates
        sequence_D = np.repeat(np.arange(S), limits)
        place_D = np.concatenate([np.arange(limit) for limit in limits]) + 1
        gain_D = np.asarray(rates)[sequence_D] ** place_D
        order_D = np.argsort(-gain_D, kind="stable")
        passes_P = np.arange(max(limits) + 1)
        taken_PD = place_D[order_D] <= passes_P[:, None]
        count_PD = taken_PD.cumsum(1)
        tokens_PD = S + others + (taken_PD * gain_D[order_D]).cumsum(1)
        seconds_PD = self.steps.seconds(S + others + count_PD) + self.draft_seconds(S, passes_P)[:, None]
        speed_PD = tokens_PD / seconds_PD
        best, last = int(speed_PD.argmax()), self._nearest(count_PD, S)
        if speed_PD.flat[best] < GAIN * speed_PD.flat[last]:
            best = last
        passes, drafts = divmod(best, len(order_D))
        chosen_D = order_D[: drafts + 1][taken_PD[passes, : drafts + 1]]
        self._level, self._deepest = len(chosen_D) / S, passes
        if not len(chosen_D):
            return self._at_rest(limits)
        self._rest, self._rested = REST, 0
        return np.bincount(sequence_D[chosen_D], minlength=S).tolist()

    def _nearest(self, count_PD: np.ndarray, S: int) -> int:
        """Where the last choice lies among those of this step, flat."""
        passes = min(self._deepest, len(count_PD) - 1)
        drafts = int(np.searchsorted(count_PD[passes], round(self._level * S)))
        return passes * count_PD.shape[1] + min(drafts, count_PD.shape[1] - 1)

    def _meet(self, S: int, others: int) -> None:
        """What was learnt of few sequences tells little of many: the first time that there are so many, try again, unless it
        looks hopeless."""
        if (size := S.bit_length()) in self._met:
            return
        self._met.add(size)
        if self._trials or not len(self.steps):
            return
        depths = np.array(sorted({0, max(1, self.most // 2), self.most}))
        tokens = others + S * np.array([sum(self.acceptance.rate**i for i in range(k + 1)) for k in depths])
        seconds = self.steps.seconds(others + S * (1 + depths)) + self.draft_seconds(S, depths)
        worth = depths[tokens / seconds > WORTH_A_TRY * tokens[0] / seconds[0]]
        self._trials = [trial for k in worth[worth > 0].tolist() for trial in (k, 0, 0)]

    def _at_rest(self, limits: list[int]) -> list[int]:
        """No drafts; now and then a few for one sequence, ever more seldom, to learn whether things have changed."""
        depths = [0] * len(limits)
        self._rested += 1
        if self._rested >= self._rest:
            self._rested, self._rest = 0, min(2 * self._rest, LONGEST_REST)
            self._turn += 1
            able = [i for i, limit in enumerate(limits) if limit]
            i = able[self._turn % len(able)]
            depths[i] = min(limits[i], max(1, self.most // 2))
        return depths

    def counts_experts(self) -> bool:
        """Whether to count the experts of the next step where that costs time: while all is new, then now and then."""
        self._steps += 1
        return bool(self._trials) or self._steps % COUNTED == 0

    def rests(self, n: int) -> bool:
        """Whether the next step will surely propose nothing, whatever the tokens of this one of n tokens are."""
        if n not in self.steps:
            return False
        if self._trials:
            return self._trials[0] == 0
        return not self._level and self._rested + 1 < self._rest

    def skip(self) -> None:
        """A step without drafts was not asked about, since rests() said so."""
        if self._trials and not self._trials[0]:
            self._trials.pop(0)
        else:
            self._rested += 1
