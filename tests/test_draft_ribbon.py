"""W8, the draft ribbon: against made runs whose outcome is known, and against the engine's own tokens and counters."""

import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_spec_verify import pair  # noqa: F401  (a fixture)

from tinymoe.core.config import EngineConfig
from tinymoe.core.params import SamplingParams
from tinymoe.core.trace import FIELDS, Recording, Trace
from tinymoe.engine.engine import Engine
from tinymoe.lab.frames.steps import drafts
from tinymoe.lab.widgets.gallery import DraftRibbon, Strip
from tinymoe.lab.widgets.predict import Predict, quiz

SRC = "tinymoe.engine.spec.proposer:Proposer.tell#kept-if-the-model-agrees"


def made(*events):
    """A recording of hand-made events: (step, kind, fields in order)."""
    trace = Trace()
    recording = trace.start()
    for step, kind, *values in events:
        trace.step = step
        trace.emit(kind, SRC, **dict(zip(FIELDS[kind], values)))
    return recording


def speculating_run(seed):
    """(recording, truth): truth[step, seq] = (accepted, drafted, tokens) of a made run of several sequences, where a
    step gives each one token, or drafts, of which the last may lie behind its end."""
    r, events, truth = random.Random(seed), [], {}
    position = {seq: r.randint(1, 9) for seq in range(r.randint(1, 4))}
    for step in range(r.randint(1, 8)):
        if not position:
            break
        events.append((step, "step", 99, 1, len(position), 0))
        plans = []
        for seq in sorted(position):
            drafted = [r.randint(100, 999) for _ in range(r.choice([0, 1, 2, 4]))]
            accepted = r.randint(0, len(drafted))
            ends = r.randint(1, accepted) if accepted and r.random() < 0.2 else 0
            tokens = [*drafted[:accepted], r.randint(1, 99)]
            plans.append((seq, drafted, accepted, tokens[: ends or None], ends > 0))
        for seq, drafted, *_ in plans:
            at = position[seq]
            events += [(step, "draft", seq, at + i, t, r.randint(1, 10**6)) for i, t in enumerate(drafted)]
        for seq, drafted, accepted, _, _ in plans:
            for i, token in enumerate(drafted[: accepted + 1]):
                p, q = r.randint(0, 10**6), r.randint(1, 10**6)
                events.append((step, "verify", seq, position[seq] + i, token, p, q, int(i < accepted)))
        for seq, drafted, accepted, tokens, ended in plans:
            for i, token in enumerate(tokens):
                events.append((step, "sample", 0, seq, position[seq] + i, token))
            truth[step, seq] = (accepted, len(drafted), tokens)
            position[seq] += len(tokens)
            if ended:
                events.append((step, "finish", 0, seq, 0, 5))
                del position[seq]
    return made(*events), truth


def tokens_of(row):
    """The tokens a row says were emitted."""
    return [c[1] for c in row[3] if c[0] == "A"] + row[4][1:2]


