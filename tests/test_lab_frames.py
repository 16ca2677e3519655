"""Frames against an independent simulator: what a picture shows is what happened."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_simulator import Simulator, record

from tinymoe.core.trace import FIELDS, Recording, Trace
from tinymoe.lab.frames import flow, load, pages, prefix, why
from tinymoe.lab.frames.steps import drafts, schedule
from tinymoe.lab.frames.view import count, letters, listed, tenths

VIEWS = (load, flow, pages, prefix, schedule, drafts)
runs = st.builds(
    lambda **o: record(**o),
    seed=st.integers(0, 10**6),
    requests=st.integers(1, 8),
    num_blocks=st.integers(9, 30),
    budget=st.integers(3, 20),
    seats=st.integers(1, 5),
    late_free=st.booleans(),
)
quick = settings(max_examples=40, deadline=None)


def made(*events):
    """A recording of hand-made events: (step, kind, fields in order)."""
    trace = Trace()
    recording = trace.start()
    for step, kind, *values in events:
        trace.step = step
        trace.emit(kind, "m:f#x", **dict(zip(FIELDS[kind], values)))
    return recording


def ends(events):
    """Index of the last event of each step."""
    return [i for i, e in enumerate(events) if i + 1 == len(events) or events[i + 1].step != e.step]


@quick
@given(runs)
def test_load_counts_k_per_token_and_layer(run):
    events, engine = run
    for i in load.moments(events):
        for per in ("run", "step"):
            f = load.frame(events, i, per=per, experts=engine.experts)
            plain = Counter(
                (e.layer, x)
                for e in events[: i + 1]
                if e.kind == "route" and (per == "run" or e.step == events[i].step)
                for x in e.experts
            )
            assert f["counts"] == [
                [plain[row, x] for x in range(engine.experts)] for row in range(engine.layers)
            ]
            assert [sum(row) for row in f["counts"]] == [engine.k * t for t in f["tokens"]]
    assert len(load.moments(events)) == len({e.step for e in events if e.kind == "route"})


@quick
@given(runs)
def test_flow_conserves_tokens(run):
    events, engine = run
    for i in flow.moments(events):
        f = flow.frame(events, i, limit=5)
        routed = sum(e.kind == "route" and (e.step, e.layer) == (f["step"], f["layer"]) for e in events)
        assert len(f["tokens"]) == min(5, routed)
        assert len(f["tokens"]) + f["left_out"] == routed
        out_of = Counter(t for t, _, _ in f["links"])
        into = Counter(x for _, x, _ in f["links"])
        assert all(out_of[t] == engine.k for t in range(len(f["tokens"])))
        assert [[x, into[x]] for x in sorted(into)] == f["experts"]


@quick
@given(runs)
def test_pages_match_the_pool_after_every_step(run):
    events, engine = run
    for end, truth in zip(ends(events), engine.history):
        f = pages.frame(events, end, num_blocks=engine.total)
        assert {seq: t for seq, _, t in f["tables"]} == truth["tables"]
        assert [len(o) for o in f["owners"]] == truth["refs"]
        assert f["cached"] == truth["cached"]
        assert f["free"] == truth["free"]
        assert f["indexed"] == sorted(truth["index"])


@quick
@given(runs)
def test_pages_are_conserved_at_every_event(run):
    events, engine = run
    for i in pages.moments(events):
        f = pages.frame(events, i, num_blocks=engine.total)
        owned = {b for b, o in enumerate(f["owners"]) if o}
        assert len(f["owners"]) == engine.total
        assert owned.isdisjoint(f["cached"])
        assert owned.isdisjoint(f["free"])
        assert set(f["cached"]).isdisjoint(f["free"])
        assert len(owned) + len(f["cached"]) + len(f["free"]) == engine.total
        for seq, _, table in f["tables"]:
            assert all(seq in f["owners"][b] for b in table if b >= 0)
        if f["kind"] == "share":
            assert len(f["owners"][f["touched"][0]]) == events[f["event"]].refs


@quick
@given(runs)
def test_prefix_tree_is_the_index_and_salts_never_mix(run):
    events, engine = run
    salts = {}
    for end, truth in zip(ends(events), engine.history):
        f = prefix.frame(events, end)
        nodes = {n[0]: n for n in f["nodes"]}
        assert nodes.keys() == truth["index"].keys()
        for block, parent, salt, depth, _, owners in f["nodes"]:
            true_salt, tokens = truth["index"][block]
            assert depth == len(tokens) // engine.block - 1
            salts.setdefault(true_salt, salt)
            assert salts[true_salt] == salt
            assert len(owners) == truth["refs"][block]
            if parent in nodes:
                assert (true_salt, tokens[: -engine.block]) == truth["index"][parent]
        assert len(set(salts.values())) == len(salts)
    for i in prefix.moments(events):
        f = prefix.frame(events, i)
        if f["kind"] == "hit":
            assert len({n[2] for n in f["nodes"] if n[0] in f["touched"]}) <= 1
            assert len(f["touched"]) == f["lookup"][1] == events[f["event"]].blocks


@quick
@given(runs)
def test_prefix_lanes_do_not_overlap(run):
    events, _ = run
    f = prefix.frame(events, len(events) - 1)
    places = [(n[3], n[4]) for n in f["nodes"]]
    assert len(set(places)) == len(places)
    at = {n[0]: n for n in f["nodes"]}
    for _, parent, _, depth, lane, _ in f["nodes"]:
        if parent in at:
            assert (at[parent][3], at[parent][4] <= lane) == (depth - 1, True)


@quick
@given(runs)
def test_schedule_accounts_for_every_token(run):
    events, engine = run
    position = Counter()
    last = schedule.moments(events)[-1]
    f = schedule.frame(events, last, window=10**6)
    assert [c[0] for c in f["columns"]] == sorted({e.step for e in events if e.kind == "step"})
    running = Counter(e.step for e in events if e.kind == "chunk")
    for step, budget, used, cells in f["columns"]:
        assert len({c[0] for c in cells}) == len(cells)
        ran = [c for c in cells if c[1] in "PD"]
        assert sum(c[2] for c in ran) == used <= budget == engine.budget
        assert len(ran) == running[step]
        for seq, code, tokens, cached in cells:
            if code == "X":
                position[seq] = 0
            if code in "PD":
                position[seq] += tokens + cached
                assert code == "P" or tokens == 1
    ran = {
        seq: max(e.stop for e in events if e.kind == "chunk" and e.seq == seq)
        for seq in position
        if position[seq]
    }
    children = {e.child for e in events if e.kind == "fork"}  # they start with their parent's tokens
    assert {s: p for s, p in position.items() if p and s not in children} == {
        s: p for s, p in ran.items() if s not in children
    }


@quick
@given(runs, st.integers(0, 10**6))
def test_every_frame_is_json_and_replays(run, pick):
    """Any index gives a frame; a recording read back from JSON gives the same one; captions and tables are whole."""
    events, _ = run
    i = pick % len(events)
    back = Recording.from_json(events.to_json())
    for view in VIEWS:
        f = view.frame(events, i)
        assert json.loads(json.dumps(f)) == f
        assert view.frame(back, i) == f
        assert view.frame(events[: i + 1], i) == f or view in (
            load,
            pages,
        )  # those take their axes from the whole
        assert view.caption(f).endswith(".")
        rows = view.table(f)
        assert len({len(r) for r in rows}) == 1
        assert not [x for r in rows for x in r if isinstance(x, float)]


def test_filtered_events_give_the_same_frames():
    """A widget keeps only the kinds its view reads."""
    events, _engine = record(seed=5, num_blocks=14)
    for view in VIEWS:
        kept = [e for e in events if e.kind in view.KINDS]
        a = [view.frame(events, i) for i in view.moments(events)]
        b = [view.frame(kept, i) for i in view.moments(kept)]
        assert a == b
        assert len(a) > 5


def test_preemption_and_eviction_are_drawn():
    events, _engine = next(
        (ev, en)
        for ev, en in (record(seed=s, num_blocks=9, requests=8, seats=5) for s in range(200))
        if {"preempt", "evict", "cow"} <= {e.kind for e in ev}
    )
    codes = {c[1] for col in schedule.frame(events, len(events) - 1, window=999)["columns"] for c in col[3]}
    assert codes == set("PDWX")
    text = " ".join(pages.caption(pages.frame(events, i)) for i in pages.moments(events))
    assert "is preempted and gives up" in text
    assert "leaves the prefix index" in text
    assert "so it copies it to block" in text


def test_captions_word_for_word():
    events = made(
        (1, "arrive", 0, 0, 9, 0),
        (1, "arrive", 1, 1, 5, 0),
        (1, "hit", 0, 0, 0),
        (1, "alloc", 0, 0, 3),
        (1, "alloc", 0, 1, 4),
        (1, "admit", 0, 0, 8, 0),
        (1, "wait", 1, 0),
        (1, "chunk", 0, 0, 8, 0),
        (1, "step", 8, 8, 1, 1),
        (1, "route", 2, 0, 0, (5, 1), (612, 388), 9000),
        (1, "route", 2, 0, 1, (5, 0), (700, 300), 9000),
        (1, "hash", 3, -1, 77, 0),
        (2, "chunk", 0, 8, 9, 1),
        (2, "share", 1, 0, 3, 2),
        (2, "hit", 1, 1, 4),
        (2, "admit", 1, 1, 1, 4),
        (2, "chunk", 1, 4, 5, 1),
        (2, "step", 8, 2, 2, 0),
        (2, "cow", 1, 0, 3, 9),
        (2, "finish", 1, 1, 1, 1),
        (2, "free", 9, 0),
    )
    at = {e.kind: i for i, e in enumerate(events)}  # the last of each kind
    assert load.caption(load.frame(events, 10)) == (
        "Step 1, run so far: layer 2 expert 5 has 2 of 4 slots, 3.0× the mean. 3 of 6 cells are idle."
    )
    assert flow.caption(flow.frame(events, 10, words={(0, 1): "der"})) == (
        "Step 1, layer 2: 2 tokens in 4 pairs on 3 experts; expert 5 has 2 pairs."
    )
    assert flow.frame(events, 10, words={(0, 1): "der"})["tokens"] == ["A0", "A1 'der'"]
    assert pages.caption(pages.frame(events, at["share"], num_blocks=10)) == (
        "Step 2: page 0 of B becomes block 3, shared with A. 2 of 10 blocks owned (1 shared), 0 cached, 8 free."
    )
    assert pages.caption(pages.frame(events, at["cow"], num_blocks=10)) == (
        "Step 2: B writes into shared block 3, so it copies it to block 9. "
        "3 of 10 blocks owned (0 shared), 0 cached, 7 free."
    )
    assert prefix.caption(prefix.frame(events, at["hit"])) == (
        "Step 2: B finds 1 block: 4 tokens saved. The index holds 1 block: 1 in use, 0 kept without an owner."
    )
    ends_of = schedule.moments(events)
    assert schedule.caption(schedule.frame(events, ends_of[0])) == (
        "Step 1: 8 of 8 tokens; prefill A 8; B waits: no token budget."
    )
    assert schedule.caption(schedule.frame(events, ends_of[1])) == (
        "Step 2: 2 of 8 tokens; prefill A 1 and B 1; B skips 4 cached tokens; B finishes (length) with 1 token."
    )


def test_a_step_that_changes_no_page_is_shown_too():
    events = made(
        (0, "arrive", 0, 0, 4, 0),
        (1, "alloc", 0, 0, 5),
        (1, "chunk", 0, 0, 3, 1),
        (1, "step", 8, 3, 1, 0),
        (2, "chunk", 0, 3, 4, 1),
        (2, "step", 8, 1, 1, 0),
        (2, "arrive", 1, 1, 4, 0),
        (3, "hash", 5, -1, 1, 0),
        (3, "alloc", 0, 1, 6),
        (3, "step", 8, 1, 1, 0),
    )
    assert [events[i].kind for i in pages.moments(events)] == ["step", "arrive", "step"]
    first, quiet, last = (pages.frame(events, i, num_blocks=8) for i in pages.moments(events))
    assert first["tables"] == [[0, 3, [5]]]  # what follows a change belongs to its moment
    assert [f["kind"] for f in (first, quiet, last)] == ["alloc", "step", "alloc"]
    assert pages.caption(quiet).startswith("Step 2: 1 token computed, and no page changes hands. 1 of 8")
    assert [f["event"] for f in (first, quiet, last)] == [1, 5, 8]
    caption = prefix.caption(prefix.frame(events, prefix.moments(events)[0]))
    assert caption.startswith("Step 1: nothing enters or leaves the index.")


def test_a_failed_step_is_taken_back():
    """The engine frees what the step took, newest first, then says undo; the shared page is its owner's again."""
    events = made(
        (0, "arrive", 0, 0, 4, 0),
        (1, "alloc", 0, 0, 5),
        (1, "chunk", 0, 0, 4, 1),
        (1, "share", 1, 0, 5, 2),
        (1, "fork", 0, 0, 1),
        (2, "cow", 1, 0, 5, 6),
        (2, "alloc", 1, 1, 7),
        (2, "chunk", 1, 4, 6, 1),
        (2, "free", 7, 0),
        (2, "free", 6, 0),
        (2, "undo", 1, 4, 6),
    )
    f = pages.frame(events, len(events) - 1, num_blocks=8)
    assert f["tables"] == [[0, 4, [5]], [1, 4, [5]]]
    assert f["free"][:2] == [6, 7]
    assert pages.caption(f).startswith(
        "Step 2: B takes back positions 4 to 5. 1 of 8 blocks owned (1 shared)"
    )


