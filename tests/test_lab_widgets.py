"""The widgets without a browser: moments, captions, what a stored notebook keeps, and a live engine being stepped."""

import asyncio
import json
import threading

import pytest
import traitlets
from lab_simulator import Simulator, record

from tinymoe import lab
from tinymoe.core.trace import Recording, Trace
from tinymoe.lab.frames import flow, load, pages, prefix
from tinymoe.lab.frames.steps import drafts, schedule
from tinymoe.lab.widgets.esm import source
from tinymoe.lab.widgets.gallery import (
    DraftRibbon,
    ExpertLoad,
    PageTable,
    PrefixTree,
    ScheduleChart,
    Strip,
    TokenFlow,
)
from tinymoe.lab.widgets.plots import FlowRibbons
from tinymoe.lab.widgets.predict import QUESTIONS, Predict, quiz
from tinymoe.lab.widgets.replay import LIMIT, PLOTLY, REPLAY, evenly, size

VIEW = "application/vnd.jupyter.widget-view+json"
ALL = [
    (ExpertLoad, load),
    (TokenFlow, flow),
    (PageTable, pages),
    (PrefixTree, prefix),
    (ScheduleChart, schedule),
    (DraftRibbon, drafts),
]
MODULES = (
    "cell_map",
    "draft_ribbon",
    "page_table",
    "predict",
    "prefix_tree",
    "router_dial",
    "schedule_chart",
    "scrubber",
    "tile_map",
    "token_matrix",
)


@pytest.fixture(scope="module")
def events():
    return record(seed=3, num_blocks=16)[0]


def bundle_of(widget):
    """The mime bundle, with the replay unpacked."""
    bundle = widget._repr_mimebundle_()
    if REPLAY in bundle:
        bundle[REPLAY] = json.loads(bundle[REPLAY])
    return bundle


# Replay


@pytest.mark.parametrize(("make", "view"), ALL)
def test_seek_shows_the_frame_of_that_moment(events, make, view):
    w = make(events)
    assert w.controls.count == len(view.moments(events)) > 5
    for n in (0, 3, -1, -2):
        w.seek(n)
        i = view.moments(events)[n]
        assert w.moments[w.controls.at].kind in view.CHANGES | {"step"}
        assert w.moments[w.controls.at].step == events[i].step
        assert w.text == view.caption(view.frame(events, i)) == w.controls.caption
        assert w.table == view.table(view.frame(events, i))
    w.seek(10**6)
    assert w.controls.at == w.controls.count - 1 == w.controls.drawn
    w.seek(-(10**6))
    assert w.controls.at == 0


@pytest.mark.parametrize("height", [400, 421])
def test_no_ribbon_is_cut_off(events, height):
    """plotly's own arithmetic: `y` is a node's centre; nodes that come too close are pushed down, and nothing stops them."""
    assert len(flow.moments(events)) > 5
    for i in flow.moments(events):
        [trace] = FlowRibbons().traces(flow.frame(events, i))
        node, link = trace["node"], trace["link"]
        values = [0] * len(node["label"])
        for end in (link["source"], link["target"]):
            for n, value in zip(end, link["value"]):
                values[n] += value
        columns = [[n for n, x in enumerate(node["x"]) if x == side] for side in (0.01, 0.99)]
        scale = min((height - (len(c) - 1) * node["pad"]) / sum(values[n] for n in c) for c in columns)
        for column in columns:
            below = 0
            for n in column:
                tall = values[n] * scale
                top = max(below, node["y"][n] * height - tall / 2)
                assert top + tall <= height + 1, (i, node["label"][n])
                below = top + tall + node["pad"]


def test_the_front_end_moves_the_picture(events):
    """The browser only sets `at`; the rest follows."""
    w = PageTable(events, num_blocks=16)
    picture = w.children[1]
    before = picture.frame
    w.controls.at = 9
    assert picture.frame == pages.frame(events, pages.moments(events)[9], num_blocks=16) != before
    assert w.controls.caption == w.text


