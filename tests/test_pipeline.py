"""Decode steps as a captured graph runs them, and steps started before the last one's tokens are known.

A stand-in (replayed.py) takes the place of captured graphs on a CPU; test_gpu.py does the rest.
"""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replayed import BUCKETS, check_any_order, with_graphs
from tiny_models import GREEDY, NAMES, NEW, alone, cases, engine, finish, seeded, tokens_of

from tinymoe.core.params import SamplingParams
from tinymoe.engine.engine import Engine
from tinymoe.engine.forward.graphs import Inputs, buckets_up_to

ENGINES = {
    "roomy": {},
    "budget-9": {"max_num_batched_tokens": 9, "block_size": 4},
    "three-seats": {"max_num_seqs": 3, "max_num_batched_tokens": 33, "block_size": 8},
    "no-prefix-cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 24, "block_size": 4},
    "tiny-cache": {"num_blocks": 15, "block_size": 4, "max_num_batched_tokens": 24},
    "tiny-cache-of-single-tokens": {"num_blocks": 56, "block_size": 1, "max_num_batched_tokens": 24},
}


def replayed(name, ahead=True, buckets=BUCKETS, **options) -> Engine:
    return with_graphs(engine(name, async_scheduling=ahead, **options), buckets)


def add_all(one, name, params=(GREEDY,), prefix=""):
    for i, case in enumerate(cases(name)):
        one.add_request(f"{prefix}greedy-{i}", case.prompt, GREEDY)
        one.add_request(f"{prefix}seeded-{i}", case.prompt, seeded(i))


