"""What the engine did, as small integer events, and which line of code decided it.

Nothing is built unless somebody listens: call sites read `if trace.on: trace.emit(...)`. Every event carries
`src`, a string "module:qualname#label", which `resolve` turns into a file and a line only when it is shown.
Widgets, notebooks, replays and many tests read these events; nothing is drawn that is not in them.
"""

import importlib
import inspect
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

SCHEMA = 1

# kind -> fields, in order. All are ints, except experts and gates of a route (tuples of ints).
FIELDS: dict[str, tuple[str, ...]] = {
    # scheduler
    "arrive": ("request", "seq", "prompt_tokens", "priority"),  # a request joined the waiting line
    "step": ("budget", "used", "running", "waiting"),  # one engine step was scheduled (its last event)
    "admit": (
        "request",
        "seq",
        "tokens",
        "cached",
    ),  # waiting -> running; cached: tokens found in the prefix index
    "chunk": (
        "seq",
        "start",
        "stop",
        "samples",
    ),  # positions start..stop-1 run now; samples: 1 if a token follows
    "wait": (
        "seq",
        "why",
    ),  # looked at, but stays in the waiting line: 0 no token budget, 1 no seat, 2 no pages, 3 preempted in this step, 4 prefix on its way
    "preempt": ("seq", "lost"),  # running -> waiting; lost: computed tokens given up
    "fork": ("request", "parent", "child"),  # n > 1: child shares every page of the parent
    "finish": ("request", "seq", "reason", "tokens"),  # reason: index into FINISH_REASONS; tokens: generated
    # pages (blocks)
    "alloc": (
        "seq",
        "index",
        "block",
    ),  # entry `index` of seq's block table := block, taken from the free list
    "share": (
        "seq",
        "index",
        "block",
        "refs",
    ),  # entry := a block that others own too or that was cached; refs after
    "cow": ("seq", "index", "old", "new"),  # copy-on-write: seq writes, so it leaves `old` to the others
    "free": ("block", "cached"),  # last owner gone; cached 1: kept in the prefix index until evicted
    "evict": ("block",),  # a cached block is reused: its prefix index entry is dropped
    "hash": (
        "block",
        "parent",
        "key",
        "salt",
    ),  # full block enters the prefix index; parent block or -1; key: 48 bits of its hash
    "hit": ("seq", "blocks", "tokens"),  # prefix lookup result (0 blocks: a miss)
    "undo": ("seq", "start", "stop"),  # uncommitted tokens start..stop-1 were rolled back
    # model
    "route": (
        "layer",
        "seq",
        "position",
        "experts",
        "gates",
        "margin",
    ),  # gates in 1/1000, margin in 1e-6 (see below)
    "kernel": (
        "layer",
        "path",
        "tokens",
        "experts",
    ),  # expert path (index into PATHS), distinct experts touched
    "sample": ("request", "seq", "position", "token"),  # token chosen for `position`
    # speculation: chances in 1e-6, of the draft (q) and of the model (p); of a greedy choice those at temperature 1
    "draft": ("seq", "position", "token", "q"),  # token proposed for `position`
    "verify": (
        "seq",
        "position",
        "token",
        "p",
        "q",
        "accepted",
    ),  # 1: it stays; after a 0 the others are not looked at
}
FINISH_REASONS = ("stop", "length", "abort", "error")
WAIT_REASONS = (
    "no token budget",
    "no seat (max_num_seqs)",
    "no pages",
    "a request was preempted in this step",
    "its prefix is being computed by another request in this step",
)
PATHS = ("loop", "gather", "grouped", "masked", "blocked", "padded", "fused")
# route.margin: gap between the last chosen and the first rejected expert's score; below 1000 (1e-3) the choice may
# differ between machines in the last bit, so comparisons skip such events.


class Event(NamedTuple):
    """One event: running number, engine step, kind, who decided (src), and the fields of FIELDS[kind]."""

    index: int
    step: int
    kind: str
    src: str
    data: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(
                f"event {self.kind!r} has no field {name!r}; it has {FIELDS[self.kind]}"
            ) from None

    def to_json(self) -> list:
        return [self.step, self.kind, self.src, *(_plain(self.data[f]) for f in FIELDS[self.kind])]


def _plain(value):
    return list(value) if isinstance(value, tuple) else value


