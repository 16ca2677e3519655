"""The trace tells the truth: events alone rebuild the pages, every src resolves, and a replay is the run."""

import ast
import math
import random
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import torch
from tiny_models import CONFIGS, GREEDY, build, cases, engine, finish, model, seeded, tokens_of

import tinymoe
from tinymoe.core.sequence import Status
from tinymoe.core.trace import (
    FIELDS,
    FINISH_REASONS,
    PATHS,
    WAIT_REASONS,
    Event,
    Recording,
    Trace,
    resolve,
    same_decisions,
)

# A busy life: every kind of event


class Broken(Exception):
    pass


def life(seed, after_step=lambda one, events: None):
    """Few pages, forks, salts, priorities, aborts, steps that die, forgotten prefixes. Returns (events, outputs, engine)."""
    r = random.Random(seed)
    decoder = model("mixed")
    one = engine(
        decoder,
        block_size=3,
        num_blocks=22,
        max_num_batched_tokens=14,
        max_num_seqs=5,
        policy="priority",
        eos=[7],
    )
    events, out, made = one.trace.start(), {}, 0
    write = one.runner.storage.write

    def fail(*args):
        raise Broken

    while made < 16 or one.has_unfinished_requests():
        while made < 16 and (r.random() < 0.5 or not one.has_unfinished_requests()):
            prompt = r.choice(cases("mixed")).prompt[: r.randint(1, 40)] + [
                r.randrange(61) for _ in range(r.randint(0, 3))
            ]
            params = seeded(made, n=r.choice([1, 1, 3]), max_tokens=r.randint(1, 12), stop_token_ids=[8])
            salt = r.choice([None, None, "tenant"])
            one.add_request(str(made), prompt, params, priority=r.randint(0, 2), cache_salt=salt)
            made += 1
        one.runner.storage.write = fail if r.random() < 0.15 else write
        with suppress(Broken):
            out |= {o.request_id: o for o in one.step()}
        if r.random() < 0.02:
            one.abort_request(str(r.randrange(made)))
        if not one.scheduler.running:
            one.reset_prefix_cache()
        after_step(one, events)
    return events, out, one


@cache
def busy():
    """Events of several lives and of a request that ends with an error."""
    recordings = [life(seed)[0] for seed in range(3)]
    decoder = build("dense")
    with torch.no_grad():
        decoder.embed.weight[60] = math.nan
    one = engine(decoder)
    with one.trace.record() as events:
        one.add_request("bad", [60], GREEDY)
        finish(one)
    recordings.append(events)
    one = engine("moe", max_num_batched_tokens=16, block_size=4)
    with one.trace.record() as events:
        for i in range(3):
            one.add_request(str(i), cases("moe")[6].prompt, GREEDY)
        finish(one)
    recordings.append(events)
    one = engine("moe", speculative_config={"method": "self", "num_speculative_tokens": 3, "adaptive": False})
    with one.trace.record() as events:
        one.add_request("guessed", cases("moe")[2].prompt, GREEDY)
        one.add_request("drawn", cases("moe")[3].prompt, seeded(1))
        finish(one)
    return [*recordings, events]


def test_every_kind_and_every_reason_occurs():
    events = [e for recording in busy() for e in recording]
    assert {e.kind for e in events} == set(FIELDS)
    assert {FINISH_REASONS[e.reason] for e in events if e.kind == "finish"} == set(FINISH_REASONS)
    assert {e.why for e in events if e.kind == "wait"} == set(range(len(WAIT_REASONS)))
    assert {e.data["cached"] for e in events if e.kind == "free"} == {0, 1}
    assert any(e.src.endswith("undo#own-copy-given-up") for e in events)
    assert {PATHS[e.path] for e in events if e.kind == "kernel"} == {"loop", "padded"}


def test_fields_are_whole_numbers_or_tuples_of_them():
    for recording in busy():
        for e in recording:
            assert set(e.data) == set(FIELDS[e.kind])
            for name, value in e.data.items():
                if e.kind == "route" and name in ("experts", "gates"):
                    assert type(value) is tuple
                    assert all(type(i) is int for i in value)
                else:
                    assert type(value) is int, (e.kind, name)


