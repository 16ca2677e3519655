"""What a judge is, and how a function is compared with a reference on many cases."""

import copy
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Verdict(NamedTuple):
    """ok, and what to print: what agreed, or the first thing that is wrong."""

    ok: bool
    message: str


class Unanswered(Exception):
    """The answer is still the stub of the notebook."""


Judge = Callable[..., Verdict]  # judge(answer, *given) -> Verdict


def decide(judge: Judge, answer: Any, *given: Any) -> Verdict | None:
    """The judge's verdict; None while the answer is Ellipsis, returns Ellipsis, or raises NotImplementedError."""
    if answer is ...:
        return None
    try:
        return judge(answer, *given)
    except Unanswered:
        return None


def missing(judge: Judge, given: tuple) -> str:
    """Names of what the judge needs besides the answer if `given` is not as many values, else ""."""
    try:
        inspect.signature(judge).bind(None, *given)
    except TypeError:
        return ", ".join(list(inspect.signature(judge).parameters)[1:]) or "nothing"
    return ""


def attempt(function: Callable, *args: Any) -> tuple[Any, str]:
    """(result, "") or (None, "raised ..."); the arguments are copied, so that the answer cannot change them."""
    try:
        result = function(*copy.deepcopy(args))
    except NotImplementedError:
        raise Unanswered from None
    except Exception as error:
        return None, f"raised {type(error).__name__}: {error}"
    if result is ...:
        raise Unanswered
    return result, ""


def same(a: Any, b: Any, tolerance: float = 1e-9) -> bool:
    """Equal, numbers up to `tolerance`; lists and tuples elementwise. True and False are no numbers."""
    if isinstance(b, list | tuple):
        alike = isinstance(a, list | tuple) and len(a) == len(b)
        return alike and all(same(x, y, tolerance) for x, y in zip(a, b))
    if isinstance(b, bool) or isinstance(a, bool) or not isinstance(b, int | float):
        return type(a) is type(b) and a == b
    try:
        return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
    except TypeError:
        return False


def shown(value: Any) -> str:
    """Short form: floats with at most four decimals, so that messages print alike everywhere."""
    if isinstance(value, float):
        return f"{value:.4f}".rstrip("0").rstrip(".")
    if isinstance(value, list | tuple):
        inner = ", ".join(map(shown, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    return repr(value)


def agree(
    name: str, answer: Any, reference: Callable, cases: Iterable[tuple], tolerance: float = 1e-9
) -> Verdict:
    """Compare answer(*case) with reference(*case); the first difference is the message."""
    if not callable(answer):
        return Verdict(False, f"write a function {name}, got {type(answer).__name__}")
    count = 0
    for case in cases:
        count += 1
        call = f"{name}({', '.join(map(shown, case))})"
        got, failure = attempt(answer, *case)
        expected = reference(*copy.deepcopy(case))
        if failure:
            return Verdict(False, f"{call} {failure}; it should be {shown(expected)}")
        if not same(got, expected, tolerance):
            return Verdict(False, f"{call} should be {shown(expected)}, got {shown(got)}")
    return Verdict(True, f"{count} cases agree")