class Recording(list[Event]):
    """A list of events, with its JSON form for replays."""

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, "events": [e.to_json() for e in self]}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Recording":
        """Raises ValueError for another schema, an unknown kind, or a wrong number of fields."""
        body = json.loads(text)
        if body.get("schema") != SCHEMA:
            raise ValueError(
                f"trace schema {SCHEMA} wanted, got {body.get('schema')!r}: record the trace again"
            )
        events = cls()
        for i, (step, kind, src, *values) in enumerate(body["events"]):
            if kind not in FIELDS or len(values) != len(FIELDS[kind]):
                raise ValueError(
                    f"event {i}: kind {kind!r} with {len(values)} fields; known: {sorted(FIELDS)}"
                )
            data = {f: tuple(v) if isinstance(v, list) else v for f, v in zip(FIELDS[kind], values)}
            events.append(Event(i, step, kind, src, data))
        return events

    def of(self, *kinds: str) -> "Recording":
        """The events of these kinds, in order."""
        return Recording(e for e in self if e.kind in kinds)

    def steps(self) -> Iterator[tuple[int, "Recording"]]:
        """(step number, its events) in order."""
        step, batch = None, Recording()
        for event in self:
            if event.step != step and batch:
                yield batch[0].step, batch
                batch = Recording()
            step = event.step
            batch.append(event)
        if batch:
            yield batch[0].step, batch


class Trace:
    """The engine's event outlet. `on` is False until somebody listens; `step` is set by the engine."""

    def __init__(self):
        self.on = False
        self.step = 0
        self._listeners: list[Recording] = []

    def emit(self, kind: str, src: str, **data: Any) -> None:
        """Append one event to every listener. Call only when `on`."""
        if kind not in FIELDS:
            raise ValueError(f"event kind {kind!r} is not known; known: {sorted(FIELDS)}")
        if data.keys() != set(FIELDS[kind]):
            raise ValueError(f"event {kind!r} has fields {FIELDS[kind]}, got {tuple(data)}")
        for recording in self._listeners:
            recording.append(Event(len(recording), self.step, kind, src, data))

    def start(self) -> Recording:
        """Listen from now on; stop with `stop(recording)`."""
        recording = Recording()
        self._listeners.append(recording)
        self.on = True
        return recording

    def stop(self, recording: Recording) -> None:
        self._listeners = [r for r in self._listeners if r is not recording]
        self.on = bool(self._listeners)

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """`with trace.record() as events:` collects every event of the block."""
        recording = self.start()
        try:
            yield recording
        finally:
            self.stop(recording)


class SourceLine(NamedTuple):
    """Where an event's `src` points today."""

    file: Path
    line: int
    text: str


def resolve(src: str) -> SourceLine:
    """The line that carries `#label` inside the function that `src` names.

    Raises LookupError if the module, the function or the label is gone.
    """
    try:
        module_name, rest = src.split(":")
        qualname, label = rest.split("#")
        thing: Any = importlib.import_module(module_name)
        for part in qualname.split("."):
            thing = getattr(thing, part)
        lines, first = inspect.getsourcelines(thing)
    except (ValueError, ImportError, AttributeError, OSError, TypeError) as error:
        raise LookupError(f"event source {src!r} does not resolve: {error}") from error
    for offset, text in enumerate(lines):
        if f"#{label}" in text:
            return SourceLine(Path(inspect.getsourcefile(thing) or ""), first + offset, text.strip())
    raise LookupError(f"event source {src!r}: no line with '#{label}' in {qualname}")


def same_decisions(a: Iterable[Event], b: Iterable[Event], min_margin: int = 1000) -> bool:
    """Whether two traces agree: every event equal, routes only where both margins reach `min_margin`."""
    xs, ys = list(a), list(b)
    if len(xs) != len(ys):
        return False
    for x, y in zip(xs, ys):
        if (x.step, x.kind) != (y.step, y.kind):
            return False
        if x.kind == "route":
            if (x.layer, x.seq, x.position) != (y.layer, y.seq, y.position):
                return False
            # As sets: the margin is that of the last chosen one, and says nothing about the order of the others.
            if min(x.margin, y.margin) >= min_margin and set(x.experts) != set(y.experts):
                return False
        elif x.data != y.data:
            return False
    return True
