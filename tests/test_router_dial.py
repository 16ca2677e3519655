"""The router dial: every frame against a plain float64 router, the moments of change, and what its replay holds."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinymoe.core.trace import resolve
from tinymoe.lab.widgets.lessons.dial import SRC, RouterDial
from tinymoe.lab.widgets.replay import REPLAY

LOGITS = [0.5, -1.25, 2.0, 0.25, -3.0, 1.5]


def plain(hundredths, k):
    """Ids by (logit, lower id), weights in percent, by the textbook."""
    ids = sorted(range(len(hundredths)), key=lambda x: (-hundredths[x], x))[:k]
    parts = [math.exp((hundredths[x] - hundredths[ids[0]]) / 100) for x in ids]
    return ids, [100 * p / math.fsum(parts) for p in parts]


@given(
    st.lists(st.floats(-8, 8), min_size=2, max_size=8),
    st.data(),
)
@settings(max_examples=25, deadline=None)
def test_every_frame_is_what_a_plain_router_chooses(logits, data):
    expert = data.draw(st.integers(0, len(logits) - 1))
    k = data.draw(st.integers(1, len(logits)))
    dial = RouterDial(logits, expert=expert, top_k=k)
    assert dial.frame["logits"] == [round(100 * x) for x in logits]  # it starts where the router stands
    assert dial.text.startswith(f"Expert {expert} at ")
    seen = []
    for n in range(dial.controls.count):
        dial.seek(n)
        frame = dial.frame
        assert [x for i, x in enumerate(frame["logits"]) if i != expert] == [
            round(100 * x) for i, x in enumerate(logits) if i != expert
        ]
        for asked, (ids, weights) in enumerate(frame["best"], 1):
            wanted, parts = plain(frame["logits"], asked)
            assert ids == wanted
            assert all(abs(w - p) <= 0.501 for w, p in zip(weights, parts))
        order, share = plain(frame["logits"], len(logits))
        assert all(abs(frame["share"][x] - p) <= 0.501 for x, p in zip(order, share))
        seen.append((frame["logits"][expert], set(plain(frame["logits"], k)[0])))
    assert [at for at, _ in seen] == sorted({at for at, _ in seen})
    changes = [n for n in range(1, len(seen)) if seen[n][1] != seen[n - 1][1]]
    assert dial.controls.decisions == changes


def test_captions_and_tables():
    dial = RouterDial(LOGITS, expert=3)
    assert dial.text == (
        "Expert 3 at 0.25, as the router gave it. Chosen: expert 2 with 62 % and expert 5 with 38 %."
    )
    assert dial.next_decision()
    assert dial.text == (
        "Expert 3 at 1.50, turned from 0.25, level with expert 5: the lower number goes first. "
        "Chosen: expert 2 with 62 % and expert 3 with 38 %."
    )
    assert not dial.next_decision()
    assert dial.table[0] == ["expert", "logit", "% of the softmax", "chosen", "weight in %"]
    assert dial.table[2][:2] == [1, "−1.25"]
    assert [row[3:] for row in dial.table[1:]] == [["", ""], ["", ""], [1, 62], [2, 38], ["", ""], ["", ""]]
    dial.seek(-1)
    assert dial.text.startswith("Expert 3 at 3.50, turned from 0.25. Chosen: expert 3 with 82 % and")


def test_a_click_turns_another_expert():
    dial = RouterDial(LOGITS, expert=3)
    dial.seek(-1)
    dial.children[1].selection = "expert 5"
    assert dial.children[1].selection == ""
    assert dial.frame["logits"] == [round(100 * x) for x in LOGITS]
    assert dial.children[1].frame == dial.frame
    assert dial.controls.caption == dial.text
    assert dial.text.startswith("Expert 5 at 1.50, as the router gave it.")
    dial.seek(0)
    assert dial.text == (
        "Expert 5 at −3.50, turned from 1.50. Chosen: expert 2 with 82 % and expert 0 with 18 %."
    )


def test_several_equals_and_a_wrong_click():
    dial = RouterDial([0.5, 1.5, 1.5, -1.0], expert=0)
    dial.seek([e.logit for e in dial.moments].index(150))
    assert ", level with experts 1 and 2: the lower number goes first" in dial.text
    before = dial.text
    for wrong in ("foo", "expert", "expert x", "seq 1"):
        with pytest.raises(ValueError, match="selection must be one of expert NUMBER, got"):
            dial.children[1].selection = wrong
    with pytest.raises(ValueError, match=r"expert must be in 0..3, got 9"):
        dial.children[1].selection = "expert 9"
    assert dial.text == before


def test_why_names_the_line_that_calls_the_engines_router():
    dial = RouterDial(LOGITS, expert=3)
    assert [r.src for r in dial.why()] == [SRC]
    assert "ops.topk_softmax(" in resolve(SRC).text


def test_replay_holds_every_position():
    dial = RouterDial(LOGITS, expert=3)
    bundle = json.loads(dial._repr_mimebundle_()[REPLAY])
    assert bundle["esm"] == "router_dial"
    assert len(bundle["frames"]) == len(bundle["captions"]) == len(bundle["tables"]) == dial.controls.count
    assert bundle["captions"][bundle["start"]] == dial.text
    assert "turnable" not in bundle.get("traits", {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], {"expert": 0}), "at least two logits, all finite"),
        (([1.0, math.nan], {"expert": 0}), "at least two logits, all finite"),
        (([1.0, 2.0], {"expert": 2}), "expert must be in 0..1, got 2"),
        (([1.0, 2.0], {"expert": 0, "top_k": 3}), r"top_k must be in 1..2 \(the experts\), got 3"),
    ],
)
def test_what_cannot_be_turned_is_refused(arguments, message):
    logits, options = arguments
    with pytest.raises(ValueError, match=message):
        RouterDial(logits, **options)