def test_every_src_resolves_to_the_line_that_names_it():
    sources = {e.src for recording in busy() for e in recording}
    assert len(sources) > 20
    for src in sources:
        where, label = resolve(src), src.split("#")[1]
        text = where.file.read_text().splitlines()[where.line - 1]
        assert text.strip() == where.text
        assert f"#{label}" in where.text
        assert innermost_function(where.file, where.line) == src.split(":")[1].split("#")[0]


def innermost_function(path, line):
    """Qualified name, found in the syntax tree."""
    found = []

    def visit(node, names):
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            if named and child.lineno <= line <= child.end_lineno:
                found.append([*names, child.name])
                visit(child, [*names, child.name])
            elif not named:
                visit(child, names)

    visit(ast.parse(Path(path).read_text()), [])
    return ".".join(max(found, key=len))


def test_every_src_in_the_code_resolves_also_those_that_seldom_occur():
    root = Path(tinymoe.__file__).parent
    found = 0
    for folder in ("cache", "engine", "core", "experts", "model"):
        for path in (root / folder).rglob("*.py"):
            module = ".".join(("tinymoe", *path.relative_to(root).with_suffix("").parts))
            for name in re.findall(r'\{__name__\}:([\w.]+#[\w-]+)"', path.read_text()):
                assert resolve(f"{module}:{name}").file == path
                found += 1
    assert found >= 25


@pytest.mark.parametrize(
    "src",
    [
        "tinymoe.core.trace:Trace.emit#gone",
        "tinymoe.core.trace:Trace.gone#x",
        "tinymoe.gone:f#x",
        "nonsense",
        "a:b",
        "tinymoe.core.trace:FIELDS#x",
    ],
)
def test_a_src_that_is_gone_says_so(src):
    with pytest.raises(LookupError, match=re.escape(repr(src))):
        resolve(src)


# Replay


class Replay:
    """Tables, owners and both free lists from nothing but events."""

    def __init__(self, total):
        self.blank, self.cached, self.indexed = list(range(total))[::-1], [], {}
        self.tables: dict[int, list] = {}
        self.computed: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}

    def owners(self, block):
        return sum(table.count(block) for table in self.tables.values())

    def apply(self, e):
        getattr(self, f"on_{e.kind}", lambda e: None)(e)

    def enter(self, seq, index, block):
        table = self.tables.setdefault(seq, [])
        assert 0 <= index <= len(table)
        table[index:] = [block, *table[index + 1 :]]

    def on_alloc(self, e):
        assert self.blank.pop() == e.block
        self.enter(e.seq, e.data["index"], e.block)

    def on_cow(self, e):
        assert self.blank.pop() == e.new
        assert self.tables[e.seq][e.data["index"]] == e.old
        assert self.owners(e.old) > 1
        self.enter(e.seq, e.data["index"], e.new)

    def on_share(self, e):
        if e.block in self.cached:
            self.cached.remove(e.block)
        self.enter(e.seq, e.data["index"], e.block)
        assert self.owners(e.block) == e.refs

    def on_free(self, e):
        assert self.owners(e.block) <= 1
        assert bool(e.data["cached"]) == (e.block in self.indexed)
        for seq, table in self.tables.items():
            self.tables[seq] = [None if b == e.block else b for b in table]
        (self.cached if e.data["cached"] else self.blank).append(e.block)

    def on_evict(self, e):
        assert self.cached.pop(0) == e.block
        del self.indexed[e.block]
        self.blank.append(e.block)

    def on_hash(self, e):
        assert e.block not in self.indexed
        assert e.key not in [key for key, _ in self.indexed.values()]
        assert self.owners(e.block) > 0
        self.indexed[e.block] = (e.key, e.parent)

    def on_fork(self, e):
        assert self.tables[e.child] == self.tables[e.parent]
        self.computed[e.child] = self.computed[e.parent]

    def on_admit(self, e):
        self.computed[e.seq] = e.data["cached"]
        self.tables.setdefault(e.seq, [])

    def on_chunk(self, e):
        assert self.computed[e.seq] == e.start
        self.computed[e.seq] = e.stop

    def on_undo(self, e):
        assert self.computed[e.seq] == e.stop
        self.computed[e.seq] = e.start
        while self.tables[e.seq] and self.tables[e.seq][-1] is None:
            self.tables[e.seq].pop()

    def leave(self, e):
        self.tables.pop(e.seq, None)
        self.computed.pop(e.seq, None)

    on_preempt = on_finish = leave

    def on_sample(self, e):
        self.tokens.setdefault(e.seq, []).append(e.token)


