"""The frames against the real engine: after every step a picture shows exactly what the engine holds."""

import random

import pytest
import torch

from tinymoe.core.config import EngineConfig
from tinymoe.core.model_config import LayerConfig, ModelConfig, MoEConfig
from tinymoe.core.params import SamplingParams
from tinymoe.core.trace import Recording
from tinymoe.engine.engine import Engine
from tinymoe.lab.frames import why
from tinymoe.lab.widgets.gallery import ExpertLoad, PageTable, PrefixTree, ScheduleChart, TokenFlow
from tinymoe.model.decoder import Decoder

VOCAB = 97


@pytest.fixture
def engine():
    """A random model, and a cache too small for its requests: sharing, copies, evictions and a preemption happen."""
    moe = MoEConfig(num_experts=8, top_k=2, intermediate_size=16)
    config = ModelConfig(
        model_type="qwen3_moe",
        vocab_size=VOCAB,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layers=(LayerConfig(moe=moe), LayerConfig(intermediate_size=24), LayerConfig(moe=moe)),
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model = Decoder(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    limits = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=24, block_size=4, num_blocks=22, max_model_len=80
    )
    return Engine(model, limits)


def submit(engine):
    r = random.Random(0)
    common = [r.randrange(VOCAB) for _ in range(13)]
    for i in range(7):
        prompt = (common if i % 2 else []) + [r.randrange(VOCAB) for _ in range(r.randint(3, 20))]
        params = SamplingParams(
            max_tokens=r.randint(2, 9), temperature=0.0, n=2 if i == 3 else 1, ignore_eos=True
        )
        engine.add_request(f"r{i}", prompt, params, cache_salt="x" if i == 5 else None)


def test_live_widgets_show_what_the_engine_holds(engine):
    makers = (PageTable, PrefixTree, ScheduleChart, ExpertLoad, TokenFlow)
    page_table, tree, chart, load, flow = widgets = [make(live=engine) for make in makers]
    submit(engine)
    before = engine.metrics.computed_tokens
    while engine.has_unfinished_requests():
        page_table.step()
        for w in widgets:
            w.seek(-1)
        pages, pool = page_table.frame, engine.blocks.pool
        held = {
            s.seq_id: [int(b) for b in engine.blocks.tables[s.row][: engine.blocks.lengths[s.row]]]
            for s in engine.scheduler.running
        }
        assert {seq: table for seq, _, table in pages["tables"]} == held
        assert {seq: n for seq, n, _ in pages["tables"]} == {
            s.seq_id: s.num_computed_tokens for s in engine.scheduler.running
        }
        assert [len(owners) for owners in pages["owners"]] == pool.refs.tolist()
        assert pages["free"] + pages["cached"] == pool.free_list()
        assert {n[0] for n in tree.frame["nodes"]} == {b for b in range(22) if b in engine.blocks.prefix}
        assert load.frame["counts"] == engine.routes.load[[0, 2]].tolist()
        column = chart.frame["columns"][-1]
        assert column[2] == engine.metrics.computed_tokens - before
        before = engine.metrics.computed_tokens
        ran = {c[0] for c in column[3] if c[1] in "PD"}
        assert {s.seq_id for s in engine.scheduler.running} - ran <= {
            e.child for e in page_table._source if e.kind == "fork"
        }
        assert len(flow.frame["tokens"]) + flow.frame["left_out"] == column[2]
    kinds = {e.kind for e in page_table._source}
    assert {"share", "cow", "evict", "preempt", "fork", "hit", "hash", "wait"} <= kinds


def test_live_is_replay(engine):
    """A recording of the same requests, through JSON, gives the bundles that the live widgets left."""
    live = [PageTable(live=engine), ScheduleChart(live=engine), PrefixTree(live=engine)]
    submit(engine)
    while engine.has_unfinished_requests():
        live[0].step()
    events = Recording.from_json(live[0]._source.to_json())
    again = [
        PageTable(events, num_blocks=22, block_size=4),
        ScheduleChart(events),
        PrefixTree(events),
    ]
    for a, b in zip(live, again):
        a.seek(-1)
        b.seek(-1)
        assert {k: v for k, v in a._repr_mimebundle_().items() if "widget-view" not in k} == {
            k: v for k, v in b._repr_mimebundle_().items() if "widget-view" not in k
        }


def test_every_decision_of_the_engine_has_its_line(engine):
    with engine.trace.record() as events:
        submit(engine)
        engine.step()
        engine.abort_request("r0")
        while engine.has_unfinished_requests():
            engine.step()
        engine.reset_prefix_cache()
    for src in {e.src for e in events}:
        assert ".py:" in why.source(src), why.source(src)
        assert why.source(src).startswith("tinymoe/")


def test_forgetting_the_prefixes_is_seen(engine):
    w = PageTable(live=engine)
    submit(engine)
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.reset_prefix_cache()
    w.seek(-1)
    assert w.frame["cached"] == []
    assert w.frame["free"] == engine.blocks.pool.free_list()
    assert w.frame["indexed"] == []