@given(st.integers(0, 10**6))
def test_every_verification_is_accounted_for(seed):
    events, truth = speculating_run(seed)
    assert [events[i].step for i in drafts.moments(events)] == sorted({e.step for e in events})
    seen, redrawn, bonus = Counter(), 0, 0
    for i in drafts.moments(events):
        f = drafts.frame(events, i, window=10**6)
        assert json.loads(json.dumps(f)) == f
        rows = {(r[0], r[1]): r for r in f["rows"]}
        assert set(rows) == {k for k in truth if k[0] <= f["step"]}
        for key in (k for k in rows if k[0] == f["step"]):
            accepted, drafted, tokens = truth[key]
            codes = Counter(c[0] for c in rows[key][3])
            assert codes["A"] + codes["C"] == accepted
            assert (codes["R"], codes["U"]) == (accepted < drafted, max(0, drafted - accepted - 1))
            assert tokens_of(rows[key]) == tokens
            whole = len(tokens) == accepted + 1  # the invariant, unless the sequence ended before
            assert whole == (rows[key][5] < 0) == bool(rows[key][4])
            tail = rows[key][4][0] if whole else "-"
            if drafted:
                assert tail == ("-" if not whole else "N" if accepted < drafted else "B")
                seen.update(runs=1, drafted=drafted, accepted=accepted, tokens=len(tokens))
                redrawn, bonus = redrawn + (tail == "N"), bonus + (tail == "B")
            else:
                assert tail == "S"
        totals = [seen["runs"], seen["drafted"], seen["accepted"], redrawn, bonus, seen["tokens"]]
        assert f["total"] == totals
        kept = sum(len(t) for (step, _), (_, _, t) in truth.items() if step == f["step"])
        assert f["tokens"] == kept
        assert f"; {kept} token" in drafts.caption(f)
        lines = drafts.table(f)[1:]
        assert len(lines) == sum(len(r[3]) + bool(r[4]) for r in f["rows"])


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_between_two_moments_nothing_is_guessed(seed, pick):
    """Any index gives a frame, the same from what a widget keeps, and from JSON."""
    events, _ = speculating_run(seed)
    i = pick % len(events)
    f = drafts.frame(events, i)
    assert drafts.frame(Recording.from_json(events.to_json())[: i + 1], i) == f
    pending = sum(c[0] == "P" for r in f["rows"] for c in r[3])
    step = [e for e in events[: i + 1] if e.step == events[i].step]
    if not any(e.kind == "verify" for e in step):
        assert pending == sum(e.kind == "draft" for e in step)
    assert drafts.caption(f).endswith(".")


RUN = made(
    (3, "step", 99, 1, 1, 0),
    (3, "sample", 0, 0, 8, 50),
    (4, "step", 99, 5, 1, 0),
    *((4, "draft", 0, 9 + i, 60 + i, 250_000) for i in range(4)),
    (4, "verify", 0, 9, 60, 500_000, 250_000, 1),
    (4, "verify", 0, 10, 61, 500_000, 250_000, 1),
    (4, "verify", 0, 11, 62, 1500, 250_000, 0),
    (4, "sample", 0, 0, 9, 60),
    (4, "sample", 0, 0, 10, 61),
    (4, "sample", 0, 0, 11, 70),
    (5, "step", 99, 2, 1, 0),
    (5, "draft", 0, 12, 63, 10**6),
    (5, "verify", 0, 12, 63, 900_000, 10**6, 1),
    (5, "sample", 0, 0, 12, 63),
    (5, "sample", 0, 0, 13, 71),
    (5, "finish", 0, 0, 1, 6),
)


def test_captions_word_for_word():
    captions = [drafts.caption(drafts.frame(RUN, i)) for i in drafts.moments(RUN)]
    assert captions == [
        "Step 3: nothing drafted; 1 token for A.",
        "Step 4: 4 drafted, 2 accepted, 1 redrawn; 3 tokens for A. So far 3 tokens in 1 verification, 3.0 each.",
        "Step 5: 1 drafted, 1 accepted, 1 bonus; 2 tokens for A. A ends (length). So far 5 tokens in 2 verifications, 2.5 each.",
    ]
    assert drafts.caption(drafts.frame(RUN, 5)) == "Step 4: 3 drafted, not judged yet."
    assert drafts.caption(drafts.frame(RUN[:1], 0)) == "Step 3: no token is chosen."
    f = drafts.frame(RUN, len(RUN) - 1, words=lambda token: f"w{token}", window=2)
    assert f["dropped"] == 1
    assert f["names"] == {str(t): f"w{t}" for t in (60, 61, 62, 63, 70, 71)}
    assert drafts.table(f)[3:6] == [
        [4, "A", 11, "w62", "rejected", "25.0", "0.2"],
        [4, "A", 11, "w70", "redrawn", "", ""],
        [4, "A", 12, "w63", "not looked at", "25.0", ""],
    ]
    with pytest.raises(ValueError, match="window must be at least 1 row, got 0"):
        drafts.frame(RUN, 3, window=0)


