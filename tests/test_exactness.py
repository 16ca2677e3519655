"""The exactness matrix: a request's tokens depend on nothing but itself, token for token in float32.

Greedy is judged by the plain loop, seeded sampling by the request alone in a fresh engine.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import GREEDY, NAMES, NEW, alone, cases, engine, finish, model, seeded, tokens_of

SMALL = [name for name in NAMES if name != "quintet-moe"]
ENGINES = {
    "batched": {},
    "budget-1": {"max_num_batched_tokens": 1, "block_size": 2},
    "budget-2": {"max_num_batched_tokens": 2, "block_size": 3},
    "budget-7": {"max_num_batched_tokens": 7, "block_size": 1},
    "budget-19": {"max_num_batched_tokens": 19, "block_size": 5},
    "one-seat": {"max_num_seqs": 1, "block_size": 64},
    "three-seats": {"max_num_seqs": 3, "max_num_batched_tokens": 33, "block_size": 8},
    "no-prefix-cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 11, "block_size": 4},
    "tiny-cache": {"num_blocks": 15, "block_size": 4, "max_num_batched_tokens": 24},
    "tiny-cache-of-single-tokens": {"num_blocks": 56, "block_size": 1, "max_num_batched_tokens": 24},
}


def add_all(one, name, order=None, prefix=""):
    """Every case twice: greedy and seeded."""
    for i in order or range(len(cases(name))):
        one.add_request(f"{prefix}greedy-{i}", cases(name)[i].prompt, GREEDY)
        one.add_request(f"{prefix}seeded-{i}", cases(name)[i].prompt, seeded(i))


def check_all(out, name, prefix="", order=None):
    for i in order or range(len(cases(name))):
        assert tokens_of(out[f"{prefix}greedy-{i}"]) == [cases(name)[i].answer], f"greedy {i}"
        assert tokens_of(out[f"{prefix}seeded-{i}"]) == [alone(name, i, i)], f"seeded {i}"


@pytest.mark.parametrize("how", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_any_engine_gives_the_same_tokens(name, how):
    one = engine(name, **ENGINES[how])
    order = [4, 2] if how == "budget-1" else None  # one step a token: only a few of them
    add_all(one, name, order)
    check_all(finish(one), name, order=order)
    if how.startswith("tiny-cache"):
        assert one.metrics.preemptions > 0
        assert one.metrics.recomputed_tokens > 0


@pytest.mark.parametrize("name", NAMES)
def test_seeded_answers_are_draws_and_differ_from_greedy(name):
    assert any(alone(name, i, i) != case.answer for i, case in enumerate(cases(name)))
    assert any(alone(name, i, i) != alone(name, i, i + 1) for i in range(3))


@pytest.mark.parametrize("name", NAMES)
def test_permuted_and_arriving_one_by_one(name):
    r = random.Random(3)
    order = r.sample(range(len(cases(name))), len(cases(name)))
    one, out = engine(name, max_num_batched_tokens=10, block_size=4, policy="priority"), {}
    for i in order:
        one.add_request(f"greedy-{i}", cases(name)[i].prompt, GREEDY, priority=r.randint(-2, 2))
        one.add_request(f"seeded-{i}", cases(name)[i].prompt, seeded(i), priority=r.randint(-2, 2))
        for _ in range(r.randint(0, 3)):
            out |= {o.request_id: o for o in one.step()}
    check_all(out | finish(one), name)


@pytest.mark.parametrize("name", NAMES)
def test_prefix_hits_change_nothing(name):
    """Cold, warm, and warm after a stop and after a longer request that went on from here."""
    one = engine(name, block_size=4, max_num_batched_tokens=24)
    add_all(one, name, prefix="cold-")
    check_all(finish(one), name, "cold-")
    add_all(one, name, prefix="warm-")
    out = finish(one)
    check_all(out, name, "warm-")
    long = len(cases(name)) - 1
    assert out[f"warm-greedy-{long}"].num_cached_tokens >= len(cases(name)[long].prompt) // 4 * 4 - 4
    for i, case in enumerate(cases(name)):  # the next turn of a conversation: prompt, answer and more
        one.add_request(f"next-{i}", case.prompt + case.answer[: NEW // 2], GREEDY.clone(max_tokens=NEW // 2))
    out = finish(one)
    for i, case in enumerate(cases(name)):
        assert tokens_of(out[f"next-{i}"]) == [case.answer[NEW // 2 :]]
        if len(case.prompt) > 4:
            assert out[f"next-{i}"].num_cached_tokens >= len(case.prompt) // 4 * 4


@pytest.mark.parametrize("name", SMALL)
def test_prefix_hits_after_a_request_that_stopped(name):
    one = engine(name, block_size=2)
    for i, case in enumerate(cases(name)):
        stop = GREEDY.clone(stop_token_ids=[case.answer[3]])
        one.add_request(f"stops-{i}", case.prompt, stop)
    out = finish(one)
    for i, case in enumerate(cases(name)):
        end = case.answer.index(case.answer[3]) + 1
        assert tokens_of(out[f"stops-{i}"]) == [case.answer[:end]]
        assert out[f"stops-{i}"].outputs[0].finish_reason == "stop"
        assert out[f"stops-{i}"].outputs[0].stop_reason == case.answer[3]
    add_all(one, name)
    check_all(finish(one), name)


@pytest.mark.parametrize("name", SMALL)
def test_salts_share_nothing_and_change_nothing(name):
    one = engine(name, block_size=4)
    prompt = cases(name)[-1].prompt
    for salt in ("a", "b"):
        for turn in (0, 1):
            one.add_request(salt, prompt, GREEDY, cache_salt=salt)
            out = finish(one)[salt]
            assert tokens_of(out) == [cases(name)[-1].answer]
            assert (out.num_cached_tokens > 0) == bool(turn)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("when", ["queued", "in-prefill", "in-decode", "preempted"])
def test_an_aborted_neighbour_changes_nothing(name, when):
    r = random.Random(1)
    options = {"max_num_batched_tokens": 12, "block_size": 4, "max_num_seqs": 20}
    if when == "preempted":
        options |= {"num_blocks": 15, "max_num_batched_tokens": 64}
    one = engine(name, **options)
    neighbour = [r.randrange(model(name).config.vocab_size) for _ in range(30)]
    add_all(one, name, order=[4, 3])
    one.add_request("victim", neighbour, seeded(9, max_tokens=16, n=2))
    add_all(one, name, order=[0, 1, 2, 5, 6])
    victim, out = one._requests["victim"].sequences[0], {}
    reached = {
        "queued": lambda: True,
        "in-prefill": lambda: 0 < victim.num_computed_tokens < 30,
        "in-decode": lambda: victim.num_tokens > 33,
        "preempted": lambda: victim.status == 2,
    }[when]
    for _ in range(300):
        if reached():
            break
        out |= {o.request_id: o for o in one.step()}
    assert reached()
    ended = one.abort_request("victim")
    assert ended.finished
    assert {c.finish_reason for c in ended.outputs} == {"abort"}
    assert one.abort_request("victim") is None
    check_all(out | finish(one), name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": 24, "block_size": 4}, {"max_num_batched_tokens": 5, "block_size": 3}]
)
def test_n_answers_are_those_of_separate_requests(name, options):
    case = cases(name)[5]
    one = engine(name, max_num_seqs=5, **options)
    one.add_request("many", case.prompt, seeded(40, n=4))
    one.add_request("other", cases(name)[3].prompt, GREEDY)
    out = finish(one)
    assert tokens_of(out["many"]) == [alone(name, 5, 40 + i) for i in range(4)]
    assert [c.index for c in out["many"].outputs] == [0, 1, 2, 3]
    assert tokens_of(out["other"]) == [cases(name)[3].answer]
    assert len({tuple(t) for t in tokens_of(out["many"])}) > 1
    if options.get("num_blocks"):
        assert one.metrics.preemptions > 0


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_a_needle_among_random_neighbours(seed):
    """Random model, engine, neighbours, arrivals and aborts: the needles never notice."""
    r = random.Random(seed)
    name, size = r.choice(SMALL), r.randint(1, 9)
    one = engine(
        name,
        block_size=size,
        num_blocks=-(-60 // size) + r.choice([0, 2, 8, 100]),
        max_num_seqs=r.randint(3, 9),
        max_num_batched_tokens=r.choice([1, 3, 8, 20, 64, 2048]),
        enable_prefix_caching=r.random() < 0.8,
        policy=r.choice(["fcfs", "priority"]),
        long_prefill_token_threshold=r.choice([0, 4]),
    )
    needles = {f"{kind}-{i}": i for kind in ("greedy", "seeded") for i in r.sample(range(7), 2)}
    hay = [f"hay-{i}" for i in range(r.randint(0, 7))]
    out, queue = {}, r.sample([*needles, *hay], len(needles) + len(hay))
    for request_id in queue:
        if request_id in needles:
            i = needles[request_id]
            params = GREEDY if request_id.startswith("greedy") else seeded(i)
            prompt = cases(name)[i].prompt
        else:
            start = r.choice(cases(name)).prompt[: r.randint(0, 30)]
            prompt = start + [r.randrange(61) for _ in range(r.randint(1, 10))]
            params = seeded(
                r.randint(0, 99), max_tokens=r.randint(1, 16), n=r.randint(1, 3), top_p=r.choice([1, 0.7])
            )
        one.add_request(
            request_id, prompt, params, priority=r.randint(0, 2), cache_salt=r.choice([None, None, "s"])
        )
        for _ in range(r.choice([0, 0, 1, 5])):
            out |= {o.request_id: o for o in one.step()}
        if r.random() < 0.2:
            one.abort_request(r.choice(["hay-0", "hay-1", "hay-2"]))
    out |= finish(one)
    for request_id, i in needles.items():
        wanted = cases(name)[i].answer if request_id.startswith("greedy") else alone(name, i, i)
        assert tokens_of(out[request_id]) == [wanted]