def test_who_ran_after_all_did_not_wait():
    events = made(
        (0, "arrive", 0, 0, 4, 0),
        (0, "arrive", 1, 1, 4, 0),
        (1, "wait", 0, 1),
        (1, "wait", 1, 1),
        (1, "wait", 1, 4),
        (1, "admit", 0, 0, 4, 0),
        (1, "chunk", 0, 0, 4, 1),
        (1, "step", 8, 4, 1, 1),
    )
    assert schedule.frame(events, 7)["waits"] == [[1, 4]]


def test_a_block_whose_parent_is_not_indexed_keeps_its_depth():
    events = made(
        (1, "alloc", 0, 0, 2), (1, "alloc", 0, 1, 3), (1, "hash", 3, 2, 1, 70), (1, "hash", 9, -1, 1, 80)
    )
    f = prefix.frame(events, 3)
    assert f["nodes"] == [[3, -2, 0, 1, 0, [0]], [9, -1, 1, 0, 1, []]]
    assert prefix.caption(f).startswith(
        "Step 1: full block 9 enters the index as the start of a prompt, salt 2."
    )


def test_load_by_group_splits_one_layer():
    events, engine = record(seed=2)
    groups = {0: "verse", 1: "sums", 2: "verse"}
    f = load.by_group(events, groups, layer=1, experts=engine.experts)
    assert f["rows"] == ["sums", "verse"]
    plain = Counter(
        x for e in events if e.kind == "route" and e.layer == 1 and e.seq in (0, 2) for x in e.experts
    )
    assert f["counts"][1] == [plain[x] for x in range(engine.experts)]
    assert load.caption(f).count("expert") == 1


