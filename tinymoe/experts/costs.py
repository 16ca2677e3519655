"""What a way through the experts will cost, from what was measured: a small model of a layer's time.

It depends on how many tokens there are and on how they spread over the experts, which changes from step to step.
x = (1, distinct experts, tiles, tokens, rows of the busiest expert) says what there is to read and to multiply. For each
path and each bucket of tokens, time is a combination of these with coefficients >= 0, or its logarithm is one (ridge),
whichever predicts better what it has not seen.

No torch, no clock: times come from `tinymoe bench kernels --fit`, choices are made in tinymoe.experts.selection.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tinymoe.core.model_config import ConfigError, brief, require

FEATURES = ("one", "distinct", "tiles", "tokens", "largest")
LAWS = ("time", "log")
MOST_TOKENS = 2**20  # of a step
LONGEST_NAME = 200  # of a path; int() refuses thousands of digits


class Measurement(NamedTuple):
    """Microseconds of one layer by `path` on routes with these `features`."""

    path: str
    tokens: int
    features: tuple[float, ...]
    us: float


def rows_of(path: str) -> int:
    """Rows of the path's tile: the digits its name ends with, 1 if none."""
    digits = path[len(path.rstrip("0123456789")) :]
    return int(digits) if digits else 1


def bucket_of(tokens: int) -> int:
    """The power of two that a CUDA graph for so many tokens is captured at."""
    return 1 << max(0, tokens - 1).bit_length()


