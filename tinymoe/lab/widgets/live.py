"""Stepping a live engine from a widget.

A callback may run on another thread (ipykernel 7.0 to 7.3) or wait for the cell (7.4), so the engine is stepped under a
lock, and playing is an asyncio task that yields between steps, never a loop inside a callback.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from tinymoe.core.trace import Trace
from tinymoe.lab.widgets.esm import Controls

STEPS_PER_SECOND = 8


class Live(Protocol):
    """What a widget needs of an engine; tinymoe.engine.engine.Engine has it."""

    trace: Trace

    def step(self) -> Any: ...

    def has_unfinished_requests(self) -> bool: ...


def engine_of(live: Any) -> Live:
    """The engine itself, also of an LLM. Raises TypeError for what cannot be stepped."""
    engine: Any = live if hasattr(live, "step") else getattr(live, "engine", None)
    if not all(hasattr(engine, name) for name in ("trace", "step", "has_unfinished_requests")):
        raise TypeError(f"live must be an Engine or an LLM, got {type(live).__name__}")
    return engine


class Driver:
    """engine: None in a replay. after: called when the engine has run a step. Listens to the controls' live buttons."""

    def __init__(
        self,
        engine: Live | None,
        lock: AbstractContextManager | None,
        controls: Controls,
        after: Callable[[], None],
    ):
        self._engine, self._controls, self._after = engine, controls, after
        self._lock = lock or getattr(engine, "lock", None) or threading.Lock()
        self._task: asyncio.Task | None = None
        if engine is not None:
            controls.on_msg(lambda widget, content, buffers: self._asked(content))
            controls.observe(lambda change: change["new"] and self.run(), "running")

    def step(self) -> None:
        engine = self._wanted()
        with self._lock:
            if engine.has_unfinished_requests():  # else it would count a step in which nothing runs
                engine.step()
        self._after()

    def run(self) -> asyncio.Task:
        self._wanted()
        if self._task is None or self._task.done():
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                self._controls.running = False
                message = "run() needs a running event loop, as in a notebook; step() works anywhere"
                raise RuntimeError(message) from None
            self._task = loop.create_task(self._play())
            self._controls.running = True
        return self._task

    async def _play(self) -> None:
        engine, loop = self._wanted(), asyncio.get_running_loop()
        try:
            while self._controls.running and engine.has_unfinished_requests():
                begun = loop.time()
                self.step()
                await asyncio.sleep(max(0.005, begun + 1 / STEPS_PER_SECOND - loop.time()))
        except Exception as error:
            self._say(error)
            raise
        finally:
            self._controls.running = False

    def _asked(self, content: dict) -> None:
        if content.get("do") == "step" and not self._controls.running:
            try:
                self.step()
            except Exception as error:
                self._say(error)

    def _say(self, error: Exception) -> None:
        """Show an error where the reader looks: that of a callback or a task would only reach a log."""
        self._controls.caption = f"The engine stopped: {type(error).__name__}: {error}"

    def _wanted(self) -> Live:
        if self._engine is None:
            raise RuntimeError("this widget replays a recording: make it with live=engine to step an engine")
        return self._engine
