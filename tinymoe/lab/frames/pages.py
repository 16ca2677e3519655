"""W3, page table: every block of the cache, its owners, and the block table of every sequence."""

from tinymoe.core.trace import Event
from tinymoe.lab.frames.pool import KINDS, NONE, Pool
from tinymoe.lab.frames.view import Events, Frame, count, last_change, letters, listed, paced

__all__ = ["CHANGES", "DECISIONS", "KINDS", "caption", "frame", "moments", "table"]
DECISIONS = frozenset({"share", "cow", "evict", "preempt", "undo", "fork"})
CHANGES = frozenset({"fork", "alloc", "share", "cow", "free", "evict", "undo", "preempt", "finish"})


def moments(events: Events, *, every: str = "event", **_) -> list[int]:
    """Every event that changes a page (and each step without any), or with every="step" each step once."""
    return paced(events, every, KINDS, CHANGES)


def frame(
    events: Events,
    i: int,
    *,
    num_blocks: int | None = None,
    block_size: int | None = None,
    every: str = "event",
) -> Frame:
    """The pool after event i.

    num_blocks: size of the pool; None takes the largest block of the recording. block_size: tokens per block, to show
    how full the last block of each table is; None leaves that out.
    """
    pool = Pool()
    for event in events[: i + 1]:
        pool.apply(event)
    total = max(num_blocks or 0, 1 + max((b for e in events for b in _blocks(e)), default=-1))
    owners = pool.owners()
    last = last_change(events, i, CHANGES)
    return {
        "event": last.index if last else -1,
        "step": last.step if last else 0,
        "kind": last.kind if last else "",
        "what": _what(last, owners) if last else "Nothing is in the cache yet.",
        "touched": _blocks(last) if last else [],
        "owners": [sorted(owners.get(b, [])) for b in range(total)],
        "indexed": sorted(pool.nodes),
        "cached": list(pool.cached),
        "free": pool.free(total),
        "tables": [[seq, pool.computed.get(seq, 0), t] for seq, t in sorted(pool.tables.items()) if t],
        "block_size": block_size or 0,
    }


def _blocks(event: Event) -> list[int]:
    """The blocks an event names."""
    return [event.data[f] for f in ("block", "old", "new") if f in event.data]


def _what(event: Event, owners: dict[int, list[int]]) -> str:
    data = event.data
    match event.kind:
        case "step":
            return f"{count(event.used, 'token')} computed, and no page changes hands"
        case "alloc":
            return f"page {data['index']} of {letters(event.seq)} becomes block {event.block}, from the free list"
        case "share":
            others = [letters(s) for s in owners.get(event.block, []) if s != event.seq]
            whom = f"shared with {listed(others)}" if others else "found in the prefix index"
            return f"page {data['index']} of {letters(event.seq)} becomes block {event.block}, {whom}"
        case "cow":
            return f"{letters(event.seq)} writes into shared block {event.old}, so it copies it to block {event.new}"
        case "free":
            kept = "kept in the prefix index" if event.cached else "back on the free list"
            return f"block {event.block} lost its last owner and is {kept}"
        case "evict":
            return f"block {event.block} leaves the prefix index, to be used again"
        case "undo":
            return f"{letters(event.seq)} takes back positions {event.start} to {event.stop - 1}"
        case "preempt":
            return f"{letters(event.seq)} is preempted and gives up {count(event.lost, 'computed token')}"
        case "fork":
            return (
                f"{letters(event.child)} continues the prompt of {letters(event.parent)} and shares its pages"
            )
    return f"{letters(event.seq)} has finished"


def caption(frame: Frame) -> str:
    used = sum(map(bool, frame["owners"]))
    shared = sum(len(o) > 1 for o in frame["owners"])
    return (
        f"Step {frame['step']}: {frame['what'].removesuffix('.')}. {used} of {count(len(frame['owners']), 'block')} owned "
        f"({shared} shared), {len(frame['cached'])} cached, {len(frame['free'])} free."
    )


def table(frame: Frame) -> list[list]:
    """Rows: each sequence with its block table, then the cached and the free blocks."""
    rows: list[list] = [["sequence", "computed tokens", "block table (page 0 first)"]]
    for seq, computed, blocks in frame["tables"]:
        rows.append(
            [letters(seq), computed, " ".join("?" if b == NONE else _entry(frame, b) for b in blocks)]
        )
    rows.append(["cached", "", " ".join(map(str, frame["cached"])) or "none"])
    rows.append(["free", "", " ".join(map(str, frame["free"])) or "none"])
    return rows


def _entry(frame: Frame, block: int) -> str:
    owners = frame["owners"][block]
    return f"{block}({'+'.join(map(letters, owners))})" if len(owners) > 1 else str(block)