def features(counts_E: Sequence[int] | np.ndarray, tokens: int, rows: int) -> tuple[float, ...]:
    """Of one layer's loads (visits of each expert), for tiles of `rows` rows."""
    counts_E = np.asarray(counts_E)
    tiles = (-(-counts_E // rows)).sum()
    return (1.0, float((counts_E > 0).sum()), float(tiles), float(tokens), float(counts_E.max(initial=0)))


@dataclass(frozen=True)
class CostModel:
    """coefficients: (path, bucket) -> one for each of FEATURES. law: "time" (their sum is microseconds) or "log" (its
    exponential is). A path without coefficients in a bucket is no candidate there."""

    law: str
    coefficients: Mapping[tuple[str, int], tuple[float, ...]]

    @property
    def paths(self) -> list[str]:
        return list(dict.fromkeys(path for path, _ in self.coefficients))

    @property
    def buckets(self) -> list[int]:
        return sorted({bucket for _, bucket in self.coefficients})

    def nearest(self, tokens: int) -> int:
        """The measured bucket whose tokens are nearest in proportion; the smaller of two equally near ones."""
        return min(self.buckets, key=lambda bucket: (abs(math.log2(bucket / bucket_of(tokens))), bucket))

    def candidates(self, tokens: int) -> list[str]:
        bucket = self.nearest(tokens)
        return [path for path in self.paths if (path, bucket) in self.coefficients]

    def predict(self, path: str, tokens: int, x: Sequence[float]) -> float:
        """Microseconds. Raises KeyError where the path is no candidate."""
        value = float(np.dot(self.coefficients[path, self.nearest(tokens)], x))
        return math.exp(min(value, 700.0)) if self.law == "log" else value

    def to_rows(self, shape: str) -> list[dict[str, Any]]:
        """Rows for a results file; `load` reads them back."""
        return [
            {"kind": "model", "shape": shape, "law": self.law, "path": path, "bucket": bucket, "coefficients": list(c)}
            for (path, bucket), c in self.coefficients.items()
        ]  # fmt: skip


def load(path: str | Path, shape: str) -> CostModel:
    """The cost model of `shape` in a results file. Raises ConfigError, naming the place, for a file that has none or a
    malformed one."""
    name = Path(path).name
    again = "measure again with tinymoe bench selection"
    try:
        body = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): {again}") from error
    except (ValueError, RecursionError) as error:  # nested too deeply
        raise ConfigError(f"{name} is no JSON ({error}): {again}") from error
    rows: Any = body.get("rows") if isinstance(body, dict) else None
    require(isinstance(rows, list), f"{name}: an object with a list 'rows' wanted, got {brief(body)}")
    models: list[dict[str, Any]] = [
        row for row in rows if isinstance(row, dict) and row.get("kind") == "model"
    ]
    mine = [row for row in models if row.get("shape") == shape]
    known = sorted({str(row.get("shape")) for row in models})
    require(bool(mine), f"{name} has no cost model for {shape!r}; it has {known}")
    law: Any = mine[0].get("law")
    other: Any = next((row.get("law") for row in mine if row.get("law") != law), law)
    got = brief(law) if other == law else f"{brief(law)} and {brief(other)}"
    require(law in LAWS and other == law, f"{name}: law must be one of {LAWS} and the same in all rows of {shape!r}, got {got}")  # fmt: skip
    found: dict[tuple[str, int], tuple[float, ...]] = {}
    for row in mine:
        way: Any
        bucket: Any
        values: Any
        way, bucket, values = (row.get(key) for key in ("path", "bucket", "coefficients"))
        ok = isinstance(way, str) and bool(way) and len(way) <= LONGEST_NAME and rows_of(way) >= 1
        require(ok, f"{name}: path must be a name, and digits at its end at least 1 row, got {brief(way)}")
        ok = type(bucket) is int and 1 <= bucket <= MOST_TOKENS and bucket & (bucket - 1) == 0
        require(
            ok, f"{name}: bucket must be a power of two up to {MOST_TOKENS}, got {brief(bucket)} for {way!r}"
        )
        ok = isinstance(values, list) and len(values) == len(FEATURES)
        ok = ok and all(type(v) in (int, float) and abs(v) <= sys.float_info.max for v in values)
        require(ok, f"{name}: coefficients of {way!r} at {bucket} must be {len(FEATURES)} finite numbers, got {brief(values)}")  # fmt: skip
        require((way, bucket) not in found, f"{name}: {way!r} at {bucket} is there twice")
        found[way, bucket] = tuple(float(v) for v in values)
    return CostModel(law, found)


# Fitting


def fit(measurements: Iterable[Measurement], law: str | None = None) -> CostModel:
    """A bucket's coefficients come from its own measurements and, with a tenth of the weight, from those of the buckets
    beside it. law: None takes the one that predicts better what was left out. Raises ConfigError for no measurement, or
    one that is not positive and finite."""
    rows = list(measurements)
    require(bool(rows), "a cost model needs measurements, got none")
    for m in rows:
        ok = len(m.features) == len(FEATURES) and all(map(math.isfinite, (*m.features, m.us)))
        require(ok and m.us > 0, f"a measurement has {len(FEATURES)} finite features and positive microseconds, got {brief(m)}")  # fmt: skip
    if law is None:
        law = min(LAWS, key=lambda each: held_out(rows, each))
    require(law in LAWS, f"law must be one of {LAWS}, got {law!r}")
    return CostModel(law, _coefficients(rows, law))


def held_out(measurements: Sequence[Measurement], law: str, folds: int = 4) -> float:
    """Mean relative error of predictions for measurements that were left out of the fit, a fold at a time."""
    seen: Counter[str] = Counter()
    fold_of = []
    for m in measurements:  # dealt out path by path: the same routes are left out for all paths
        fold_of.append(seen[m.path] % folds)
        seen[m.path] += 1
    errors = []
    for fold in range(folds):
        kept = [m for m, f in zip(measurements, fold_of) if f != fold]
        model = CostModel(law, _coefficients(kept, law))
        for m, f in zip(measurements, fold_of):
            if f == fold and model.coefficients and (m.path, model.nearest(m.tokens)) in model.coefficients:
                errors.append(abs(model.predict(m.path, m.tokens, m.features) / m.us - 1))
    return float(np.mean(np.minimum(errors, 1.0))) if errors else math.inf


def _coefficients(rows: Sequence[Measurement], law: str) -> dict[tuple[str, int], tuple[float, ...]]:
    groups: dict[tuple[str, int], list[Measurement]] = {}
    for m in rows:
        groups.setdefault((m.path, bucket_of(m.tokens)), []).append(m)
    found = {}
    for (path, bucket), own in groups.items():
        beside = [m for near in (bucket // 2, bucket * 2) for m in groups.get((path, near), ())]
        x = np.array([m.features for m in (*own, *beside)])
        us = np.array([m.us for m in (*own, *beside)])
        weight = np.array([1.0] * len(own) + [0.1] * len(beside)) ** 0.5
        found[path, bucket] = tuple(
            map(float, _nonnegative(x, us, weight) if law == "time" else _ridge(x, us, weight))
        )
    return found


def _nonnegative(x: np.ndarray, us: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Coefficients >= 0 of least relative error: of all subsets of features whose plain least squares are >= 0, the best.

    With five features that is exact and quick; all features are >= 0, so the constant alone is always one of them."""
    a, goal = x * (weight / us)[:, None], weight
    best, least = np.zeros(x.shape[1]), math.inf
    for size in range(1, x.shape[1] + 1):
        for subset in map(list, combinations(range(x.shape[1]), size)):
            scale = np.maximum(np.abs(a[:, subset]).max(axis=0), 1e-300)
            c = np.linalg.lstsq(a[:, subset] / scale, goal, rcond=1e-9)[0] / scale
            loss = np.square(a[:, subset] @ c - goal).sum()
            if (c >= 0).all() and loss < least * (
                1 - 1e-9
            ) - 1e-18:  # fewer features unless more of them help
                best, least = np.zeros(x.shape[1]), loss
                best[subset] = c
    return best


def _ridge(x: np.ndarray, us: np.ndarray, weight: np.ndarray, strength: float = 1e-3) -> np.ndarray:
    """Least squares on log(us), every coefficient but the constant's held small in units of its feature."""
    scale = np.maximum(np.abs(x).max(axis=0), 1.0)
    a = x / scale * weight[:, None]
    hold = np.eye(x.shape[1]) * strength * np.square(weight).sum()
    hold[0, 0] = 0.0
    return np.linalg.solve(a.T @ a + hold + 1e-12 * np.eye(len(hold)), a.T @ (np.log(us) * weight)) / scale