def test_a_plotly_picture_is_redrawn(events):
    w = ExpertLoad(events)
    figure = w.children[1]
    w.seek(5)
    frame = load.frame(events, load.moments(events)[5])
    assert [list(row) for row in figure.data[0].z] == load.percent_of_mean(frame)
    assert [list(row) for row in figure.data[0].text] == frame["counts"]
    w = TokenFlow(events)
    w.seek(7)
    links = flow.frame(events, flow.moments(events)[7])["links"]
    assert list(w.children[1].data[0].link.value) == [g for _, _, g in links]


def test_options_reach_the_view(events):
    assert PageTable(events, every="step").controls.count == len(
        {e.step for e in events if e.kind in pages.KINDS}
    )
    assert TokenFlow(events, layer=1).frame["layer"] == 1
    assert ExpertLoad(events, per="step", experts=64).frame["experts"] == 64
    w = PageTable(events, num_blocks=40, block_size=4)
    assert (len(w.frame["owners"]), w.frame["block_size"]) == (40, 4)
    w = TokenFlow(events, words={(0, 0): "der"})
    assert w.frame["tokens"][0] == "A0 'der'"


def test_next_decision_jumps(events):
    w = ScheduleChart(events)
    seen = []
    while w.next_decision():
        seen.append(w.controls.at)
    assert seen == w.controls.decisions[1:] or seen == w.controls.decisions
    quiet = {e.step for e in events if e.kind == "step"} - {
        e.step for e in events if e.kind in schedule.DECISIONS
    }
    assert len(quiet) == w.controls.count - len(w.controls.decisions)
    assert not ExpertLoad(events).controls.decisions


def test_why_is_told_only_when_asked(events):
    w = PageTable(events)
    assert (w.controls.why, w.controls.table) == ([], [])
    w.next_decision()
    assert not w.controls.why
    w.controls.show_why = True
    words, line = w.controls.why[-1]
    assert words == w.why()[-1].words
    assert line.startswith("lab_simulator.py:")
    assert w.moments[w.controls.at].kind in line
    w.controls.show_table = True
    assert w.controls.table == w.table
    assert "lab_simulator.py" not in json.dumps(bundle_of(w)[REPLAY])


def test_a_click_asks_about_one_block(events):
    w = PageTable(events)
    w.seek(-1)
    picture = w.children[1]
    picture.selection = "block 2"
    assert w.controls.show_why
    assert w.controls.why
    assert all("2" in words for words, _ in w.controls.why)
    assert [words for words, _ in w.controls.why] == [r.words for r in w.why(block=2)]
    assert picture.selection == ""  # the same cell can be asked again
    w.seek(0)  # moving on forgets the block
    assert [words for words, _ in w.controls.why] == [r.words for r in w.why()]


def test_a_click_on_the_heat_map_names_its_tokens(events):
    w = ExpertLoad(events)
    w.children[1].selection = "cell 1 4"
    assert w.controls.why
    assert all(words.startswith("Layer 1 scores") and "4 (" in words for words, _ in w.controls.why)


def test_strip_moves_its_pictures_together(events):
    w = Strip(events, show=("schedule", "pages", "prefix"))
    w.seek(4)
    steps = [p.frame["step"] for p in w.children[1:]]
    assert len(set(steps)) == 1
    assert [w.text.count(f"Step {steps[0]}:")] == [3]
    with pytest.raises(ValueError, match="show must name pictures of"):
        Strip(events, show=("clock",))


def test_an_empty_recording_is_no_error():
    for make, _ in ALL:
        w = make(Recording())
        assert w.controls.count == 0
        assert w.text.endswith(".")
        assert bundle_of(w)["text/plain"] == w.text
        assert w.why() == []


def test_either_a_recording_or_an_engine(events):
    for given in ({}, {"events": events, "live": Simulator()}):
        with pytest.raises(ValueError, match="give a recording to replay, or live=engine"):
            PageTable(**given)
    w = PageTable(events)
    with pytest.raises(RuntimeError, match="make it with live=engine to step"):
        w.step()


