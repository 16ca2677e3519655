"""Why it happened: the rule behind an event, in words, and the line of code that applied it.

The line is looked up only when somebody asks, so an edit of the engine changes no stored notebook.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tinymoe.core.trace import FINISH_REASONS, PATHS, WAIT_REASONS, Event, resolve
from tinymoe.lab.frames.view import count, letters


def _percent(millionths: int) -> str:
    """One decimal; of less than 1 %, two digits that count."""
    return f"{millionths / 1e4:.1f}" if millionths >= 10**4 else f"{millionths / 1e4:.2g}"


_RULES: dict[str, Callable[[Event], str]] = {
    "arrive": lambda e: (
        f"{letters(e.seq)} joins the waiting line with {count(e.prompt_tokens, 'prompt token')}."
    ),
    "step": lambda e: (
        f"The step is full or nobody is left: {e.used} of {count(e.budget, 'token')} are given out."
    ),
    "admit": lambda e: (
        f"{letters(e.seq)} is first in line, and a seat, pages and budget are there for its {count(e.tokens, 'token')}"
        + (f"; {e.cached} of them were found in the prefix index." if e.cached else ".")
    ),
    "chunk": lambda e: (
        f"{letters(e.seq)} catches up: positions {e.start} to {e.stop - 1} run"
        + (", and the last of them yields a token." if e.samples else ", the rest of the prompt must wait.")
    ),
    "wait": lambda e: f"{letters(e.seq)} stays in line: {WAIT_REASONS[e.why]}.",
    "preempt": lambda e: (
        f"No page is left, and {letters(e.seq)} is last in turn: it gives up its pages "
        f"and will compute {count(e.lost, 'token')} again."
    ),
    "fork": lambda e: (
        f"{letters(e.child)} has the same prompt as {letters(e.parent)}, so it shares its pages."
    ),
    "finish": lambda e: (
        f"{letters(e.seq)} ends after {count(e.tokens, 'token')}: {FINISH_REASONS[e.reason]}."
    ),
    "alloc": lambda e: (
        f"{letters(e.seq)} needs room for page {e.data['index']}: block {e.block} is next on the free list."
    ),
    "share": lambda e: (
        f"Block {e.block} already holds what page {e.data['index']} of {letters(e.seq)} needs; "
        f"it has {count(e.refs, 'owner')} now."
    ),
    "cow": lambda e: (
        f"{letters(e.seq)} must not write into block {e.old}, which others read: it writes into a copy, {e.new}."
    ),
    "free": lambda e: (
        f"The last owner of block {e.block} left"
        + (
            "; its content stays in the prefix index until the room is needed."
            if e.cached
            else ", and nobody can find its content."
        )
    ),
    "evict": lambda e: f"The free list is empty, and block {e.block} has waited longest in the prefix index.",
    "hash": lambda e: (
        f"Block {e.block} is full, so its content will not change: it may be shared under the key of all tokens up to its end."
    ),
    "hit": lambda e: (
        f"The index knows the first {count(e.blocks, 'block')} of {letters(e.seq)}: {count(e.tokens, 'token')} need not run."
        if e.blocks
        else f"The first block of {letters(e.seq)} is unknown to the index, or under another salt: all of it must run."
    ),
    "undo": lambda e: f"Positions {e.start} to {e.stop - 1} of {letters(e.seq)} were tried and not kept.",
    "route": lambda e: (
        f"Layer {e.layer} scores all experts for position {e.position} of {letters(e.seq)} and keeps the best {len(e.experts)}: "
        f"{', '.join(f'{x} ({g / 10:.1f} %)' for x, g in zip(e.experts, e.gates))}."
    ),
    "kernel": lambda e: (
        f"Layer {e.layer} has {count(e.tokens, 'token')} on {count(e.experts, 'expert')}: path {PATHS[e.path]!r} is taken."
    ),
    "sample": lambda e: f"{letters(e.seq)} chooses token {e.token} for position {e.position}.",
    "draft": lambda e: (
        f"The draft proposes token {e.token} for position {e.position} of {letters(e.seq)}: to it, this has a chance of "
        f"{_percent(e.q)} %."
    ),
    "verify": lambda e: (
        f"The model gives token {e.token} at position {e.position} of {letters(e.seq)} a chance of {_percent(e.p)} %, the draft "
        f"{_percent(e.q)} %: it " + ("stays." if e.accepted else "goes, and so do all drafts behind it.")
    ),
}


class Reason(NamedTuple):
    """One event in words; src is what `source` resolves."""

    words: str
    src: str


def reason(event: Event) -> Reason:
    return Reason(_RULES[event.kind](event), event.src)


def source(src: str) -> str:
    """`tinymoe/engine/scheduler.py:88  the line`, or why it cannot be shown. The path is that of the module."""
    try:
        found = resolve(src)
    except LookupError as error:
        return str(error)
    folder = src.split(":")[0].replace(".", "/")
    name = f"{folder}/{found.file.name}" if found.file.name == "__init__.py" else f"{folder}.py"
    return f"{name}:{found.line}  {found.text}"


def explain(events: Iterable[Event], *, seq: int | None = None, block: int | None = None) -> list[Reason]:
    """The reasons of these events, of those alone that name the sequence or the block if one is given."""
    return [
        reason(e)
        for e in events
        if (seq is None or _names_seq(e, seq)) and (block is None or _names_block(e, block))
    ]


def _names_seq(event: Event, seq: int) -> bool:
    return seq in (
        event.data.get("seq"),
        event.data.get("parent") if event.kind == "fork" else None,
        event.data.get("child"),
    )


def _names_block(event: Event, block: int) -> bool:
    return block in (event.data.get("block"), event.data.get("old"), event.data.get("new"))