def test_a_step_that_failed_is_retried():
    """The engine counts it once, so its number comes again; the first drafts are gone."""
    events = made(
        (4, "step", 99, 3, 1, 0),
        (4, "draft", 0, 9, 60, 250_000),
        (4, "draft", 0, 10, 61, 250_000),
        (4, "step", 99, 2, 1, 0),
        (4, "draft", 0, 9, 80, 250_000),
        (4, "verify", 0, 9, 80, 1, 250_000, 0),
        (4, "sample", 0, 0, 9, 90),
    )
    assert drafts.frame(events, 2)["total"] == [1, 2, 0, 0, 0, 0]
    assert drafts.frame(events, 6)["rows"] == [[4, 0, 9, [["R", 80, 250_000, 1]], ["N", 90, 0], -1]]


def test_a_click_asks_about_one_token():
    w = DraftRibbon(RUN)
    w.seek(-1)
    w.children[1].selection = "token 4 0 11"
    assert [words for words, _ in w.controls.why] == [
        "The draft proposes token 62 for position 11 of A: to it, this has a chance of 25.0 %.",
        "The model gives token 62 at position 11 of A a chance of 0.15 %, the draft 25.0 %: it goes, and so do all drafts behind it.",
        "A chooses token 70 for position 11.",
    ]
    assert "proposer.py:" in w.controls.why[0][1]
    with pytest.raises(ValueError, match="token STEP SEQ POSITION"):
        w._clicked({"new": "token 4 0", "owner": w.children[1]})
    assert [m.step for m in w.moments] == [3, 4, 5]
    w.seek(0)
    assert w.next_decision()
    assert w.text.startswith("Step 4: 4 drafted")


def test_how_many_stay_is_asked_before_it_is_told():
    f = quiz(RUN, 1, "stay")
    assert f["question"] == "how many of the next drafts stay?"
    assert (f["choices"], f["answer"]) == (["0", "1", "2", "3", "4"], 2)
    assert f["because"].startswith("The model gives token 62 at position 11 of A a chance of 0.15 %")
    assert Predict(RUN, 11, "stay").frame["answer"] == 1


METHODS = {
    "self": {},
    "ngram": {"prompt_lookup_min": 1},
    "draft_model": {"model": "the tiny one"},
}


@pytest.mark.parametrize("acceptance", ["exact", "coupled"])
@pytest.mark.parametrize("method", METHODS)
def test_the_ribbon_of_the_engine(pair, method, acceptance):  # noqa: F811
    """Live, with several sequences: rows end to end are the text, and the totals are the engine's own counters."""
    model, draft = pair
    spec = {"method": method, "num_speculative_tokens": 3, "adaptive": False, "acceptance": acceptance}
    config = EngineConfig(
        max_model_len=64, max_num_batched_tokens=8, speculative_config=spec | METHODS[method]
    )
    engine = Engine(model, config, draft=draft if method == "draft_model" else None)
    w, strip = DraftRibbon(live=engine, window=10**6), Strip(live=engine, show=("drafts", "schedule"))
    for i, heat in enumerate((0.0, 0.7, 1.3)):
        params = SamplingParams(temperature=heat, seed=i, max_tokens=11 + i, n=1 + (i == 2))
        engine.add_request(str(i), [1, 5, 2, 1, 5][: 3 + i], params)
    texts = {}
    while engine.has_unfinished_requests():
        w.step()
        assert w.text == drafts.caption(w.frame)
        found = Counter(e.seq for e in w._source if e.kind == "sample" and e.step == w.frame["step"])
        for row in (r for r in w.frame["rows"] if r[0] == w.frame["step"]):
            texts.setdefault(row[1], []).extend(tokens_of(row))
            assert found[row[1]] == len(tokens_of(row)) <= sum(c[0] in "AC" for c in row[3]) + 1
    strip.seek(-1)
    assert strip.frame["step"] == w.frame["step"]
    said = {}
    for e in w._source:
        if e.kind == "sample":
            said.setdefault(e.seq, []).append(e.token)
    assert texts == said
    m = engine.get_metrics()
    runs, drafted, accepted, *_ = w.frame["total"]
    assert (runs, drafted, accepted) == (m["verifications"], m["draft_tokens"], m["accepted_tokens"])
    assert runs > 3
    back = Recording.from_json(Recording(w._source).to_json())
    assert w.moments == DraftRibbon(back).moments