# What stays in the notebook


@pytest.mark.parametrize(("make", "view"), ALL)
def test_bundle_replays_without_a_kernel(events, make, view):
    w = make(events)
    w.seek(2)
    bundle = bundle_of(w)
    assert bundle["text/plain"] == w.text
    assert VIEW in bundle
    captions = [view.caption(view.frame(events, i)) for i in view.moments(events)]
    if REPLAY in bundle:
        body = bundle[REPLAY]
        assert body["captions"] == captions
        assert body["frames"] == [view.frame(events, i) for i in view.moments(events)]
        assert body["tables"] == [view.table(f) for f in body["frames"]]
        assert body["esm"] in MODULES
        assert body["start"] == 2
        w.seek(0)
        assert "start" not in bundle_of(w)[REPLAY]
    else:
        figure = bundle[PLOTLY]
        assert [f["layout"]["title"]["text"] for f in figure["frames"]] == captions
        assert len(figure["layout"]["sliders"][0]["steps"]) == len(captions)
        assert figure["layout"]["title"]["text"] == captions[2]
        assert figure["layout"]["template"] == "none"
        assert figure["layout"]["sliders"][0]["active"] == 2
    body = bundle.get(REPLAY) or bundle[PLOTLY]
    assert size(body) <= LIMIT


@pytest.mark.parametrize(("make", "view"), ALL)
def test_bundle_is_the_same_in_every_run(events, make, view):
    a, b = (make(Recording.from_json(events.to_json()))._repr_mimebundle_() for _ in range(2))
    assert a.pop(VIEW) != b.pop(VIEW)
    assert a == b
    assert "uid" not in json.dumps(a)


def test_axes_do_not_move_between_frames(events):
    """Every frame of a figure has the ranges of its layout; frames change data and title only."""
    figure = bundle_of(ExpertLoad(events))[PLOTLY]
    assert figure["layout"]["xaxis"]["range"] == [-0.5, 7.5]
    assert all(set(f["layout"]) == {"title"} for f in figure["frames"])
    assert {(len(f["data"][0]["z"]), len(f["data"][0]["z"][0])) for f in figure["frames"]} == {(2, 8)}


def numbers(value):
    if isinstance(value, dict):
        return [n for v in value.values() for n in numbers(v)]
    if isinstance(value, list):
        return [n for v in value for n in numbers(v)]
    return [value] if isinstance(value, float) else []


def test_frames_hold_no_floats(events):
    """Floats of different machines differ in the last digit; strict nbval compares every one."""
    for make, _ in ALL:
        bundle = bundle_of(make(events))
        drawn = bundle[REPLAY] if REPLAY in bundle else [f["data"] for f in bundle[PLOTLY]["frames"]]
        assert all(n == round(n, 3) for n in numbers(drawn))
        assert not numbers(bundle.get(REPLAY, {}))


def test_a_long_recording_is_thinned(events):
    long = record(seed=1, requests=30, num_blocks=60, seats=5, budget=30)[0]
    w = PageTable(long)
    body = bundle_of(w)[REPLAY]
    assert size(body) <= LIMIT
    assert body["of"] == w.controls.count > len(body["frames"]) > 10
    assert body["captions"][-1] == pages.caption(pages.frame(long, pages.moments(long)[-1]))
    wide = bundle_of(TokenFlow(long))[PLOTLY]
    assert size(wide) <= LIMIT
    assert len(wide["frames"]) > 10


def test_evenly_keeps_both_ends():
    assert evenly(10, 20) == list(range(10))
    assert evenly(10, 4) == [0, 3, 6, 9]
    assert evenly(10, 1) == [9]
    assert len(set(evenly(1000, 77))) == 77


def test_strip_bundle_lists_its_pictures(events):
    body = bundle_of(Strip(events))[REPLAY]
    assert (body["esm"], [m["esm"] for m in body["more"]]) == ("schedule_chart", ["page_table"])
    assert len(body["frames"]) == len(body["more"][0]["frames"])


