"""Exercises on pages and prefixes."""

import random
from collections.abc import Sequence

from tinymoe.core.trace import Event
from tinymoe.lab.exercises.judge import Verdict, agree, attempt, shown
from tinymoe.lab.frames import pages
from tinymoe.lab.frames.view import letters, listed


class _Pool:
    """The reference of 09.1: a stack of free blocks and a count of owners."""

    def __init__(self, num_blocks: int):
        self.stack = list(range(num_blocks))[::-1]
        self.owners = [0] * num_blocks

    def alloc(self) -> int | None:
        if not self.stack:
            return None
        block = self.stack.pop()
        self.owners[block] = 1
        return block

    def share(self, block: int) -> int:
        self.owners[block] += 1
        return self.owners[block]

    def free(self, block: int) -> bool:
        self.owners[block] -= 1
        if self.owners[block] == 0:
            self.stack.append(block)
        return self.owners[block] == 0


def pool(answer) -> Verdict:
    """09.1: a class Pool(num_blocks). alloc() -> a block with one owner, the last one freed, or else the lowest never
    used; None if there is none. share(block) -> owners after one more joins. free(block) -> whether the block is free now.
    """
    if not callable(answer):
        return Verdict(False, f"write a class Pool, got {type(answer).__name__}")
    r = random.Random(9)
    games = 50
    for game in range(games):
        size = r.randint(1, 2 + game // 4)
        done = [f"Pool({size})"]
        mine, failure = attempt(answer, size)
        if failure:
            return Verdict(False, f"{done[0]} {failure}")
        truth = _Pool(size)
        for _ in range(3 + game):  # short games first, so that a counter-example is short
            owned = [b for b in range(size) if truth.owners[b]]
            name = r.choice(["alloc", "alloc", "share", "free", "free"]) if owned else "alloc"
            args = () if name == "alloc" else (r.choice(owned),)
            call = f"{name}({', '.join(map(str, args))})"
            expected = getattr(truth, name)(*args)
            if not hasattr(mine, name):
                return Verdict(False, f"Pool has no method {name}")
            got, failure = attempt(getattr(mine, name), *args)
            if failure or type(got) is not type(expected) or got != expected:
                what = failure or f"gave {shown(got)}"
                return Verdict(
                    False, f"{', '.join(done)}, then {call} should give {shown(expected)}, but {what}"
                )
            done.append(f"{call} gave {shown(expected)}")
    return Verdict(True, f"{games} random games agree")


def next_block(answer, events: Sequence[Event], at: int) -> Verdict:
    """09.2: the block that the next `alloc` after events[at] hands out. The trace is the key."""
    coming = next((e for e in events[at + 1 :] if e.kind == "alloc"), None)
    if coming is None:
        raise ValueError(f"no alloc event follows event {at}: choose an earlier moment")
    if not isinstance(answer, int) or isinstance(answer, bool):
        return Verdict(False, f"a block number is wanted, got {shown(answer)}")
    if answer == coming.block:
        return Verdict(True, f"page {coming.data['index']} of {letters(coming.seq)} becomes block {answer}")
    frame = pages.frame(events, at)
    owners = frame["owners"][answer] if 0 <= answer < len(frame["owners"]) else []
    if owners:
        return Verdict(
            False, f"block {answer} is owned by {listed([letters(s) for s in owners])} at that moment"
        )
    if answer in frame["cached"] and frame["free"]:
        return Verdict(False, f"block {answer} is cached: it is taken only when no free block is left")
    return Verdict(False, f"block {answer} is not first in line: the block freed last goes first")


def hit_tokens(answer) -> Verdict:
    """10.1: hit_tokens(cached, salt, prompt, block_size) -> tokens of `prompt` that need not run.

    cached: (salt, tokens) of earlier prompts. Only full blocks count, each together with all tokens before it, only
    under the same salt, and the last token of the prompt must run, since its logits are needed.
    """

    def reference(cached: list, salt: str, prompt: list[int], block_size: int) -> int:
        known = {
            (s, tuple(tokens[:end]))
            for s, tokens in cached
            for end in range(block_size, len(tokens) + 1, block_size)
        }
        hits = 0
        while (hits + 1) * block_size < len(prompt) and (
            salt,
            tuple(prompt[: (hits + 1) * block_size]),
        ) in known:
            hits += 1
        return hits * block_size

    r = random.Random(10)
    cases: list[tuple] = [
        ([("", [1, 2, 3, 4])], "", [1, 2, 3, 4], 2),  # the last token must run
        ([("", [1, 2, 3])], "", [1, 2, 3, 9], 2),  # half a block does not count
        ([("", [8, 8, 3, 4])], "", [1, 2, 3, 4, 5], 2),  # a block counts only with what precedes it
        ([("x", [1, 2, 3, 4])], "y", [1, 2, 3, 4, 5], 2),  # another salt
    ]
    while len(cases) < 50:
        stem = [r.randint(0, 2) for _ in range(r.randint(1, 10))]
        grown = [
            stem[: r.randint(0, len(stem))] + [r.randint(0, 2) for _ in range(r.randint(0, 4))]
            for _ in range(3)
        ]
        cached = [(r.choice("xy"), tokens) for tokens in grown[:2]]
        cases.append((cached, r.choice("xy"), grown[2] or stem, r.randint(1, 3)))
    return agree("hit_tokens", answer, reference, cases)
