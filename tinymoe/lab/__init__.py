"""The lab: live pictures of the engine, lessons with checked exercises, and the tools that keep notebooks in order.

The public names are found on first use, so that what needs no widgets (tinymoe.lab.terminal, tinymoe.lab.frames) works
without the extra `lab`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinymoe.lab.lesson import Lesson
    from tinymoe.lab.widgets.gallery import (
        DraftRibbon,
        ExpertLoad,
        PageTable,
        PrefixTree,
        ScheduleChart,
        Strip,
        TokenFlow,
    )
    from tinymoe.lab.widgets.predict import Predict

__all__ = [
    "DraftRibbon",
    "ExpertLoad",
    "Lesson",
    "PageTable",
    "Predict",
    "PrefixTree",
    "ScheduleChart",
    "Strip",
    "TokenFlow",
]

_HOME = {"Lesson": "tinymoe.lab.lesson", "Predict": "tinymoe.lab.widgets.predict"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME.get(name, "tinymoe.lab.widgets.gallery")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