def test_modules_are_small_and_stand_alone():
    for name in MODULES:
        text = source(name)
        assert len(text.encode()) <= 10_000
        assert "import " not in text.split("const STYLE")[0]
        assert "http" not in text.replace("http://www.w3.org/", "")
        assert "prefers-reduced-motion" in text or "transition" not in text


# Live


def test_each_step_of_the_engine_is_shown():
    engine = Simulator(seed=5, num_blocks=16)
    w = PageTable(live=engine, num_blocks=16)
    assert engine.trace.on
    assert w.controls.live
    while engine.has_unfinished_requests():
        before = w.controls.count
        w.step()
        assert w.controls.at == w.controls.count - 1
        assert w.controls.count >= before
        truth = engine.history[-1]
        assert {s: t for s, _, t in w.frame["tables"]} == truth["tables"]
    # The same run, recorded, gives the same moments and the same bundle.
    replay = PageTable(record(seed=5, num_blocks=16)[0], num_blocks=16)
    replay.seek(-1)
    assert [e.data for e in w.moments] == [e.data for e in replay.moments]
    assert w._repr_mimebundle_()[REPLAY] == replay._repr_mimebundle_()[REPLAY]


def agrees(w, view):
    """Text, caption and picture tell of the same moment."""
    assert w.controls.caption == w.text == view.caption(w.frame)
    assert w.controls.drawn == w.controls.at
    picture = w.children[1]
    assert (picture.frame if hasattr(picture, "frame") else picture._frame) == w.frame


@pytest.mark.parametrize(("make", "view"), ALL)
def test_text_caption_and_picture_agree_after_each_step(make, view):
    """Also after the first one, which moves `at` from 0 to 0, and when a moment grows while it is shown."""
    engine = Simulator(seed=5, requests=3)
    w = make(live=engine)
    agrees(w, view)
    empty = w.text
    w.step()
    assert w.text != empty
    agrees(w, view)
    while engine.has_unfinished_requests():
        engine.step()  # somebody else
        w.seek(0)
        agrees(w, view)
        w._repr_mimebundle_()
        agrees(w, view)
        w.step()
        agrees(w, view)


def test_a_bundle_of_a_live_widget_is_what_the_widget_shows():
    engine = Simulator(seed=5)
    w = ScheduleChart(live=engine)
    engine.step()
    bundle = bundle_of(w)
    assert bundle["text/plain"] == w.controls.caption
    agrees(w, schedule)


def test_the_first_step_redraws_the_plots():
    engine = Simulator(seed=5)
    w = ExpertLoad(live=engine)
    w.step()
    assert [list(row) for row in w.children[1].data[0].text] == w.frame["counts"] != []


def test_an_idle_engine_is_not_stepped_and_its_idle_steps_are_no_moments():
    engine = Simulator(seed=5, requests=1)
    charts = [make(live=engine) for make, _ in ALL]
    while engine.has_unfinished_requests():
        charts[0].step()
    stepped, counts = len(engine.history), []
    for idle_of_others in (False, True):
        for w in charts:
            w.step()
            w.seek(-1)
        counts.append([w.controls.count for w in charts])
        assert len(engine.history) == stepped
        if not idle_of_others:
            engine.trace.step = 99
            engine.trace.emit("step", "", budget=12, used=0, running=0, waiting=0)
    assert counts[0] == counts[1]
    engine.trace.emit("step", "", budget=12, used=0, running=0, waiting=1)  # somebody waits: to be shown
    charts[4].seek(-1)
    assert charts[4].text.startswith("Step 99: 0 of 12 tokens")


def test_an_llm_is_taken_for_its_engine():
    class LLM:
        engine = Simulator(seed=5)

    class Blocks:
        class pool:
            num_blocks = 24

        block_size = 4

    LLM.engine.blocks = Blocks
    w = PageTable(live=LLM())
    w.step()
    assert len(w.frame["owners"]) == 24
    with pytest.raises(TypeError, match="live must be an Engine or an LLM, got int"):
        ScheduleChart(live=3)
    with pytest.raises(TypeError, match="live must be an Engine or an LLM, got str"):
        PageTable(live="quintet-moe")
    with pytest.raises(TypeError, match=r"events must be a recording .*, got LLM; an engine goes into live="):
        ScheduleChart(LLM())