@pytest.mark.parametrize("seed", [0, 1, 2, 4])
def test_events_alone_rebuild_every_page_after_every_step(seed):
    replay, done, undone = Replay(22), 0, 0

    def compare(one, events):
        nonlocal done, undone
        for e in events[done:]:
            replay.apply(e)
            undone += e.kind == "undo"
        done = len(events)
        running = one.scheduler.running
        assert set(replay.tables) == {s.seq_id for s in running}
        for seq in running:
            table = one.blocks.tables[seq.row]
            assert replay.tables[seq.seq_id] == table[table >= 0].tolist()
            assert replay.computed[seq.seq_id] == seq.num_computed_tokens
            assert replay.tokens.get(seq.seq_id, []) == seq.output_token_ids
        pool = one.blocks.pool
        assert [replay.owners(b) for b in range(22)] == pool.refs.tolist()
        assert [*reversed(replay.blank), *replay.cached] == pool.free_list()
        assert set(replay.indexed) == {b for b in range(22) if b in pool.prefix}
        assert all(parent == -1 or parent < 22 for _, parent in replay.indexed.values())

    events, out, one = life(seed, compare)
    assert undone > 0
    assert len(events.of("preempt")) > 0
    for output in out.values():
        if output.finished:
            assert all(c.token_ids in replay.tokens.values() for c in output.outputs)
    assert one.metrics.steps == len(events.of("step"))
    assert all(s.status is Status.FINISHED for s in one.scheduler.running)


def test_steps_add_up():
    for events in busy():
        for _, step in events.steps():
            chunks, total = step.of("chunk"), step.of("step")
            for t in total:
                assert t.used == sum(c.stop - c.start for c in chunks) <= t.budget


def test_the_same_run_twice_makes_the_same_events():
    a, b, c = (life(seed)[0] for seed in (5, 5, 6))
    assert a == b
    assert a.to_json() == b.to_json() != c.to_json()
    assert same_decisions(a, b)
    assert not same_decisions(a, c)


# Routes


@pytest.mark.parametrize("name", ["moe", "window", "mixed"])
def test_route_events_are_the_models_routes(name):
    one, case = engine(name, max_num_batched_tokens=9), cases(name)[4]
    with one.trace.record() as events:
        one.add_request("a", case.prompt, GREEDY)
        assert tokens_of(finish(one)["a"]) == [case.answer]
    tokens = len(case.prompt) + len(case.answer) - 1
    for layer, config in enumerate(CONFIGS[name].layers):
        routes = [e for e in events.of("route") if e.layer == layer]
        assert [e.position for e in routes] == (list(range(tokens)) if config.moe else [])
        if config.moe:
            assert [list(e.experts) for e in routes] == case.experts[layer].tolist()
            for e in routes:
                assert list(e.gates) == sorted(e.gates, reverse=True) or config.moe.selection_bias
                if config.moe.norm_topk_prob and config.moe.routed_scaling_factor == 1:
                    assert abs(sum(e.gates) - 1000) <= config.moe.top_k
    kernels = events.of("kernel")
    assert sum(e.tokens for e in kernels) == tokens * sum(c.moe is not None for c in CONFIGS[name].layers)
    for e in kernels:
        routed = {i for x in events.of("route") if (x.step, x.layer) == (e.step, e.layer) for i in x.experts}
        assert e.experts == len(routed)


def test_the_margin_is_the_gap_to_the_first_that_was_rejected():
    one, case = engine("moe"), cases("moe")[3]
    decoder, logits = model("moe"), []

    class Sink:
        def route(self, layer, logits_TE, ids_TK, weights_TK):
            logits.append(logits_TE.double().softmax(-1).sort(-1, descending=True).values)

    from tinymoe.model.attention import CausalAttend

    ids = case.prompt
    with torch.inference_mode():
        decoder(torch.tensor(ids), torch.arange(len(ids)), CausalAttend(1, len(ids)), Sink())
    with one.trace.record() as events:
        one.add_request("a", ids, GREEDY.clone(max_tokens=1))
        finish(one)
    for e in events.of("route"):
        best = logits[e.layer][e.position]
        assert abs(e.margin - 1e6 * float(best[1] - best[2])) <= 20
        assert e.margin >= 0


