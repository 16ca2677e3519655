"""Ctrl-C at any moment, dropped streams, foreign requests: nothing leaks, nothing hangs, nobody else is disturbed."""

import gc
import os
import random
import signal
import sys
import threading
import time

import pytest

from tinymoe import LLM, SamplingParams
from tinymoe.core.interrupts import Section
from tinymoe.engine.intake import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = GREEDY.clone(max_tokens=24)


@pytest.fixture(scope="module")
def shared():
    return LLM("quintet-draft", num_blocks=96)


@pytest.fixture
def llm(shared):
    yield shared
    at_rest(shared)


@pytest.fixture(autouse=True)
def _handled():
    """Python's own handler, whatever this process inherited: jobs in the background of a shell ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def at_rest(llm):
    engine, pool = llm.engine, llm.engine.blocks.pool
    assert not engine.has_unfinished_requests()
    assert pool.num_free == pool.num_blocks
    assert not pool.refs.any()
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert sorted(engine.blocks._free_rows) == list(range(engine.config.max_num_seqs))


def raised(function, *arguments):
    """Whether the call ended with KeyboardInterrupt."""
    try:
        function(*arguments)
    except KeyboardInterrupt:
        return True
    return False


# Section


def interrupt():
    signal.raise_signal(signal.SIGINT)


def test_a_section_is_done_to_its_end_and_then_interrupted():
    section, done = Section(), []

    def work():
        with section:
            with section:
                interrupt()
                done.append("inner")
            done.append("outer")
        done.append("never")

    assert raised(work)
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_open_part_is_interrupted_at_once_and_only_once():
    section, done = Section(), []

    def work():
        with section:
            try:
                with section.interruptible():
                    done.append("open")
                    interrupt()
                    done.append("never")
            except BaseException:
                interrupt()  # a second Ctrl-C while the first is cleaned up
                done.append("undone")
                raise

    assert raised(work)
    assert done == ["open", "undone"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_waits_is_handled_where_the_section_opens():
    section, done = Section(), []

    def work():
        with section:
            interrupt()
            with section.interruptible():
                done.append("never")

    assert raised(work)
    assert done == []


def test_a_section_inside_another_ones_stays_closed():
    outer, inner, done = Section(), Section(), []

    def work():
        with outer:
            with inner, inner.interruptible():
                interrupt()
                done.append("inner")
            done.append("outer")

    assert raised(work)
    assert done == ["inner", "outer"]


def test_other_handlers_are_called_and_put_back():
    seen = []
    handler = lambda number, frame: seen.append(number)  # noqa: E731  (getsignal must return the same object)
    before = signal.signal(signal.SIGINT, handler)
    try:
        section = Section()
        with section:
            interrupt()
            assert seen == []
            with section.interruptible():
                assert len(seen) == 1
                interrupt()
                interrupt()
                assert len(seen) == 3
        assert signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with section:
            interrupt()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_in_a_section_comes_out_and_the_handler_is_put_back():
    with pytest.raises(ZeroDivisionError), Section():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_section_in_another_thread_leaves_signals_alone():
    seen = []

    def work():
        with Section() as section, section.interruptible():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_a_finaliser_waits_for_the_end_of_the_section():
    section, done = Section(), []
    with section:
        section.after(lambda: done.append("late"))
        assert done == []
    assert done == ["late"]
    section.after(lambda: done.append("now"))
    assert done == ["late", "now"]


# Streams that nobody reads to the end


@pytest.mark.parametrize("read", [0, 1, 3])
@pytest.mark.parametrize("how", ["close", "drop", "with"])
def test_a_stream_that_is_given_up_leaves_nothing(llm, how, read):
    stream = llm.stream("It was", LONG)
    for _ in range(read):
        next(stream)
    if how == "close":
        stream.close()
        assert list(stream) == []
    elif how == "with":
        with stream:
            pass
    else:
        del stream
        gc.collect()
    at_rest(llm)


def test_a_stream_collected_in_the_midst_of_a_step_is_aborted_after_it(llm):
    other = llm.stream("It was", LONG)
    next(other)
    wanted = llm.generate("12+35=", GREEDY)[0].outputs[0].token_ids
    settle, doomed = llm.engine.blocks.settle, [other]
    del other

    def collect():
        running = len(llm.engine.scheduler.running)
        assert running == 1 + len(doomed)
        doomed.clear()
        gc.collect()
        assert len(llm.engine.scheduler.running) == running
        settle()

    llm.engine.blocks.settle = collect
    try:
        assert llm.generate("12+35=", GREEDY)[0].outputs[0].token_ids == wanted
    finally:
        del llm.engine.blocks.settle


# Aborts and requests from outside


def test_a_stream_whose_request_is_aborted_ends(llm):
    stream = llm.stream("It was", LONG)
    first = next(stream)
    (request_id,) = llm.engine._requests
    assert llm.engine.abort_request(request_id).outputs[0].finish_reason == "abort"
    rest = list(stream)
    assert [d.finish_reason for d in rest] == [None] * (len(rest) - 1) + ["abort"]
    unread = llm.stream("It was", LONG)
    llm.engine.abort_request(next(iter(llm.engine._requests)))
    assert [d.finish_reason for d in unread] == ["abort"]
    assert first.token_ids


def test_generate_whose_request_is_aborted_ends(llm):
    sample, calls = llm.engine.sampler.sample, []

    def abort(*arguments):
        calls.append(1)
        if len(calls) == 3:
            llm.engine.drop_requests(next(r.outbox for r in llm.engine._requests.values()))
        return sample(*arguments)

    llm.engine.sampler.sample = abort
    try:
        outputs = llm.generate(["It was", "12+35="], LONG)
    finally:
        del llm.engine.sampler.sample
    assert [o.outputs[0].finish_reason for o in outputs] == ["abort", "abort"]
    assert [len(o.outputs[0].token_ids) for o in outputs] == [3, 3]


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_the_outputs_of_foreign_requests_wait_for_the_next_step(llm, how):
    wanted = llm.generate("12+35=", GREEDY)[0].outputs[0].token_ids
    llm.engine.add_request("mine", "12+35=", GREEDY)
    llm.engine.add_request("longer", "It was", GREEDY.clone(max_tokens=40))
    if how == "generate":
        llm.generate("It was", LONG)
    else:
        assert sum(len(d.token_ids) for d in llm.stream("It was", LONG)) == 24
    steps = llm.get_metrics()["steps"]
    assert llm.engine.has_unfinished_requests()
    out = {}
    while llm.engine.has_unfinished_requests():
        out |= {o.request_id: o for o in llm.engine.step()}
    assert out.keys() == {"mine", "longer"}
    assert out["mine"].outputs[0].token_ids == wanted
    assert all(o.finished for o in out.values())
    assert 0 < llm.get_metrics()["steps"] - steps < 20


def test_an_id_used_again_before_its_output_was_fetched(llm):
    llm.engine.add_request("mine", "12+35=", GREEDY)
    llm.generate("It was", LONG)
    llm.engine.add_request("mine", "It was", GREEDY)
    llm.generate("It was", LONG)
    outputs = llm.engine.step()
    assert [o.request_id for o in outputs] == ["mine", "mine"]
    assert [o.prompt for o in outputs] == ["12+35=", "It was"]
    assert llm.engine.step() == []


def test_steps_of_others_feed_a_stream(llm):
    wanted = list(llm.stream("It was", GREEDY))
    stream = llm.stream("It was", GREEDY)
    while llm.engine.has_unfinished_requests():
        assert llm.engine.step() == []
    assert list(stream) == wanted


# What fails leaves nothing


def test_a_request_whose_text_cannot_be_made_is_not_there(llm):
    class Broken:
        def __getattr__(self, name):
            return getattr(llm.get_tokenizer(), name)

        def text_state(self, *arguments):
            raise RequestError("no text")

    engine = llm.engine
    before = (engine.intake.count, engine._next_seq_id, engine.metrics.requests, engine.metrics.prompt_tokens)
    text, engine.text = engine.text, Broken()
    try:
        with pytest.raises(RequestError, match="no text"):
            engine.add_request("a", "It was", GREEDY)
    finally:
        engine.text = text
    at_rest(llm)
    after = (engine.intake.count, engine._next_seq_id, engine.metrics.requests, engine.metrics.prompt_tokens)
    assert before == after


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a bug")], ids=str)
@pytest.mark.parametrize("place", ["_append", "_finish", "settle", "deliver", "routes"])
def test_a_step_that_cannot_be_recorded_ends_its_requests_and_no_others(llm, place, error):
    engine = llm.engine
    wanted = llm.generate("12+35=", GREEDY)[0].outputs[0].token_ids
    streams = [llm.stream("It was", LONG), llm.stream("12+35=", GREEDY)]
    next(streams[0])
    holder = {"settle": engine.blocks, "deliver": engine.reporter, "routes": engine.routes}.get(place, engine)
    name = "settle" if place == "routes" else place

    def broken(*arguments):
        delattr(holder, name)
        raise error

    setattr(holder, name, broken)
    with pytest.raises(type(error)):
        llm.generate("def f", GREEDY)
    for stream in streams:
        last = list(stream)[-1]
        assert last.finish_reason == "error"
    at_rest(llm)
    assert llm.generate("12+35=", GREEDY)[0].outputs[0].token_ids == wanted


# Ctrl-C, for real


def test_ctrl_c_at_every_call_of_a_step(llm):
    """One trial for each function that is called while two streams and a generate run: SIGINT comes as it is entered."""
    prompts = ["It was", "def f(a", "12+35="]
    wanted = [llm.generate(p, LONG)[0].outputs[0].token_ids for p in prompts]

    def trial(count):
        left, died = [count], False
        streams = [llm.stream(p, LONG) for p in prompts[:2]]
        got = [list(next(s).token_ids) for s in streams]

        def watch(frame, event, argument):
            if event == "call" and "/tinymoe/" in frame.f_code.co_filename:
                left[0] -= 1
                if left[0] == 0:
                    interrupt()

        sys.setprofile(watch)
        try:
            llm.generate(prompts[2], LONG)
        except KeyboardInterrupt:
            died = True
        finally:
            sys.setprofile(None)
        for stream, ids in zip(streams, got):
            for delta in stream:
                ids += delta.token_ids
        assert got == wanted[:2]
        at_rest(llm)
        assert llm.generate(prompts[2], LONG)[0].outputs[0].token_ids == wanted[2]
        return died, left[0] > 0

    r = random.Random(7)
    died = 0
    for _ in range(40):
        hit, past = trial(int(10 ** r.uniform(0, 4)))
        died += hit
        assert hit or past
    assert died > 20


def test_ctrl_c_at_random_moments(llm):
    """A thread sends SIGINT while streams, batches, aborts and foreign requests go on in the main thread."""
    r = random.Random(11)
    prompts = ["It was", "def f(a", "12+35=", "KING RICHARD:\n"]
    wanted = {p: llm.generate(p, LONG)[0].outputs[0].token_ids for p in prompts}
    died = 0
    for trial in range(40):
        streams = [llm.stream(p, LONG) for p in prompts[:2]]
        got = [list(next(s).token_ids) for s in streams]
        delays = [r.uniform(0, 0.05), *([r.uniform(0, 0.003)] if r.random() < 0.3 else [])]
        over = threading.Event()

        def send(delays=delays, over=over):
            for delay in delays:
                over.wait(delay)
                if not over.is_set():
                    os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=send)
        try:
            thread.start()
            try:
                for turn in range(100):
                    llm.engine.add_request(f"{trial}-{turn}", prompts[3], GREEDY)
                    llm.generate(prompts[2:], GREEDY.clone(max_tokens=2))
                    llm.engine.abort_request(f"{trial}-{turn}")
                    llm.stream(prompts[2], GREEDY)
            finally:
                over.set()
        except KeyboardInterrupt:
            died += 1
        while True:
            try:
                thread.join()
                time.sleep(0)
                break
            except KeyboardInterrupt:
                continue
        for stream, ids in zip(streams, got):
            for delta in stream:
                ids += delta.token_ids
        assert got == [wanted[p] for p in prompts[:2]]
        gc.collect()
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
        at_rest(llm)
    assert died > 20