def test_what_cannot_be_shown_is_clamped_or_refused(events):
    w = ExpertLoad(events)
    for at, shown in ((10**6, w.controls.count - 1), (-7, 0)):
        w.controls.at = at
        assert w.controls.at == shown == w.controls.drawn
    empty = ExpertLoad(Recording())
    empty.controls.at = 3
    assert empty.controls.at == 0
    with pytest.raises(TypeError, match=r"seek takes the number of a moment \(an int\), got 'x'"):
        w.seek("x")
    for wrong in ("foo", "cell", "cell 1", "block x", "seq -1", "seq 1 2", "expert 3"):
        with pytest.raises(ValueError, match=r"selection must be one of block NUMBER, .*, got"):
            w.children[1].selection = wrong
        assert w.children[1].selection == ""
    w.children[1].selection = "cell 99 99"
    assert w.controls.why == []
    quiz = Predict(events, pages.moments(events)[20], "free", num_blocks=16)
    for wrong in (99, -2):
        with pytest.raises(
            traitlets.TraitError, match=f"choice must be in 0..4, or -1 for none yet, got {wrong}"
        ):
            quiz.choice = wrong
    assert not quiz.answered


def test_the_button_steps_and_errors_are_shown():
    engine = Simulator(seed=5)
    w = ScheduleChart(live=engine)
    w.controls._handle_custom_msg({"do": "step"}, [])
    assert w.text.startswith("Step 1: ")

    def broken():
        raise OSError("the cache is on fire")

    engine.step = broken
    w.controls._handle_custom_msg({"do": "step"}, [])
    assert w.controls.caption == "The engine stopped: OSError: the cache is on fire"
    with pytest.raises(OSError, match="on fire"):
        w.step()


def test_steps_of_others_are_seen_and_do_not_move_the_reader():
    engine = Simulator(seed=5)
    w = ScheduleChart(live=engine)
    w.step()
    engine.step()
    engine.step()
    w.seek(0)
    assert (w.controls.at, w.controls.count) == (0, 3)


def test_the_lock_is_held_while_the_engine_steps():
    engine = Simulator(seed=5)
    lock = threading.Lock()
    held = []
    step = engine.step
    engine.step = lambda: (held.append(lock.locked()), step())
    ScheduleChart(live=engine, lock=lock).step()
    engine.lock = lock  # an engine that brings its lock
    ScheduleChart(live=engine).step()
    assert held == [True, True]
    assert not lock.locked()


def test_live_play_runs_to_the_end(monkeypatch):
    monkeypatch.setattr("tinymoe.lab.widgets.live.STEPS_PER_SECOND", 10_000)
    engine = Simulator(seed=5)
    w = ScheduleChart(live=engine)

    async def play():
        task = w.run()
        assert w.run() is task  # a second press changes nothing
        assert w.controls.running
        await task

    asyncio.run(play())
    assert not engine.has_unfinished_requests()
    assert not w.controls.running
    assert w.controls.count == len(engine.history)


def test_live_play_pauses_and_goes_on(monkeypatch):
    monkeypatch.setattr("tinymoe.lab.widgets.live.STEPS_PER_SECOND", 10_000)
    engine = Simulator(seed=5)
    w = ScheduleChart(live=engine)

    async def play():
        w.controls.running = True  # what the button in the browser does
        while w.controls.count < 3:
            await asyncio.sleep(0)
        w.pause()
        for _ in range(5):
            await asyncio.sleep(0.01)
        stopped = w.controls.count
        assert 3 <= stopped <= 4
        assert engine.has_unfinished_requests()
        await w.run()
        return stopped

    stopped = asyncio.run(play())
    assert w.controls.count > stopped
    assert not engine.has_unfinished_requests()