def test_percent_of_mean_rounds_half_up():
    f = {"experts": 4, "rows": ["r", "idle"], "counts": [[4, 0, 0, 0], [0] * 4]}
    assert load.percent_of_mean(f) == [[400, 0, 0, 0], [0, 0, 0, 0]]
    assert load.percent_of_mean({"experts": 2, "rows": ["r"], "counts": [[3, 5]]}) == [[75, 125]]


def test_empty_recordings():
    for view in VIEWS:
        assert view.moments(Recording()) == []
        f = view.frame(Recording(), -1)
        assert view.caption(f).endswith(".")
        assert len(view.table(f)) >= 1


def test_options_are_checked():
    events, _ = record(seed=0)
    with pytest.raises(ValueError, match='per must be "run" or "step"'):
        load.frame(events, 3, per="day")
    with pytest.raises(ValueError, match='every must be "event" or "step"'):
        pages.moments(events, every="hour")


def test_words():
    assert [letters(n) for n in (0, 25, 26, 701, 702)] == ["A", "Z", "AA", "ZZ", "AAA"]
    assert (count(1, "token"), count(0, "token")) == ("1 token", "0 tokens")
    assert [listed(list("ABC"[:n])) for n in range(4)] == ["none", "A", "A and B", "A, B and C"]
    assert listed(list("ABCDEFGHIJ")) == "A, B, C, D, E, F, G and 3 more"
    assert [tenths(1, 4), tenths(1, 3), tenths(7, 2), tenths(1, 0)] == ["0.3", "0.3", "3.5", "0.0"]


def test_every_kind_has_a_rule_and_its_line():
    events, _ = record(seed=4, num_blocks=9, requests=8)
    known = set()
    for event in events:
        r = why.reason(event)
        assert r.words.endswith((".", ".)"))
        where = why.source(r.src)
        assert where.startswith("lab_simulator.py:"), where
        assert event.kind in where
        known.add(event.kind)
    rest = made(
        *(
            (1, kind, *((1, 2) if f in ("experts", "gates") else 1 for f in FIELDS[kind]))
            for kind in FIELDS.keys() - known
        )
    )
    assert all(why.reason(e).words.endswith(".") for e in rest)
    assert "does not resolve" in why.source("tinymoe.nowhere:f#x")


def test_explain_selects():
    events, _ = record(seed=4)
    some = why.explain(events, block=0)
    assert some
    assert all("0" in r.words for r in some)
    assert len(why.explain(events, seq=1)) == sum(
        1 in (e.data.get("seq"), e.data.get("child"), e.data.get("parent") if e.kind == "fork" else None)
        for e in events
    )


def test_simulator_stops():
    assert not record(seed=1)[1].has_unfinished_requests()
    assert Simulator().has_unfinished_requests()
