"""One schema for every measured result: a JSON file in book/results/, from which the book makes its tables.

A file says how to repeat it (command, commit), where it was measured (machine, versions), what the machine can do at
most (ceilings), what came out (rows) and what was measured beside it to show that the result is no accident (controls).
"""

import json
import math
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1
KEYS: Mapping[str, type] = {
    "schema": int,
    "command": str,
    "commit": str,
    "date": str,
    "machine": dict,
    "versions": dict,
    "ceilings": dict,
    "rows": list,
    "controls": list,
}
MACHINE = ("cpu", "cores", "memory_gb", "gpu")
COMMIT = re.compile(r"unknown|[0-9a-f]{40}(-dirty)?")
ROOT = Path(__file__).resolve().parents[2]


class ResultsError(ValueError):
    """A results file that does not follow the schema; the message names the place in it."""


def timing(samples: Iterable[float]) -> dict[str, float | int]:
    """Median and quartiles of repeated measurements, in the unit of the samples.

    The quartiles interpolate between neighbours (numpy's default). Raises ResultsError for no sample or one that is
    not finite.
    """
    values = sorted(float(s) for s in samples)
    if not values or not all(map(math.isfinite, values)):
        raise ResultsError(f"a timing needs at least one sample, all finite; got {values}")
    if len(values) == 1:
        p25 = median = p75 = values[0]
    else:
        p25, median, p75 = statistics.quantiles(values, n=4, method="inclusive")
    # Interpolating between equal samples can err in the last bit: keep the order that validate() asks for.
    return {"median": median, "p25": min(p25, median), "p75": max(p75, median), "n": len(values)}


def write_results(
    path: str | Path,
    *,
    command: str,
    rows: Sequence[Mapping[str, Any]],
    controls: Sequence[Mapping[str, Any]] = (),
    ceilings: Mapping[str, Any] | None = None,
    packages: Sequence[str] = (),
) -> dict[str, Any]:
    """Write one results file and return what was written.

    command: the line that repeats the measurement, from the root of the repository. rows, controls: plain JSON values;
    a row carries model, dtype, mode, requests and seed where they apply, and times as `timing` gives them. ceilings:
    what the machine can reach at most, for example {"memory_gb_s": 21.3}. packages: distributions whose versions
    matter besides python, torch, numpy and tinymoe. Raises ResultsError, and writes nothing, if the whole does not
    follow the schema.
    """
    body = {
        "schema": SCHEMA,
        "command": command,
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": machine(),
        "versions": versions(packages),
        "ceilings": dict(ceilings or {}),
        "rows": [dict(row) for row in rows],
        "controls": [dict(row) for row in controls],
    }
    validate(body)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=1, allow_nan=False) + "\n")
    return body


def read_results(path: str | Path) -> dict[str, Any]:
    """Read and validate one results file. Raises ResultsError, naming the file."""
    try:
        body = json.loads(Path(path).read_text())
        validate(body)
    except ValueError as error:
        raise ResultsError(f"{Path(path).name}: {error}") from error
    return body


def validate(body: Any) -> None:
    """Raises ResultsError, naming the place, unless `body` follows the schema."""
    if not isinstance(body, dict) or set(body) != set(KEYS):
        have = sorted(body) if isinstance(body, dict) else type(body).__name__
        raise ResultsError(f"a results file is an object with the keys {sorted(KEYS)}; got {have}")
    for key, kind in KEYS.items():
        if type(body[key]) is not kind:
            raise ResultsError(f"{key}: {kind.__name__} wanted, got {body[key]!r}")
    if body["schema"] != SCHEMA:
        raise ResultsError(
            f"schema: {SCHEMA} wanted, got {body['schema']}; measure again with {body['command']!r}"
        )
    if not body["command"].strip():
        raise ResultsError("command: the line that repeats the measurement is wanted, got an empty one")
    if not COMMIT.fullmatch(body["commit"]):
        raise ResultsError(
            f"commit: 40 hex digits, '-dirty' after them, or 'unknown' wanted, got {body['commit']!r}"
        )
    try:
        datetime.strptime(body["date"], "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        raise ResultsError(f"date: UTC as 2026-01-31T12:00:00Z wanted, got {body['date']!r}") from None
    if missing := [key for key in MACHINE if key not in body["machine"]]:
        raise ResultsError(f"machine: {missing} missing; it names {list(MACHINE)}")
    if missing := [key for key in ("python", "torch") if key not in body["versions"]]:
        raise ResultsError(f"versions: {missing} missing")
    if not body["rows"]:
        raise ResultsError("rows: at least one result wanted, got none")
    for key in ("rows", "controls"):
        for i, row in enumerate(body[key]):
            if not isinstance(row, dict) or not row:
                raise ResultsError(f"{key}[{i}]: a non-empty object wanted, got {row!r}")
    for key in ("machine", "versions", "ceilings", "rows", "controls"):
        _validate_value(key, body[key])


def _validate_value(place: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ResultsError(f"{place}: key {key!r} is no string")
            _validate_value(f"{place}.{key}", inner)
        if {"median", "p25", "p75"} & set(value):
            _validate_timing(place, value)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            _validate_value(f"{place}[{i}]", inner)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ResultsError(f"{place}: a finite number wanted, got {value}")
    elif not (value is None or isinstance(value, str | int | float)):
        raise ResultsError(f"{place}: a plain JSON value wanted, got {type(value).__name__}")


def _validate_timing(place: str, value: dict[str, Any]) -> None:
    if not {"median", "p25", "p75", "n"} <= set(value):
        raise ResultsError(
            f"{place}: a timing has median, p25, p75 and n (see timing()); got {sorted(value)}"
        )
    low, middle, high, n = (value[k] for k in ("p25", "median", "p75", "n"))
    if any(isinstance(v, bool) or not isinstance(v, int | float) for v in (low, middle, high, n)):
        raise ResultsError(f"{place}: median, p25, p75 and n are numbers; got {value}")
    if not (low <= middle <= high and n >= 1):
        raise ResultsError(f"{place}: p25 <= median <= p75 and n >= 1 wanted, got {value}")


def commit() -> str:
    """The commit of the working tree, "-dirty" after it if tracked files differ (results aside), or "unknown"."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != ROOT:
            return "unknown"  # installed into somebody else's repository
        dirty = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)book/results")
        return git("rev-parse", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def machine() -> dict[str, Any]:
    """CPU model, cores this process may use, memory in GB (1e9 bytes; None where unknown), GPU name or None."""
    cpus = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", cpus.read_text(), re.M) if cpus.exists() else []
    affinity = getattr(os, "sched_getaffinity", None)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "memory_gb": round(pages / 1e9, 1) if pages else None,
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "gpus": torch.cuda.device_count(),
    }


def versions(packages: Sequence[str] = ()) -> dict[str, str]:
    """Versions of python and of the named distributions; one that is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in ("tinymoe", "torch", "triton", "numpy", *packages):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {**found, "torch": torch.__version__}
