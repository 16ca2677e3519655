"""Speculation where steps are captured graphs: a token that verifies a draft is a row of its own, and a draft's passes follow
one another without anybody looking. Graphs are the stand-ins of replayed.py; test_gpu.py captures them.
"""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replayed import check_any_order, with_graphs
from test_spec_exactness import ENGINES, SPECS, add_all, check_all, guessing
from tiny_models import GREEDY, cases, engine, finish, model, seeded, tokens_of

from tinymoe.core.params import SamplingParams


def flying(name, how="draft", buckets=(1, 2, 5, 24, 80), **options):
    return with_graphs(guessing(name, how, **options), buckets)


@pytest.mark.parametrize("how", SPECS)
@pytest.mark.parametrize("engine_of", ["batched", "budget-19", "no-prefix-cache", "tiny-cache"])
@pytest.mark.parametrize("name", ["moe", "window", "dense"])
def test_tokens_are_those_of_the_plain_loop(name, engine_of, how):
    one = flying(name, how, **ENGINES[engine_of])
    for turn in range(2):  # the second time with prefix hits
        add_all(one, name, prefix=f"{turn}-")
        check_all(finish(one), name, prefix=f"{turn}-")
    drafter = one.spec.proposer.drafter
    assert one.runner.graphs.launched > 0
    assert drafter is None or drafter.graphs.followed > 0
    m = one.get_metrics()
    assert m["draft_tokens"] > 0
    if how == "itself":
        assert m["accepted_tokens"] == m["draft_tokens"]
    pool = one.blocks.pool
    assert pool.num_free == pool.num_blocks
    assert not pool.refs.any()


@pytest.mark.parametrize("how", ["draft", "itself", "fewer", "ngram"])
def test_everything_is_counted_as_without_graphs(how):
    eager, one = guessing("moe", how), flying("moe", how)
    for each in (eager, one):
        add_all(each, "moe")
        finish(each)
    np.testing.assert_array_equal(one.routes.load, eager.routes.load)
    for key in (
        "steps",
        "draft_tokens",
        "accepted_tokens",
        "verify_steps",
        "computed_tokens",
    ):
        assert getattr(one.metrics, key) == getattr(eager.metrics, key), key
    assert one.get_metrics()["verify_experts"] == eager.get_metrics()["verify_experts"] > 0


def test_experts_of_verify_steps_are_those_of_their_route_events():
    one = guessing("moe", "itself")
    with one.trace.record() as events:
        add_all(one, "moe")
        finish(one)
    verified = {e.step for e in events if e.kind == "verify"}
    visits = {(e.step, e.layer, x) for e in events if e.kind == "route" for x in e.experts}
    assert one.get_metrics()["verify_experts"] == sum(step in verified for step, _, _ in visits) > 0
    assert any(step not in verified for step, _, _ in visits)


@pytest.mark.parametrize("how", ["draft", "fewer"])
def test_sampled_tokens_under_rejection_are_those_without_graphs(how):
    """Here somebody looks after every pass: what a draft was drawn from is wanted."""
    outs = []
    for build in (guessing, flying):
        one = build("moe", how, spec={"acceptance": "exact"})
        for i in range(4):
            one.add_request(f"s{i}", cases("moe")[i].prompt, seeded(i))
            one.add_request(f"g{i}", cases("moe")[i].prompt, GREEDY)
        outs.append({key: tokens_of(out) for key, out in finish(one).items()})
    assert outs[0] == outs[1]
    assert one.spec.proposer.drafter.graphs.launched > 0


def test_steps_run_ahead_only_where_nothing_is_proposed():
    """Adaptive depth at rest goes on as plain decoding does; drafts end that, and the tokens stay."""
    one = flying("moe", "draft", spec={"adaptive": True, "num_speculative_tokens": 3})
    add_all(one, "moe")
    check_all(finish(one), "moe")
    assert one.runner.graphs.followed > 0
    fixed = flying("moe", "draft")
    add_all(fixed, "moe", num_speculative_tokens=2)
    check_all(finish(fixed), "moe")
    assert fixed.spec.proposer.drafter.graphs.followed > 0
    assert fixed.runner.graphs.followed < one.runner.graphs.followed


