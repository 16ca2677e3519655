"""A stand-in for captured graphs on a CPU: replays, from the same fixed buffers filled by the same code, what a CUDA graph
replays on a GPU, with garbage where a bucket has rows to spare. Everything but the capture itself is tried with it.
"""

import random
from functools import partial
from types import SimpleNamespace

import torch
from tiny_models import GREEDY, alone, cases, finish, seeded, tokens_of

from tinymoe import ops
from tinymoe.engine.engine import Engine
from tinymoe.engine.forward.graphs import DecodeGraphs, Graph
from tinymoe.engine.forward.passes import DraftGraphs
from tinymoe.engine.forward.runner import PagedAttend
from tinymoe.engine.spec.speculator import Speculator

BUCKETS = (1, 2, 5, 24)


class Attend(PagedAttend):
    """Slot -1 stores nothing, as with the GPU's kernels."""

    def __call__(self, layer, q_TNH, k_TGH, v_TGH):
        stored = self.slots >= 0
        self.storage.write(layer, self.slots[stored], k_TGH[stored], v_TGH[stored])
        return self.stored(layer, q_TNH)


class Replayed(DecodeGraphs):
    """DecodeGraphs whose graphs are functions. owner: the Runner or ModelDrafter whose model runs."""

    def __init__(self, owner, width: int, buckets: list[int], *passes: int):
        super().__init__(lambda *_: (torch.zeros(0), None), buckets, width, torch.device("cpu"), *passes)
        self.owner, self.recorder = owner, getattr(owner, "recorder", None)
        self.launched = self.followed = 0
        config = owner.model.config
        K = max((layer.moe.top_k for layer in config.layers if layer.moe), default=0)
        L = sum(layer.moe is not None for layer in config.layers) if self.recorder is not None else 0
        for bucket in buckets:
            logits = torch.zeros(bucket, config.vocab_size)
            drawn = torch.zeros(2, bucket, dtype=torch.float64)
            ids_LTK = torch.zeros(L, bucket, K, dtype=torch.int64) if L else None
            self.graphs[bucket] = Graph(
                lambda bucket=bucket, out=(logits, drawn, ids_LTK): self._replay(bucket, *out),
                logits, drawn, ids_LTK,
            )  # fmt: skip

    @torch.inference_mode()
    def _replay(self, bucket, logits, drawn, ids_LTK):
        x, owner, sink = self.inputs, self.owner, self.recorder
        n = int(x.num_valid[0])
        assert (x.slots[n:bucket] == -1).all()
        assert (x.context_lens[n:bucket] == 0).all()
        size = owner.storage.block_size
        spans = [(i, i + 1, int(x.context_lens[i]), x.tables[i].numpy()) for i in range(n)]
        spans = [(a, b, c, table[: -(-c // size)]) for a, b, c, table in spans]
        plans = {window: ops.plan_attention(spans, size, window) for window in set(owner.windows)}
        slots = x.slots[:n].long()
        if sink is not None:
            sink.begin(slots)
        attend = Attend(slots, plans, owner.storage, owner.windows)
        logits.fill_(torch.nan)
        logits[:n] = owner.model(x.token_ids[:n].long(), x.positions[:n].long(), attend, sink)
        if ids_LTK is not None and sink is not None:
            ids_LTK.fill_(-1)
            ids_LTK[:, :n] = sink.stacked()
        ids, best = ops.sample(logits[:n], x.temperature[:n], x.seeds[:n], x.next_positions[:n].long())
        drawn.fill_(torch.nan)
        drawn[:, :n] = torch.stack((ids.double(), best.double()))

    def start(self, staged, rows, tables):
        self.launched += 1
        self.followed += rows.token_ids is None and rows.source is None
        return super().start(staged, rows, tables)

    def mark(self):
        return SimpleNamespace(synchronize=lambda: None)


class ReplayedPasses(Replayed, DraftGraphs):
    """DraftGraphs, likewise."""

    def __init__(self, owner, width: int, buckets: list[int], passes: int):
        super().__init__(owner, width, buckets, passes)
        self.further = {bucket: partial(self._go_on, bucket) for bucket in buckets}

    @torch.inference_mode()
    def _replay(self, bucket, logits, drawn, ids_LTK):
        self.told[0, :bucket].copy_(self.inputs.token_ids[:bucket])
        self.inputs.turn.zero_()
        super()._replay(bucket, logits, drawn, ids_LTK)
        self.note(bucket, drawn.nan_to_num())

    @torch.inference_mode()
    def _go_on(self, bucket):
        x = self.inputs
        self.advance()
        x.num_valid[0] = int((x.context_lens[:bucket] > 0).sum())
        drawn = torch.zeros(2, bucket, dtype=torch.float64)
        logits = torch.zeros(bucket, self.owner.model.config.vocab_size)
        super()._replay(bucket, logits, drawn, None)
        self.followed += 1
        self.note(bucket, drawn.nan_to_num())


def with_graphs(one: Engine, buckets=BUCKETS) -> Engine:
    """Give an engine, and its draft model, graphs that are replayed here."""
    width = one.blocks.tables.shape[1]
    one.runner.graphs = Replayed(one.runner, width, list(buckets))
    if isinstance(one.spec, Speculator) and one.spec.proposer.drafter is not None:
        drafter = one.spec.proposer.drafter
        drafter.graphs = ReplayedPasses(drafter, width, list(buckets), one.spec.most)
    return one


def check_any_order(one: Engine, name: str, r: random.Random, depths: tuple = (None,)) -> None:
    """What a request gets depends on nothing but itself: requests of many kinds come, run for some steps and are aborted, and
    all that are left get the plain loop's tokens. Afterwards every page is free."""
    out, wanted, aborted = {}, {}, set()
    for n in range(10):
        i = r.randrange(len(cases(name)))
        kind, depth = r.choice(["greedy", "seeded", "logprobs"]), r.choice(depths)
        params = {"greedy": GREEDY, "seeded": seeded(i), "logprobs": GREEDY.clone(logprobs=1)}[kind]
        one.add_request(str(n), cases(name)[i].prompt, params.clone(num_speculative_tokens=depth))
        wanted[str(n)] = alone(name, i, i) if kind == "seeded" else cases(name)[i].answer
        for _ in range(r.randrange(4)):
            out |= {o.request_id: o for o in one.step()}
        if r.random() < 0.25:
            victim = str(r.randrange(n + 1))
            if one.abort_request(victim) is not None:
                aborted.add(victim)
    out |= finish(one)
    for key, answer in wanted.items():
        if key not in aborted:
            assert tokens_of(out[key]) == [answer], key
    assert one.blocks.pool.num_free == one.blocks.pool.num_blocks
    assert not one.blocks.pool.refs.any()
