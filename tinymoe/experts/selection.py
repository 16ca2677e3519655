"""Which way through the experts a step takes: the one that the last steps' routes make the cheapest.

Served engines choose by the number of tokens alone (vLLM: the nearest tuned M). But how many experts have to be read, and
how many tiles are cut, is a matter of the routes. A CUDA graph is captured for each (bucket of tokens, path), so a step
takes one path for all its layers; its own routes are known only when it is over. Hence a bucket's path follows from its
last step's histogram, and it changes only for a gain of more than 5 % in three steps running: what wins by chance is not
worth the switch, and captured graphs stay warm.

Every term of the cost model is a sum over experts of something that depends on one count, so a step is judged by looking
its counts up in a table of the bucket: a few microseconds for all layers and paths together, beside a GPU that is busy
with the next step meanwhile.
"""

from collections.abc import Sequence

import numpy as np

from tinymoe.core.model_config import require
from tinymoe.experts.costs import CostModel, rows_of


class _Bucket:
    """What is known of one bucket: its paths, the table of costs by count, the path of its next step."""

    def __init__(self, model: CostModel, bucket: int, num_experts: int, top_k: int):
        self.paths = model.candidates(bucket)
        measured = model.nearest(bucket)
        c_PF = np.array([model.coefficients[path, measured] for path in self.paths])
        n_N = np.arange(bucket + 1)
        tiles_NP = -(-n_N[:, None] // np.array([rows_of(path) for path in self.paths]))
        # A layer has E counts and K * T visits: so the constant and the tokens' term are sums over experts, too.
        self.table_NP = c_PF[:, 0] / num_experts + (n_N > 0)[:, None] * c_PF[:, 1] + tiles_NP * c_PF[:, 2]
        self.table_NP += n_N[:, None] / top_k * c_PF[:, 3]
        self.per_largest_P = c_PF[:, 4]
        self.largest_matters = bool(self.per_largest_P.any())
        self.log = model.law == "log"
        self.ones = np.ones(0)
        # Until a step has run: routes that spread evenly, as a trained router's roughly do.
        generator = np.random.default_rng(0)
        even_LE = generator.binomial(bucket, top_k / num_experts, size=(16, num_experts))
        self.now = int(self.costs(even_LE).argmin())
        self.better = 0  # steps running in which another path would have gained enough

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


class Selector:
    """Chooses a path for each step of a model whose MoE layers have num_experts experts, top_k a token.

    gain, patience: a bucket changes its path for a predicted gain of more than `gain` in `patience` steps running.
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
        constant: str | None = None,
    ):
        require(1 <= top_k <= num_experts, f"top_k must lie in 1..{num_experts}, got {top_k}")
        require(0 <= gain < 1, f"gain must be a fraction 0 <= gain < 1, got {gain}")
        require(patience >= 1, f"patience must be at least one step, got {patience}")
        require(
            bool(model.coefficients), "a selector needs a cost model with measured paths, got an empty one"
        )
        require(
            constant is None or constant in model.paths,
            f"the constant path must be one of {model.paths}, got {constant!r}",
        )
        self.model = model
        self.num_experts, self.top_k = num_experts, top_k
        self.gain, self.patience, self.constant = gain, patience, constant
        self.switches = 0
        self._buckets: list[_Bucket | None] = []  # by bits of the bucket

    def choose(self, tokens: int) -> str:
        """The path of a step of so many tokens (at least one)."""
        if self.constant is not None:
            return self.constant
        bucket = self._bucket(tokens)
        return bucket.paths[bucket.now]

    def observe(self, tokens: int, counts_LE: np.ndarray) -> None:
        """A step of `tokens` tokens is over: counts [L, E] integers, the visits of each layer's experts, top_k a token."""
        if self.constant is not None:
            return
        bucket = self._bucket(tokens)
        if len(bucket.paths) == 1:
            return
        costs = bucket.costs(counts_LE).tolist()
        least = min(costs)
        if least >= (1 - self.gain) * costs[bucket.now]:
            bucket.better = 0
            return
        bucket.better += 1
        if bucket.better >= self.patience:
            bucket.now, bucket.better = costs.index(least), 0
            self.switches += 1

    def predict(self, tokens: int, counts_LE: np.ndarray | Sequence) -> dict[str, float]:
        """Predicted microseconds of each candidate, all layers together."""
        bucket = self._bucket(tokens)
        return dict(zip(bucket.paths, bucket.costs(np.asarray(counts_LE)).tolist()))

    def _bucket(self, tokens: int) -> _Bucket:
        bits = (tokens - 1).bit_length() if tokens > 1 else 0
        if bits >= len(self._buckets):
            self._buckets += [None] * (bits + 1 - len(self._buckets))
        bucket = self._buckets[bits]
        if bucket is None:
            bucket = self._buckets[bits] = _Bucket(self.model, 1 << bits, self.num_experts, self.top_k)
        return bucket