def test_at_rest_a_batch_of_any_size_runs_ahead():
    """Also one that was never seen before."""
    one = flying("moe", "draft", spec={"adaptive": True, "num_speculative_tokens": 3}, buckets=(1, 2, 5, 24))
    depth = one.spec.depth
    for n in (1, 4) * 4:
        depth.steps.observe(1, n, 3.0, 0.01 * n)  # n tokens cost n steps
    depth._met, depth._asleep, depth._pause = set(range(9)), True, 10**6
    for i in (1, 2, 3):
        one.add_request(str(i), cases("moe")[i].prompt, GREEDY.clone(max_tokens=60, ignore_eos=True))
    finish(one)
    assert one.metrics.draft_tokens == 0
    assert one.runner.graphs.followed > 40


def test_nothing_follows_a_verification(monkeypatch):
    """Which token comes next depends on how many drafts stay, even where the speculator sees no drafts coming."""
    one = flying("moe", "itself", spec={"num_speculative_tokens": 2})
    monkeypatch.setattr(one.spec, "rests", lambda chunks: True)
    add_all(one, "moe")
    check_all(finish(one), "moe")
    assert one.metrics.accepted_tokens > 0


def test_a_batch_too_large_for_any_graph_runs_without():
    one = flying("moe", "itself", buckets=(1, 4))
    add_all(one, "moe")
    check_all(finish(one), "moe")
    assert one.metrics.accepted_tokens == one.metrics.draft_tokens > 0


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_order_of_arrivals_aborts_and_steps(data):
    """What a request gets depends on nothing but itself, whatever drafts, graphs and its neighbours do."""
    name, how = "moe", data.draw(st.sampled_from(list(SPECS)))
    one = flying(
        name,
        how,
        spec={"adaptive": data.draw(st.booleans())},
        max_num_seqs=data.draw(st.sampled_from([1, 2, 4, 16])),
        block_size=data.draw(st.sampled_from([1, 3, 16])),
        max_num_batched_tokens=data.draw(st.sampled_from([8, 64])),
    )
    check_any_order(one, name, random.Random(data.draw(st.integers(0, 999))), (None, 0, 1, 2))


def test_experts_of_every_token_come_back():
    one, plain = (
        flying("moe", "itself", return_routed_experts=True),
        engine("moe", return_routed_experts=True),
    )
    for each in (one, plain):
        each.add_request("r", cases("moe")[1].prompt, GREEDY)
    got, wanted = (finish(each)["r"].outputs[0].routed_experts for each in (one, plain))
    np.testing.assert_array_equal(got, wanted)
    assert one.metrics.accepted_tokens > 0


def test_a_draft_that_breaks_in_its_graphs_is_only_a_bad_draft():
    one = flying("moe", "draft")
    drafter = one.spec.proposer.drafter

    class Broken:
        config, invariant = drafter.model.config, False

        def __call__(self, *arguments):
            return model_of(*arguments) * float("nan")

    model_of, drafter.model = drafter.model, Broken()
    add_all(one, "moe")
    check_all(finish(one), "moe")
    assert one.metrics.draft_tokens > 0


def test_requests_with_options_that_a_graph_does_not_know():
    case = cases("moe")[2]
    one = flying("moe", "itself")
    one.add_request("bias", case.prompt, GREEDY.clone(logit_bias={7: 100.0}))
    one.add_request("lp", case.prompt, GREEDY.clone(logprobs=2))
    one.add_request("n", case.prompt, SamplingParams(temperature=1, n=3, seed=4, max_tokens=len(case.answer)))
    out = finish(one)
    assert set(out["bias"].outputs[0].token_ids) == {7}
    assert out["lp"].outputs[0].token_ids == case.answer
    assert len(out["lp"].outputs[0].logprobs) == len(case.answer)
    plain = engine(model("moe"))
    plain.add_request(
        "n", case.prompt, SamplingParams(temperature=1, n=3, seed=4, max_tokens=len(case.answer))
    )
    assert tokens_of(out["n"]) == tokens_of(finish(plain)["n"])