def routed(experts, margin, gates=(600, 400)):
    data = {"layer": 0, "seq": 0, "position": 0, "experts": experts, "gates": gates, "margin": margin}
    return [Event(0, 0, "route", "x:y#z", data)]


def test_same_decisions_overlooks_only_what_may_differ_between_machines():
    assert not same_decisions(routed((1, 2), 5000), routed((1, 3), 5000))
    assert same_decisions(routed((1, 2), 5000), routed((1, 3), 999))
    assert same_decisions(
        routed((1, 2), 5000), routed((2, 1), 5000)
    )  # the order inside the chosen is no margin's business
    assert same_decisions(routed((1, 2), 5000), routed((1, 2), 5000, gates=(601, 399)))
    step = lambda **data: [Event(0, 0, "hit", "x:y#z", {"seq": 0, "blocks": 1, "tokens": 4} | data)]  # noqa: E731
    assert same_decisions(step(), step())
    assert not same_decisions(step(), step(blocks=2))
    assert not same_decisions(step(), [])


# The outlet itself


def test_nothing_is_emitted_unless_somebody_listens(monkeypatch):
    def never(*args, **options):
        raise AssertionError("emitted without a listener")

    monkeypatch.setattr(Trace, "emit", never)
    one = engine("mixed", block_size=3, num_blocks=22, max_num_batched_tokens=14)
    for i, case in enumerate(cases("mixed")):
        one.add_request(str(i), case.prompt, seeded(i, n=2))
    finish(one)
    assert one.metrics.preemptions > 0
    one.reset_prefix_cache()


def test_a_listener_changes_no_token_and_several_hear_the_same():
    def tokens(listen):
        one = engine("moe")
        heard = [one.trace.start() for _ in range(listen)]
        for i, case in enumerate(cases("moe")):
            one.add_request(str(i), case.prompt, seeded(i))
        out = {k: tokens_of(v) for k, v in finish(one).items()}
        return out, heard

    (calm, _), (told, heard) = tokens(0), tokens(2)
    assert calm == told
    assert heard[0] == heard[1]
    assert len(heard[0]) > 100


def test_a_listener_hears_only_while_it_listens():
    trace = Trace()
    first = trace.start()
    trace.emit("evict", "a:b#c", block=1)
    with trace.record() as second:
        trace.emit("evict", "a:b#c", block=2)
    assert trace.on
    trace.stop(first)
    assert not trace.on
    assert [e.block for e in first] == [1, 2]
    assert [(e.index, e.block) for e in second] == [(0, 2)]


def test_unknown_kinds_and_fields_are_refused():
    trace = Trace()
    events = trace.start()
    with pytest.raises(ValueError, match=r"event kind 'bang' is not known; known: \['admit'"):
        trace.emit("bang", "a:b#c", block=1)
    for data in ({}, {"block": 1, "more": 2}, {"blok": 1}):
        with pytest.raises(ValueError, match=r"event 'evict' has fields \('block',\), got"):
            trace.emit("evict", "a:b#c", **data)
    assert events == []
    trace.emit("evict", "a:b#c", block=1)
    with pytest.raises(AttributeError, match=r"event 'evict' has no field 'seq'; it has \('block',\)"):
        _ = events[0].seq


def test_json_there_and_back():
    for recording in busy():
        text = recording.to_json()
        back = Recording.from_json(text)
        assert back == recording
        assert back.to_json() == text
        assert [type(e.data[f]) for e in back for f in FIELDS[e.kind]] == [
            type(e.data[f]) for e in recording for f in FIELDS[e.kind]
        ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 0, "events": []}', "trace schema 1 wanted, got 0: record the trace again"),
        ('{"events": []}', "trace schema 1 wanted, got None"),
        ('{"schema": 1, "events": [[0, "bang", "a:b#c"]]}', "event 0: kind 'bang' with 0 fields; known:"),
        ('{"schema": 1, "events": [[0, "evict", "a:b#c", 1, 2]]}', "event 0: kind 'evict' with 2 fields"),
    ],
)
def test_json_of_another_kind_is_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Recording.from_json(text)


def test_events_by_kind_and_by_step():
    events = busy()[0]
    assert {e.kind for e in events.of("alloc", "free")} == {"alloc", "free"}
    steps = list(events.steps())
    assert [e for _, batch in steps for e in batch] == events
    assert [number for number, _ in steps] == sorted({e.step for e in events})
