"""The matrix reveal: what a frame says of each run, counted cell by cell, and what its replay holds."""

import json

import pytest

from tinymoe.core.trace import Recording, Trace
from tinymoe.lab.widgets.lessons.matrix import TokenMatrix, merged
from tinymoe.lab.widgets.replay import REPLAY


def chunks(*spans):
    trace = Trace()
    with trace.record() as events:
        for step, (start, stop) in enumerate(spans):
            trace.step = 7 + 2 * step  # steps of an engine that others use, too
            trace.emit("step", "", budget=9, used=stop - start, running=1, waiting=0)
            trace.emit("chunk", "somewhere:f#x", seq=3, start=start, stop=stop, samples=1)
    return events


PLAIN, CACHED = chunks((0, 3), (0, 4), (0, 5)), chunks((0, 3), (3, 4), (4, 5))


@pytest.fixture
def widget():
    return TokenMatrix({"Without": PLAIN, "With": CACHED}, words=["a", "b", "c", "d", "e"])


def test_runs_keep_pace():
    both = merged([PLAIN, CACHED[:4]])
    assert [(e.step, e.panel, e.start, e.stop) for e in both] == [
        (0, 0, 0, 3),
        (0, 1, 0, 3),
        (1, 0, 0, 4),
        (1, 1, 3, 4),
        (2, 0, 0, 5),
    ]
    assert [e.index for e in both] == list(range(5))
    assert {e.src for e in both} == {"somewhere:f#x"}


def test_frames_captions_and_tables(widget):
    assert widget.controls.count == 3
    for step, (plain, cached) in enumerate([((0, 3), (0, 3)), ((0, 4), (3, 4)), ((0, 5), (4, 5))]):
        widget.seek(step)
        assert widget.frame["panels"] == [["Without", *plain], ["With", *cached]]
        for (name, start, stop), row in zip(widget.frame["panels"], widget.table[1:]):
            pairs = sum(1 for query in range(start, stop) for key in range(stop) if key <= query)
            assert row == [name, stop - start, stop - start, start, pairs]
    assert widget.frame["size"] == 5
    assert (
        widget.text
        == "Step 2. Without: 5 tokens run, 0 read from the cache. With: 1 token run, 4 read from the cache."
    )


def test_replay_holds_every_step(widget):
    bundle = json.loads(widget._repr_mimebundle_()[REPLAY])
    assert bundle["esm"] == "token_matrix"
    assert [f["panels"][1][1:] for f in bundle["frames"]] == [[0, 3], [3, 4], [4, 5]]
    assert bundle["frames"][0]["words"] == ["a", "b", "c", "d", "e"]
    assert len(bundle["captions"]) == len(bundle["tables"]) == 3


def test_an_empty_recording_draws_nothing():
    w = TokenMatrix({"nobody": Recording()})
    assert w.text == "No token has run yet."
    assert w.frame["size"] == 0