def test_live_play_tells_what_went_wrong():
    engine = Simulator(seed=5)
    w = ScheduleChart(live=engine)
    with pytest.raises(RuntimeError, match="needs a running event loop"):
        w.run()
    assert not w.controls.running

    async def play():
        engine.step = lambda: 1 // 0
        with pytest.raises(ZeroDivisionError):
            await w.run()

    asyncio.run(play())
    assert w.controls.caption.startswith("The engine stopped: ZeroDivisionError")
    assert not w.controls.running


def test_a_live_engine_tells_its_sizes():
    class Pool:
        num_blocks = 77

    class Blocks:
        pool, block_size = Pool, 4

    engine = Simulator(seed=1)
    engine.blocks = Blocks
    frame = PageTable(live=engine).frame
    assert (len(frame["owners"]), frame["block_size"]) == (77, 4)


# Predict


def test_the_trace_is_the_answer_key(events):
    asked = 0
    for question, spec in QUESTIONS.items():
        for at in pages.moments(events)[::7]:
            coming = [e for e in events[at + 1 :] if e.kind == spec.kind]
            try:
                frame = quiz(events, at, question, num_blocks=16)
            except ValueError:
                continue
            asked += 1
            assert frame["choices"][frame["answer"]] == spec.name(coming[0].data[spec.field])
            assert 2 <= len(frame["choices"]) <= 5
            assert len(set(frame["choices"])) == len(frame["choices"])
            assert frame["because"].endswith(".")
    assert asked > 20


def test_predict_counts_and_is_stored(events):
    at = pages.moments(events)[20]
    w = Predict(events, at, "free", num_blocks=16)
    assert not w.answered
    assert not w.right
    bundle = bundle_of(w)
    assert bundle["text/plain"] == w.text
    assert w.text.startswith("Predict: which block loses its last owner next? block ")
    assert bundle[REPLAY]["traits"] == {"choice": -1}
    w.choice = w.frame["answer"]
    assert w.right
    with pytest.raises(ValueError, match="question must be one of"):
        Predict(events, at, "weather")
    with pytest.raises(ValueError, match="no 'evict' event follows event"):
        Predict(events, len(events) - 1, "evict")


def test_names_of_the_lab():
    assert all(getattr(lab, name).__name__ == name for name in lab.__all__)
    assert set(lab.__all__) <= set(dir(lab))
    with pytest.raises(AttributeError, match="has no attribute 'Clock'"):
        _ = lab.Clock


def test_a_trace_that_nobody_stops_is_only_read(events):
    """A widget listens to its engine; it never writes into a recording that was given."""
    before = list(events)
    PageTable(events).seek(5)
    assert list(events) == before
    trace = Trace()
    assert not trace.on


@pytest.mark.parametrize("make", [m for m, _ in ALL])
def test_a_widget_is_whole_when_the_browser_hears_of_it(events, monkeypatch, make):
    """JupyterLab may ask for all states at any moment: nothing may follow the message that opens a widget."""
    sent = []

    class Comm:
        def __init__(self, comm_id, data):
            self.comm_id, self.data, self.kernel = comm_id, data, True

        def send(self, data=None, **_):
            sent.append(data)

        def on_msg(self, callback):
            pass

        def close(self, *_, **__):
            pass

        on_close = close

    opened = []

    def create_comm(data=None, **_):
        opened.append(Comm(f"c{len(opened)}", data))
        return opened[-1]

    monkeypatch.setattr("ipywidgets.widgets.widget.comm.create_comm", create_comm)
    w = make(events)
    assert sent == []
    states = {c.comm_id: c.data["state"] for c in opened}
    assert states[w.controls.comm.comm_id]["count"] == w.controls.count
    assert states[w.controls.comm.comm_id]["caption"] == w.text
    figure = states[w.children[1].comm.comm_id]
    if "_widget_data" in figure:
        assert figure["_widget_data"][0]["type"] in ("heatmap", "sankey")
        assert "tm-plot" in figure["_dom_classes"]
    else:
        assert figure["frame"] == w.frame
