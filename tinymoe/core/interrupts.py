"""Bookkeeping that nothing may come into: Ctrl-C waits until it is over, and so do finalisers.

Python raises KeyboardInterrupt between any two bytecodes of the main thread. In the midst of bookkeeping that would leave
half of it done (a page taken but in no table), and no `except` can tell which half. So the signal is held back there.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class Section:
    """`with section:` runs a block that SIGINT does not interrupt; a signal that came is handled when the block ends.

    May be entered again inside itself. Only the main thread handles signals, so elsewhere nothing is held back, nor where
    SIGINT has no handler written in Python. `interruptible()` opens a part of the block to the signal again.
    """

    def __init__(self):
        self._depth = 0
        self._open = False
        self._caught = False
        self._before: Callable[[int, FrameType | None], object] | None = None
        self._later: list[Callable[[], object]] = []

    def __enter__(self) -> "Section":
        if self._depth == 0 and threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._before, self._caught, self._open = handler, False, False
                signal.signal(signal.SIGINT, self._hold)
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            while self._depth == 1 and self._later:
                self._later.pop(0)()
        finally:
            self._depth -= 1
            before = self._before
            if self._depth == 0 and before is not None:
                self._before = None
                signal.signal(signal.SIGINT, before)
                if self._caught and kind is not KeyboardInterrupt:
                    before(signal.SIGINT, None)

    @contextmanager
    def interruptible(self, allowed: bool = True) -> Iterator[None]:
        """Inside the section: SIGINT is handled at once again, one that waits at once. The block must leave nothing half
        done, or the code around it must undo it; a second signal during that waits for the section's end. allowed=False
        changes nothing."""
        self._open = allowed and self._before is not None and self._depth == 1
        try:
            if self._open and self._caught:
                self._caught = False
                self._pass_on(signal.SIGINT, None)
            yield
        finally:
            self._open = False

    def after(self, action: Callable[[], object]) -> None:
        """Run `action` now, or at the end of the section if one is being executed: for finalisers, which the garbage
        collector may call in the midst of it."""
        if self._depth:
            self._later.append(action)
        else:
            with self:
                action()

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._open:
            self._pass_on(number, frame)
        else:
            self._caught = True

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._open = False  # first: what the handler raises is cleaned up behind a closed door
        if self._before is not None:
            self._before(number, frame)
        self._open = True  # a handler that only takes note
