"""Which way through the experts a step takes: the one that the last steps' routes make the cheapest.

Served engines choose by the number of tokens alone (vLLM: the nearest tuned M). But how many experts have to be read, and
how many tiles are cut, is a matter of the routes. A CUDA graph is captured for each (bucket of tokens, path), so a step
takes one path for all its layers; its own routes are known only when it is over. Hence a bucket's path follows from its
last step's histogram, and it changes only for a gain of more than 5 % in three steps running: what wins by chance is not
worth the switch, and captured graphs stay warm. While nothing gains, only one step in eight is looked at.

Every term of the cost model is a sum over experts of something that depends on one count, so a step is judged by looking
its counts up in a table of the bucket: a few microseconds for all layers and paths together, beside a GPU that is busy
with the next step meanwhile.
"""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from tinymoe.core.model_config import ConfigError, brief, require
from tinymoe.experts.costs import MOST_TOKENS, CostModel, rows_of

TRIED = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)  # skews; the first spreads evenly
MOST_DRAWN = 512  # tokens that are drawn; the loads of larger buckets are multiples of these


def routes_tried(tokens: int, num_experts: int, top_k: int) -> np.ndarray:
    """Loads [N, E] of layers whose experts are loved evenly, very unevenly, and between; an equal number of each."""
    generator = np.random.default_rng(0)
    drawn = min(tokens, MOST_DRAWN)
    times = max(2, min(16, 1024 // drawn))
    found = []
    for skew in TRIED:
        for _ in range(times):
            scores = generator.gumbel(size=(drawn, num_experts)) - skew * np.log(
                np.arange(1, num_experts + 1)
            )
            ids = np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]
            found.append(np.bincount(ids.ravel(), minlength=num_experts) * tokens // drawn)
    return np.array(found)


class _Bucket:
    """What is known of one bucket: its paths, the table of costs by count, the path of its next step.

    Routes of many kinds are tried when the bucket is made. A path that none of them makes the cheapest is left out; and
    where nothing gains enough over the path for even routes, that is the only one: then no step has to be looked at.
    """

    def __init__(self, model: CostModel, bucket: int, num_experts: int, top_k: int, gain: float):
        measured, self.log = model.nearest(bucket), model.law == "log"
        paths = model.candidates(bucket)
        self._tabulate(model, paths, measured, bucket, num_experts, top_k)
        full, least = (routes_tried(t, num_experts, top_k) for t in (bucket, bucket // 2 + 1))
        cost_NP = np.array([self.costs(loads_E[None]) for loads_E in (*full, *least)])
        start = int(cost_NP[: len(full) // len(TRIED)].sum(axis=0).argmin())
        wins = {start} | set(cost_NP.argmin(axis=1).tolist())
        if (cost_NP.min(axis=1) >= (1 - gain) * cost_NP[:, start]).all():
            wins = {start}
        kept = sorted(wins)
        self._tabulate(model, [paths[i] for i in kept], measured, bucket, num_experts, top_k)
        self.now = kept.index(start)
        self.better = 0  # steps running in which another path would have gained enough
        self.rest = 0  # steps that are not looked at

    def _tabulate(
        self, model: CostModel, paths: list[str], measured: int, bucket: int, num_experts: int, top_k: int
    ) -> None:
        self.paths = paths
        c_PF = np.array([model.coefficients[path, measured] for path in paths])
        n_N = np.arange(bucket + 1)
        tiles_NP = -(-n_N[:, None] // np.array([rows_of(path) for path in paths]))
        # A layer has E counts and K * T visits: so the constant and the tokens' term are sums over experts, too.
        self.table_NP = c_PF[:, 0] / num_experts + (n_N > 0)[:, None] * c_PF[:, 1] + tiles_NP * c_PF[:, 2]
        self.table_NP += n_N[:, None] / top_k * c_PF[:, 3]
        self.per_largest_P = c_PF[:, 4]
        self.largest_matters = bool(self.per_largest_P.any())
        self.ones = np.ones(0)

    def costs(self, counts_LE: np.ndarray) -> np.ndarray:
        """Predicted microseconds of each path, all layers together."""
        if self.log:
            cost_LP = self.table_NP.take(counts_LE, axis=0, mode="clip").sum(axis=1)
            cost_LP += counts_LE.max(axis=1)[:, None] * self.per_largest_P
            return np.exp(np.minimum(cost_LP, 700.0)).sum(axis=0)
        if len(self.ones) != counts_LE.size:
            self.ones = np.ones(counts_LE.size)
        # A product with ones: a third of the time of numpy's sum over so few numbers.
        cost_P = self.ones.dot(self.table_NP.take(counts_LE.ravel(), axis=0, mode="clip"))
        if self.largest_matters:
            cost_P += np.maximum.reduce(counts_LE, axis=1).sum() * self.per_largest_P
        return cost_P


def _integer(name: str, value: Any) -> int:
    """An integer of any kind as an int; raises ConfigError."""
    ok = isinstance(value, Integral) and not isinstance(value, bool)
    require(ok, f"{name} must be an integer, got {brief(value)}")
    return int(value)


class Selector:
    """Chooses a path for each step of a model whose MoE layers have num_experts experts, top_k a token.

    gain, patience: a bucket changes its path for a predicted gain of more than `gain` in `patience` steps running.
    every: while nothing gains, one step in so many is looked at: routes drift slower than steps follow one another.
    constant: always this path (invariant mode, whose arithmetic must not depend on who shares the batch). Tokens that
    were not measured take the nearest bucket's costs. Raises ConfigError for numbers or a path that cannot be.
    """

    def __init__(
        self,
        model: CostModel,
        num_experts: int,
        top_k: int,
        *,
        gain: float = 0.05,
        patience: int = 3,
        every: int = 8,
        constant: str | None = None,
    ):
        num_experts, top_k = _integer("num_experts", num_experts), _integer("top_k", top_k)
        patience, every = _integer("patience", patience), _integer("every", every)
        require(1 <= top_k <= num_experts, f"top_k must lie in 1..{num_experts}, got {top_k}")
        ok = isinstance(gain, Real) and not isinstance(gain, bool) and 0 <= gain < 1
        require(ok, f"gain must be a fraction 0 <= gain < 1, got {brief(gain)}")
        for name, value in (("patience", patience), ("every", every)):
            require(value >= 1, f"{name} must be at least one step, got {value}")
        require(
            bool(model.coefficients), "a selector needs a cost model with measured paths, got an empty one"
        )
        require(
            constant is None or constant in model.paths,
            f"the constant path must be one of {model.paths}, got {constant!r}",
        )
        self.model = model
        self.num_experts, self.top_k = num_experts, top_k
        self.gain, self.patience, self.every, self.constant = gain, patience, every, constant
        self.switches = 0
        self._buckets: list[_Bucket | None] = []  # by bits of the bucket

    def choose(self, tokens: int) -> str:
        """The path of a step of so many tokens. Raises ConfigError outside 1..2**20."""
        if self.constant is not None:
            return self.constant
        bucket = self._bucket(tokens)
        return bucket.paths[bucket.now]

    def observe(self, tokens: int, counts_LE: np.ndarray) -> None:
        """A step of `tokens` tokens is over: counts [L, E] integers, the visits of each layer's experts, top_k a token.

        Raises ConfigError for another shape, and for numbers that are no counts.
        """
        if self.constant is not None:
            return
        bucket = self._bucket(tokens)
        ok = isinstance(counts_LE, np.ndarray) and counts_LE.dtype.kind in "iu" and counts_LE.ndim == 2
        if not (ok and counts_LE.shape[1] == self.num_experts and len(counts_LE)):
            what = (
                f"{counts_LE.dtype} {list(counts_LE.shape)}"
                if isinstance(counts_LE, np.ndarray)
                else brief(counts_LE)
            )
            raise ConfigError(f"counts must be an array of integers [layers, {self.num_experts}], got {what}")
        if bucket.rest or len(bucket.paths) == 1:
            bucket.rest -= bucket.rest > 0
            return
        if (
            counts_LE.dtype.kind == "i" and counts_LE.min() < 0
        ):  # only where the step is looked at: it costs time
            raise ConfigError(f"counts must not be negative, got {counts_LE.min()}")
        costs = bucket.costs(counts_LE).tolist()
        least = min(costs)
        if least >= (1 - self.gain) * costs[bucket.now]:
            bucket.better, bucket.rest = 0, self.every - 1
            return
        bucket.better += 1
        if bucket.better >= self.patience:
            bucket.now, bucket.better, bucket.rest = costs.index(least), 0, self.every - 1
            self.switches += 1

    def candidates(self, tokens: int) -> list[str]:
        """The paths that some routes make the cheapest at so many tokens: those a graph is worth capturing for."""
        return [self.constant] if self.constant is not None else list(self._bucket(tokens).paths)

    def predict(self, tokens: int, counts_LE: np.ndarray | Sequence) -> dict[str, float]:
        """Predicted microseconds of each candidate, all layers together."""
        bucket = self._bucket(tokens)
        return dict(zip(bucket.paths, bucket.costs(np.asarray(counts_LE)).tolist()))

    def _bucket(self, tokens: int) -> _Bucket:
        if type(tokens) is not int:
            tokens = _integer("tokens", tokens)
        if not 1 <= tokens <= MOST_TOKENS:
            raise ConfigError(f"tokens must lie in 1..{MOST_TOKENS}, got {brief(tokens)}")
        bits = (tokens - 1).bit_length()
        if bits >= len(self._buckets):
            self._buckets += [None] * (bits + 1 - len(self._buckets))
        bucket = self._buckets[bits]
        if bucket is None:
            bucket = self._buckets[bits] = _Bucket(
                self.model, 1 << bits, self.num_experts, self.top_k, self.gain
            )
        return bucket
