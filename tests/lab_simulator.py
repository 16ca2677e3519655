"""A small independent engine without a model: it makes valid traces for the frame tests, and knows the truth.

It shares no code with tinymoe.engine or tinymoe.cache. `truth` is its own state, which frames must reproduce.
"""

import random
from collections import OrderedDict
from dataclasses import dataclass, field

from tinymoe.core.trace import Trace


@dataclass
class Seq:
    seq: int
    request: int
    tokens: list[int]
    prompt: int
    limit: int
    salt: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    children: int = 0

    @property
    def done(self):
        return len(self.tokens) - self.prompt >= self.limit


class Simulator:
    """step(), trace and has_unfinished_requests(), as a live widget wants them."""

    def __init__(
        self,
        seed=0,
        requests=6,
        num_blocks=24,
        block=4,
        budget=12,
        seats=4,
        layers=2,
        experts=8,
        k=2,
        late_free=False,
    ):
        self.r, self.trace = random.Random(seed), Trace()
        self.block, self.budget, self.seats, self.layers, self.experts, self.k = (
            block,
            budget,
            seats,
            layers,
            experts,
            k,
        )
        self.late_free, self.total = late_free, num_blocks
        self.free, self.refs = list(range(num_blocks)), [0] * num_blocks
        self.index, self.key_of, self.cached = {}, {}, OrderedDict()
        self.waiting, self.running, self.made = [], [], 0
        self.history = []  # the truth after each step
        self._todo = [self._request(n) for n in range(requests)]

    def _request(self, number):
        common = [7] * self.block * self.r.randint(0, 3)
        tokens = common + [self.r.randint(0, 99) for _ in range(self.r.randint(1, 9))]
        length = min(len(tokens), self.block * self.total // 3)
        seq = Seq(-1, number, tokens[:length], length, self.r.randint(1, 6), self.r.choice([0, 0, 5]))
        seq.children = self.r.choice([0, 0, 1])
        return seq

    def emit(self, kind, label, **data):
        if self.trace.on:
            self.trace.emit(kind, f"lab_simulator:Simulator.{label}", **data)

    def has_unfinished_requests(self):
        return bool(self._todo or self.waiting or self.running)

    def arrive(self):
        while self._todo:
            seq = self._todo.pop(0)
            seq.seq, self.made = self.made, self.made + 1
            self.waiting.append(seq)
            self.emit(
                "arrive",
                "arrive#arrive",
                request=seq.request,
                seq=seq.seq,
                prompt_tokens=seq.prompt,
                priority=0,
            )
            if self.r.random() < 0.5:
                break

    # pages
    def take(self):
        if self.free:
            return self.free.pop(0)
        if not self.cached:
            return None
        block, _ = self.cached.popitem(last=False)
        self.emit("evict", "take#evict", block=block)
        del self.index[self.key_of.pop(block)]
        return block

    def grow(self, seq, stop):
        while len(seq.blocks) * self.block < stop:
            block = self.take()
            if block is None:
                return False
            self.refs[block] = 1
            self.emit("alloc", "grow#alloc", seq=seq.seq, index=len(seq.blocks), block=block)
            seq.blocks.append(block)
        first = seq.computed // self.block
        old = seq.blocks[first]
        if self.refs[old] > 1:
            new = self.take()
            if new is None:
                return False
            self.refs[old] -= 1
            self.refs[new] = 1
            seq.blocks[first] = new
            self.emit("cow", "grow#cow", seq=seq.seq, index=first, old=old, new=new)
        return True

    def drop(self, seq):
        for block in reversed(seq.blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                kept = block in self.key_of
                if kept:
                    self.cached[block] = None
                else:
                    self.free.insert(0, block)
                self.emit("free", "drop#free", block=block, cached=int(kept))
        seq.blocks = []

    def lookup(self, seq):
        found = []
        for n in range(1, (len(seq.tokens) - 1) // self.block + 1):
            block = self.index.get((seq.salt, tuple(seq.tokens[: n * self.block])))
            if block is None:
                break
            found.append(block)
        for i, block in enumerate(found):
            self.cached.pop(block, None)
            self.refs[block] += 1
            self.emit("share", "lookup#share", seq=seq.seq, index=i, block=block, refs=self.refs[block])
        self.emit("hit", "lookup#hit", seq=seq.seq, blocks=len(found), tokens=len(found) * self.block)
        seq.blocks, seq.computed = found, len(found) * self.block

    def enter(self, seq):
        for n in range(1, seq.computed // self.block + 1):
            key, block = (seq.salt, tuple(seq.tokens[: n * self.block])), seq.blocks[n - 1]
            if key not in self.index:
                self.index[key], self.key_of[block] = block, key
                parent = seq.blocks[n - 2] if n > 1 else -1
                self.emit(
                    "hash",
                    "enter#hash",
                    block=block,
                    parent=parent,
                    key=hash(key) % 2**48,
                    salt=9_000_000_000 - seq.salt,
                )

    # one step
    def preempt(self, seq):
        self.running.remove(seq)
        self.emit("preempt", "preempt#preempt", seq=seq.seq, lost=seq.computed)
        self.drop(seq)
        seq.computed = 0
        self.waiting.insert(0, seq)

    def step(self):
        self.trace.step += 1
        self.arrive()
        left, chunks, hurt = self.budget, [], False
        for seq in list(self.running):
            if seq not in self.running or left == 0:
                continue
            stop = min(len(seq.tokens), seq.computed + left)
            while not self.grow(seq, stop):
                victim = self.running[-1]
                hurt = True
                left += sum(c[2] - c[1] for c in chunks if c[0] is victim)
                chunks = [c for c in chunks if c[0] is not victim]
                self.preempt(victim)
                if victim is seq:
                    break
            else:
                chunks.append((seq, seq.computed, stop))
                left -= stop - seq.computed
        while self.waiting:
            seq = self.waiting[0]
            why = 3 if hurt else 0 if left == 0 else 1 if len(self.running) >= self.seats else -1
            if why < 0 and -(-len(seq.tokens) // self.block) + 1 > len(self.free) + len(self.cached):
                why = 2
            if why >= 0:
                self.emit("wait", "step#wait", seq=seq.seq, why=why)
                break
            self.waiting.pop(0)
            self.lookup(seq)
            stop = min(len(seq.tokens), seq.computed + left)
            assert self.grow(seq, stop)
            cached, tokens = seq.computed, stop - seq.computed
            self.emit("admit", "step#admit", request=seq.request, seq=seq.seq, tokens=tokens, cached=cached)
            self.running.append(seq)
            chunks.append((seq, seq.computed, stop))
            left -= tokens
        for seq, start, stop in chunks:
            self.emit(
                "chunk",
                "step#chunk",
                seq=seq.seq,
                start=start,
                stop=stop,
                samples=int(stop == len(seq.tokens)),
            )
        used, running, waiting = self.budget - left, len(self.running), len(self.waiting)
        self.emit("step", "step#step", budget=self.budget, used=used, running=running, waiting=waiting)
        self.forward(chunks)
        for seq, _, stop in chunks:
            seq.computed = stop
            self.enter(seq)
            if stop == len(seq.tokens):
                self.sample(seq)
        self.history.append(self.truth())

    def forward(self, chunks):
        for layer in range(self.layers):
            for seq, start, stop in chunks:
                for p in range(start, stop):
                    experts = tuple(self.r.sample(range(self.experts), self.k))
                    gates = tuple(sorted((self.r.randint(1, 999) for _ in experts), reverse=True))
                    self.emit(
                        "route",
                        "forward#route",
                        layer=layer,
                        seq=seq.seq,
                        position=p,
                        experts=experts,
                        gates=gates,
                        margin=5000,
                    )

    def sample(self, seq):
        if seq.children and len(self.running) < self.seats:
            child = Seq(
                self.made,
                seq.request,
                list(seq.tokens),
                seq.prompt,
                seq.limit,
                seq.salt,
                list(seq.blocks),
                seq.computed,
            )
            self.made, seq.children = self.made + 1, 0
            for i, block in enumerate(child.blocks):
                self.refs[block] += 1
                self.emit("share", "sample#share", seq=child.seq, index=i, block=block, refs=self.refs[block])
            self.emit("fork", "sample#fork", request=seq.request, parent=seq.seq, child=child.seq)
            self.running.append(child)
            child.tokens.append(self.r.randint(0, 99))
        seq.tokens.append(self.r.randint(0, 99))
        self.emit(
            "sample",
            "sample#sample",
            request=seq.request,
            seq=seq.seq,
            position=len(seq.tokens) - 1,
            token=seq.tokens[-1],
        )
        if seq.done:
            self.running.remove(seq)
            data = {
                "request": seq.request,
                "seq": seq.seq,
                "reason": 1,
                "tokens": len(seq.tokens) - seq.prompt,
            }
            if self.late_free:
                self.emit("finish", "sample#finish", **data)
            self.drop(seq)
            if not self.late_free:
                self.emit("finish", "sample#finish", **data)

    def truth(self):
        return {
            "tables": {s.seq: list(s.blocks) for s in self.running},
            "refs": list(self.refs),
            "cached": list(self.cached),
            "free": list(self.free),
            "index": dict(self.key_of),
        }


def record(steps=400, **options):
    """(recording, simulator) of a run to the end."""
    engine = Simulator(**options)
    events = engine.trace.start()
    while engine.has_unfinished_requests() and steps:
        engine.step()
        steps -= 1
    return events, engine