def check_all(out, name, prefix=""):
    for i, case in enumerate(cases(name)):
        assert tokens_of(out[f"{prefix}greedy-{i}"]) == [case.answer], f"greedy {i}"
        assert tokens_of(out[f"{prefix}seeded-{i}"]) == [alone(name, i, i)], f"seeded {i}"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("how", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_plain_loop(name, how, ahead):
    one = replayed(name, ahead, **ENGINES[how])
    for turn in range(2):  # the second time with prefix hits
        add_all(one, name, prefix=f"{turn}-")
        check_all(finish(one), name, prefix=f"{turn}-")
    graphs = one.runner.graphs
    assert graphs.launched > 0
    assert (graphs.followed > 0) == ahead
    if how.startswith("tiny-cache"):
        assert one.metrics.preemptions > 0
    pool = one.blocks.pool
    assert pool.num_free == pool.num_blocks
    assert not pool.refs.any()


@pytest.mark.parametrize("ahead", [False, True])
def test_everything_is_counted_as_without_graphs(ahead):
    plain, one = engine("moe", max_num_seqs=16), replayed("moe", ahead, max_num_seqs=16)
    for each in (plain, one):
        add_all(each, "moe")
        finish(each)
    assert one.runner.graphs.launched > 0
    np.testing.assert_array_equal(one.routes.load, plain.routes.load)
    same = ("computed_tokens", "generation_tokens", "finished_requests", "prompt_tokens", "recomputed_tokens")
    assert [getattr(one.metrics, key) for key in same] == [getattr(plain.metrics, key) for key in same]


@pytest.mark.parametrize("name", ["moe", "window"])
def test_stops_and_eos_inside_a_run_end_it_there(name):
    """A stop that only the token tells ends the sequence; the step that ran ahead of it leaves no trace."""
    for i, case in enumerate(cases(name)):
        at = next((k for k in range(3, len(case.answer)) if case.answer[k] not in case.answer[:k]), None)
        if at is None:
            continue
        stop = case.answer[at]
        one = replayed(name, block_size=4)
        one.add_request(
            "stops", case.prompt, SamplingParams(temperature=0, max_tokens=NEW, stop_token_ids=[stop])
        )
        others = [k for k in range(len(cases(name))) if k != i][:3]
        for k in others:
            one.add_request(f"other-{k}", cases(name)[k].prompt, GREEDY)
        out = finish(one)
        assert out["stops"].outputs[0].token_ids == case.answer[: at + 1]
        assert out["stops"].outputs[0].finish_reason == "stop"
        for k in others:
            assert tokens_of(out[f"other-{k}"]) == [cases(name)[k].answer]
        assert one.blocks.pool.num_free == one.blocks.pool.num_blocks


@pytest.mark.parametrize("after", range(1, 9))
def test_abort_while_a_step_runs_ahead(after):
    one = replayed("moe", block_size=2)
    add_all(one, "moe")
    out = {}
    for _ in range(after):
        out |= {o.request_id: o for o in one.step()}
    last = one.abort_request("greedy-3")
    if last is not None:
        assert last.outputs[0].finish_reason == "abort"
        assert tokens_of(last)[0] == cases("moe")[3].answer[: len(tokens_of(last)[0])]
    out |= finish(one)
    for i, case in enumerate(cases("moe")):
        if i != 3:
            assert tokens_of(out[f"greedy-{i}"]) == [case.answer]
        assert tokens_of(out[f"seeded-{i}"]) == [alone("moe", i, i)]
    assert one.blocks.pool.num_free == one.blocks.pool.num_blocks


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_order_of_arrivals_aborts_and_steps(data):
    """What a request gets depends on nothing but itself, with graphs, steps ahead, and options that neither can serve."""
    name = "moe"
    one = replayed(
        name,
        max_num_seqs=data.draw(st.sampled_from([1, 2, 4, 16])),
        block_size=data.draw(st.sampled_from([1, 3, 16])),
        max_num_batched_tokens=data.draw(st.sampled_from([8, 64])),
    )
    check_any_order(one, name, random.Random(data.draw(st.integers(0, 999))))


def test_a_step_ahead_that_fails_to_start_can_be_repeated(monkeypatch):
    """The step before it is booked already: its tokens must not be lost."""
    one = replayed("moe", block_size=2)
    add_all(one, "moe")
    while one.runner.graphs.followed < 2:
        one.step()
    launch = one.runner.graphs.launch

    def broken(rows, tables):
        if rows.token_ids is None:
            raise RuntimeError("no launch")
        return launch(rows, tables)

    monkeypatch.setattr(one.runner.graphs, "launch", broken)
    failed = 0
    out = {}
    for _ in range(3):
        try:
            out |= {o.request_id: o for o in one.step()}
        except RuntimeError:
            failed += 1
    assert failed
    monkeypatch.setattr(one.runner.graphs, "launch", launch)
    check_all(out | finish(one), "moe")


def test_pages_filled_by_steps_ahead_are_found_again():
    """A page enters the prefix index once its last token is known, though a step that runs ahead has booked it before."""
    case, hits = cases("moe")[3], []
    for one in (engine("moe", block_size=2), replayed("moe", block_size=2)):
        one.add_request("first", case.prompt, GREEDY)
        answer = finish(one)["first"].outputs[0].token_ids
        one.add_request("again", [*case.prompt, *answer], GREEDY)
        hits.append(finish(one)["again"].num_cached_tokens)
    assert one.runner.graphs.followed > 0
    assert hits[0] == hits[1] > len(case.prompt)


def test_options_that_need_logits_are_served_beside_graphs():
    case = cases("moe")[2]
    one = replayed("moe")
    one.add_request("bias", case.prompt, GREEDY.clone(logit_bias={7: 100.0}))
    one.add_request("lp", case.prompt, GREEDY.clone(logprobs=2))
    one.add_request("n", case.prompt, SamplingParams(temperature=1, n=3, seed=4, max_tokens=NEW))
    out = finish(one)
    assert set(out["bias"].outputs[0].token_ids) == {7}
    assert out["lp"].outputs[0].token_ids == case.answer
    assert len(out["lp"].outputs[0].logprobs) == len(case.answer)
    plain = engine("moe")
    plain.add_request("n", case.prompt, SamplingParams(temperature=1, n=3, seed=4, max_tokens=NEW))
    assert tokens_of(out["n"]) == tokens_of(finish(plain)["n"])


def test_experts_of_every_token_come_back():
    one, plain = (make("moe", return_routed_experts=True) for make in (replayed, engine))
    for each in (one, plain):
        each.add_request("r", cases("moe")[1].prompt, GREEDY)
    got, wanted = (finish(each)["r"].outputs[0].routed_experts for each in (one, plain))
    np.testing.assert_array_equal(got, wanted)


def test_a_bad_logit_ends_one_request_and_no_other():
    one = replayed("moe")
    add_all(one, "moe")
    while not one.runner.graphs.launched:
        one.step()
    model = one.runner.model

    class Broken:
        config = model.config
        invariant = False

        def __call__(self, *arguments):
            logits = model(*arguments)
            logits[0] = torch.nan
            return logits

    one.runner.model = Broken()
    out = {o.request_id: o for o in one.step()} | {o.request_id: o for o in one.step()}
    one.runner.model = model
    out |= finish(one)
    broken = [key for key, o in out.items() if o.error]
    assert len(broken) in (1, 2)
    assert all("NaN" in out[key].error for key in broken)
    for i, case in enumerate(cases("moe")):
        if f"greedy-{i}" not in broken:
            assert tokens_of(out[f"greedy-{i}"]) == [case.answer]


# The buffers


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 40), width=st.integers(1, 9))
def test_parts_of_the_inputs_do_not_overlap(rows, width):
    x = Inputs(rows, width, "cpu")
    parts = {
        "token_ids": x.token_ids, "positions": x.positions, "next_positions": x.next_positions, "slots": x.slots,
        "context_lens": x.context_lens, "temperature": x.temperature, "seeds": x.seeds, "num_valid": x.num_valid,
        "tables": x.tables,
    }  # fmt: skip
    for number, part in enumerate(parts.values()):
        part.fill_(number + 1)
    for number, (name, part) in enumerate(parts.items()):
        assert (part == number + 1).all(), name
    assert len(x.seeds) >= rows
    assert x.tables.shape == (rows, width)
    assert x.used(rows) == len(x.words)
    assert x.used(1) == len(x.words) - (rows - 1) * width


@given(most=st.integers(1, 2000))
def test_buckets_grow_to_what_is_wanted(most):
    buckets = buckets_up_to(most)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == min(most, 512)
    assert buckets[0] == 1
