"""W5, prefix tree: the full blocks that may be shared, each under the block that comes before it in the prompt."""

from tinymoe.core.trace import Event
from tinymoe.lab.frames.pool import KINDS, LOST, NONE, Pool
from tinymoe.lab.frames.view import Events, Frame, count, last_change, letters, paced

__all__ = ["CHANGES", "DECISIONS", "KINDS", "caption", "frame", "moments", "table"]
DECISIONS = frozenset({"hit", "evict"})
CHANGES = frozenset({"hash", "hit", "share", "evict"})


def moments(events: Events, *, every: str = "event", **_) -> list[int]:
    """Every event that reads or changes the index (and each step without any), or with every="step" each step once."""
    return paced(events, every, KINDS, CHANGES)


def frame(events: Events, i: int, *, every: str = "event") -> Frame:
    """The prefix index after event i.

    nodes: [block, parent, number of its salt, depth, lane, owners] in drawing order; parent is NONE at the start of a
    prompt and LOST if it is not in the index; depth counts blocks from the start of the prompt; lane is the row of the
    drawing: a first child stays in its parent's lane. lookup: [seq, blocks, tokens] of the last lookup so far, or [];
    touched: the blocks it found, or the block that just entered, left, or was taken.
    """
    pool = Pool()
    lookup: list[int] = []
    path: list[int] = []
    for event in events[: i + 1]:
        pool.apply(event)
        if event.kind == "hit":
            lookup = [event.seq, event.blocks, event.tokens]
            path = pool.tables.get(event.seq, [])[
                : event.blocks
            ]  # the blocks it found are the head of its table
    last = last_change(events, i, CHANGES)
    owners = pool.owners()
    nodes = [
        [b, parent, salt, depth, lane, sorted(owners.get(b, []))]
        for b, parent, salt, depth, lane in _lanes(pool.nodes)
    ]
    return {
        "event": last.index if last else -1,
        "step": last.step if last else 0,
        "kind": last.kind if last else "",
        "what": _what(last, pool) if last else "the prefix index is empty",
        "nodes": nodes,
        "salts": len({n[2] for n in nodes}),
        "lookup": lookup,
        "touched": path
        if last and last.kind == "hit"
        else [last.block]
        if last and "block" in last.data
        else [],
    }


def _lanes(nodes: dict[int, tuple[int, int, int]]) -> list[tuple[int, int, int, int, int]]:
    """Depth first from each root; a branch opens a new lane below all that came before it."""
    children: dict[int, list[int]] = {}
    for block, (parent, _, _) in nodes.items():
        children.setdefault(parent if parent in nodes else LOST, []).append(block)
    placed: list[tuple[int, int, int, int, int]] = []
    lane = -1
    roots = sorted(children.get(LOST, []), key=lambda b: nodes[b][1])  # stable: by salt, then by age
    stack = [(b, False) for b in reversed(roots)]
    while stack:
        block, continues = stack.pop()
        lane += 0 if continues else 1
        placed.append((block, *nodes[block], lane))
        below = children.get(block, [])
        stack += [(b, k == 0) for k, b in reversed(list(enumerate(below)))]
    return placed


def _what(event: Event, pool: Pool) -> str:
    match event.kind:
        case "step":
            return "nothing enters or leaves the index"
        case "hit" if event.blocks:
            return f"{letters(event.seq)} finds {count(event.blocks, 'block')}: {count(event.tokens, 'token')} saved"
        case "hit":
            return f"{letters(event.seq)} finds nothing to share"
        case "share":
            return f"{letters(event.seq)} takes block {event.block} as its page {event.data['index']}"
        case "evict":
            return f"block {event.block} is dropped from the index, to be used again"
    salt = f", salt {pool.salts[event.salt] + 1}" if len(pool.salts) > 1 else ""
    where = f"under block {event.parent}" if event.parent >= 0 else "as the start of a prompt"
    return f"full block {event.block} enters the index {where}{salt}"


def caption(frame: Frame) -> str:
    owned = sum(bool(n[5]) for n in frame["nodes"])
    salts = f" under {frame['salts']} salts" if frame["salts"] > 1 else ""
    return (
        f"Step {frame['step']}: {frame['what']}. The index holds {count(len(frame['nodes']), 'block')}{salts}: "
        f"{owned} in use, {len(frame['nodes']) - owned} kept without an owner."
    )


def table(frame: Frame) -> list[list]:
    rows: list[list] = [["block", "after block", "depth", "salt", "owners"]]
    for block, parent, salt, depth, _, owners in frame["nodes"]:
        after = "start" if parent == NONE else "not in the index" if parent == LOST else parent
        rows.append([block, after, depth, salt + 1, "+".join(map(letters, owners)) or "none, cached"])
    return rows
