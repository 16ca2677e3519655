"""How many tokens are proposed: cost model, acceptance, and choices, by an injected clock; and what a configuration may say."""

import numpy as np
import pytest
import torch
from tiny_models import GREEDY, cases, engine, finish, model, seeded, tokens_of

from tinymoe.core.config import EngineConfig, SpeculativeConfig
from tinymoe.core.model_config import ConfigError, LayerConfig, ModelConfig
from tinymoe.core.params import SamplingParams
from tinymoe.engine.engine import Engine
from tinymoe.engine.intake import RequestError
from tinymoe.engine.spec.depth import CHOSEN_FOR, DOZE, EXPLORE, GAIN, LONGEST_REST, REST, Depth
from tinymoe.engine.spec.estimates import Acceptance, CostModel, chances
from tinymoe.engine.spec.ngram import Lookup, NgramDrafter
from tinymoe.model.decoder import Decoder

A, B, C = 0.004, 0.0002, 0.0005


def visits(n, experts=64, k=6):
    """Distinct experts that n tokens with independent uniform choices visit: the closed form, made up for these tests."""
    return experts * (1 - (1 - k / experts) ** n)


def line(n):
    return A + B * visits(n) + C * n


def taught(cost=line, sizes=(1, 2, 3, 5, 9, 17), times=8, sequences=(1,), price=0.0):
    """Steps of one sequence with n - 1 drafts, by cost(n), and a price for drafts."""
    steps = CostModel()
    for _ in range(times):
        for s in sequences:
            for n in sizes:
                if n >= s:
                    steps.observe(s, n, visits(n), cost(n) + price * (n > s))
    return steps


def test_the_cost_model_finds_the_costs():
    steps = taught(price=0.003)
    assert (steps.a, steps.b, steps.c, steps.d) == pytest.approx((A, B, C, 0.003), rel=0.03)
    n = np.array([1, 4, 9, 13])
    assert steps.seconds(1, n) == pytest.approx(line(n) + 0.003 * (n > 1), rel=0.05)


def test_a_first_draft_costs_its_price_at_once():
    """Plain steps are cheap and verifications dear: between them lies a step, not a slope."""
    steps = taught(lambda n: 0.004 + 1e-5 * n, sizes=(64, 128, 320), sequences=(64,), price=0.004)
    assert steps.seconds(64, np.array([64, 65, 66])) == pytest.approx([0.0046, 0.0086, 0.0086], rel=0.05)


def test_batches_of_another_size_have_times_of_their_own():
    steps = CostModel()
    for _ in range(8):
        for sequences, price in ((4, 0.0), (64, 0.005)):
            for n in (64, 128):
                steps.observe(sequences, n, visits(n), 0.004 + 1e-5 * n + price)
    few, many = (steps.seconds(sequences, np.array([128]))[0] for sequences in (4, 64))
    assert (few, many) == pytest.approx((0.00528, 0.01028), rel=0.1)
    assert steps.seconds(5, np.array([128]))[0] == few  # as many, by powers of two
    assert steps.seconds(9, np.array([128]))[0] == few  # the nearest that is known


def test_a_rare_step_counts_while_there_is_no_other():
    """Its experts count all the same: without them nothing of that size would be remembered."""
    steps = CostModel()
    steps.observe(4, 4, 9.0, 0.03, rare=True)
    assert 4 in steps
    assert steps.seconds(4, np.array([4]))[0] > 0.01
    for _ in range(6):
        steps.observe(4, 4, None, 0.01)
        steps.observe(4, 4, None, 0.03, rare=True)
    assert steps.seconds(4, np.array([4]))[0] == pytest.approx(0.01, rel=0.05)


def test_costs_are_never_negative():
    steps = taught(lambda n: 0.01 - 0.0001 * n)
    assert min(steps.a, steps.b, steps.c, steps.d) >= 0


def test_a_dense_model_visits_nothing_and_is_fitted_all_the_same():
    steps = CostModel()
    for n in (2, 3, 4, 8) * 8:
        steps.observe(1, n, 0, A + C * n)
    assert (steps.b, steps.c) == pytest.approx((0, C), rel=0.02)
    assert steps.a + steps.d == pytest.approx(A, rel=0.02)


def test_a_neighbour_that_steals_the_machine_for_a_while_changes_little():
    steps, noise = CostModel(), np.random.default_rng(1)
    for i in range(400):
        n = (1, 2, 3, 5, 9)[i % 5]
        steps.observe(1, n, visits(n), line(n) * (100 if noise.random() < 0.15 else 1))
    n = np.array([1, 2, 5, 9])
    assert steps.seconds(1, n) == pytest.approx(line(n), rel=0.1)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
def test_acceptance_comes_to_what_is_true(rate):
    generator, one = np.random.default_rng(2), Acceptance(0.5, weight=4, fade=0.99)
    for _ in range(600):
        accepted = 0
        while accepted < 4 and generator.random() < rate:
            accepted += 1
        one.count(accepted, 4)
    assert one.rate == pytest.approx(min(rate, 0.99), abs=0.06)


@pytest.mark.parametrize("fade", [0.5, 0.95])
def test_acceptance_is_a_mean_that_forgets_draft_by_draft(fade):
    """By the plain loop: every examined draft counts 1, those before it `fade` times what they did."""
    generator, one, kept, seen = np.random.default_rng(5), Acceptance(0.5, fade=fade), 0.0, 0.0
    for _ in range(50):
        drafted = int(generator.integers(1, 6))
        accepted = int(generator.integers(0, drafted + 1))
        one.count(accepted, drafted)
        for place in range(min(accepted + 1, drafted)):
            kept, seen = fade * kept + (place < accepted), fade * seen + 1
        assert (one.kept, one.seen) == pytest.approx((kept, seen))


def test_what_was_examined_is_forgotten_with_the_text_that_comes_without_drafts():
    all_of_them = Acceptance(0.5)
    for _ in range(200):
        all_of_them.count(4, 4)
    one = Acceptance(all_of_them)
    for _ in range(60):
        one.count(0, 4)
    low = one.rate
    one.reach(one.at + 20)
    middle = one.rate
    one.reach(one.at + 800)
    assert low < 0.35 < 0.4 < middle < one.rate == pytest.approx(all_of_them.rate)


def test_chances_are_means_over_what_the_rate_may_be():
    """By simulation: r from a Beta distribution, then as many drafts as are kept in a row."""
    generator = np.random.default_rng(3)
    r = generator.beta(0.8 * 12, 0.2 * 12, 200_000)
    expected = [(r**k).mean() for k in range(1, 7)]
    got = chances(np.array([0.8, 0.8]), np.array([12.0, 1e9]), 6)
    assert got[0] == pytest.approx(expected, rel=0.01)
    assert got[1] == pytest.approx(0.8 ** np.arange(1, 7))
    assert (got[0, 1:] > got[1, 1:]).all()


def test_little_evidence_leaves_the_prior():
    one = Acceptance(0.7)
    assert one.rate == pytest.approx(0.7)
    one.count(0, 4)
    assert 0.5 < one.rate < 0.7


# Choices


def chooser(most=6, pass_seconds=0.0005, sizes=range(1, 70), cost=line):
    depth = Depth(most)
    depth.steps = taught(cost, sizes, sequences=(1, 2, 4, 8))
    depth._trials, depth._met = [], set(range(9))
    for _ in range(4):
        depth.drafts.observe(1, 2, 2 * pass_seconds)
    return depth


def best(rate, requests, most, pass_seconds, cost=lambda n: A + B * visits(n) + C * n):
    """Expected tokens per second of each depth, by the formula of Leviathan et al."""
    depths = np.arange(most + 1)
    tokens = requests * (1 - rate ** (depths + 1)) / (1 - rate)
    return tokens / (cost(requests * (depths + 1)) + depths * pass_seconds)


@pytest.mark.parametrize("rate", [0.1, 0.4, 0.7, 0.9])
@pytest.mark.parametrize("requests", [1, 4, 8])
@pytest.mark.parametrize("pass_seconds", [0.0001, 0.001, 0.004])
def test_the_choice_is_as_good_as_the_best_fixed_depth(rate, requests, pass_seconds):
    depths = chooser(pass_seconds=pass_seconds).choose([rate] * requests, [6] * requests)
    speed = best(rate, requests, 6, pass_seconds)
    n = requests + sum(depths)
    tokens = requests + sum(rate**i for d in depths for i in range(1, d + 1))
    mine = tokens / (A + B * visits(n) + C * n + max(depths) * pass_seconds)
    assert mine >= speed.max() / GAIN * 0.98


def test_where_it_cannot_pay_nothing_is_proposed():
    assert chooser(pass_seconds=0.02).choose([0.5], [6]) == [0]
    assert chooser(cost=lambda n: 0.005 * n).choose([0.9], [6]) == [0]  # n tokens cost n steps
    assert chooser(cost=lambda n: 0.005 + 0 * n).choose([0.95], [6]) == [6]  # tokens are free


def test_requests_that_are_guessed_well_get_more():
    depths = chooser().choose([0.95, 0.05, 0.6], [6, 6, 6])
    assert depths[0] > depths[2] >= depths[1]


def test_limits_hold():
    assert chooser(cost=lambda n: 0.005 + 0 * n).choose([0.95, 0.95], [2, 0]) == [2, 0]


def test_a_small_gain_changes_nothing():
    """Near the point where two depths are equal, times that flutter do not make it jump."""
    depth = chooser(cost=lambda n: 0.004 + 0.0015 * n)
    first = depth.choose([0.6], [6])
    for rate in (0.59, 0.61, 0.595, 0.605) * 4:
        assert depth.choose([rate], [6]) == first


def test_a_new_number_of_requests_is_tried_once_unless_it_looks_hopeless():
    depth = chooser(pass_seconds=0.0001)
    depth._met = {1}
    tried = [depth.choose([0.7] * 8, [6] * 8) for _ in range(8)]
    assert tried == [[d] * 8 for d in (3, 3, 0, 0, 6, 6, 0, 0)]
    assert max(depth.choose([0.7] * 9, [6] * 9)) not in (0, 6)  # as many, by powers of two
    hopeless = chooser(pass_seconds=0.1)
    hopeless._met = {1}
    assert hopeless.choose([0.7] * 8, [6] * 8) == [0] * 8


@pytest.mark.parametrize("room", [0, 20, 36])
def test_a_step_with_drafts_stays_within_what_a_graph_takes(room):
    depth = Depth(6, most_tokens=64 + room)
    seen = [
        sum(depths) for depths, _, _ in live(depth, lambda step: 0.95, lambda n: 0.01 + 1e-5 * n, 200, 64)
    ]
    assert max(seen) <= room
    assert max(seen) >= 0.8 * room


@pytest.mark.parametrize(("requests", "room"), [(8, 3), (40, 10), (70, 12), (5, 0), (5, -3)])
def test_where_there_is_no_room_for_all_some_are_tried(requests, room):
    """At rest, too, with drafts that have become good; and never more than the room."""
    depth = Depth(4, most_tokens=requests + room)
    depth.acceptance.seen = 200.0  # all of them were rejected
    chosen = live(depth, lambda step: 0.99, lambda n: 0.01 + 1e-6 * n, 600, requests, pass_seconds=1e-5)
    drafted = [sum(depths) for depths, _, _ in chosen]
    assert max(drafted) <= max(0, room)
    if room > 0:
        assert np.mean(drafted[-100:]) > 0.8 * room
        some = depth.choose([0.9] * 8, [0, 0, 0, 1, 0, 8, 0, 2])
        assert some[0] == some[1] == some[2] == some[4] == some[6] == 0


def test_a_coarse_clock_and_one_that_is_set_back_harm_nobody():
    steps = CostModel()
    for i, seconds in enumerate([0.016, 0.0, 0.0, -0.5, 0.0, 0.016, 0.0, 0.0, 0.032, -1e-3] * 5):
        steps.observe(1, 1 + i % 3, 3.0, seconds)
    assert np.isfinite(steps.seconds(1, np.arange(1, 9))).all()
    assert (steps.seconds(1, np.arange(1, 9)) > 0).all()


def test_a_choice_holds_for_a_few_steps_like_the_first():
    depth = chooser(pass_seconds=0.0001)
    chosen = depth.choose([0.7] * 3, [6, 6, 2])
    assert any(chosen)
    assert depth.kept([6, 6, 1], 0) is None
    assert depth.kept([6, 6, 2], 1) is None
    while (again := depth.kept([6, 6, 2], 0)) is not None:
        assert again == chosen
    assert depth._since % CHOSEN_FOR == CHOSEN_FOR - 1


def test_one_lucky_request_does_not_make_all_wait_for_a_deep_draft():
    """A pass costs all the same for one as for all: 6 passes for the sake of one do not pay here, though its deep drafts
    are likelier than the second ones of the others."""
    depth = chooser(pass_seconds=0.001, cost=lambda n: 0.004 + 0.0001 * n)
    depths = depth.choose([0.97] + [0.6] * 7, [6] * 8)

    def speed(depths):
        tokens = sum(r**i for r, d in zip([0.97] + [0.6] * 7, depths) for i in range(d + 1))
        return tokens / (0.004 + 0.0001 * (8 + sum(depths)) + 0.001 * max(depths))

    every = [speed([min(k, 6)] + [j] * 7) for k in range(7) for j in range(k + 1)]
    assert speed(depths) >= max(every) / GAIN
    assert max(depths) < 6


def test_no_more_experts_are_predicted_than_there_are():
    steps = CostModel(most_experts=40)
    for n in (1, 2, 4, 8) * 4:
        steps.observe(1, n, 4 * n, A + B * 4 * n)
    assert steps.experts(np.array([8, 16, 1000])).tolist() == [32, 40, 40]


@pytest.mark.parametrize("seen", [1, 2, 8])
@pytest.mark.parametrize("most", [1, 4])
def test_one_number_of_tokens_is_enough_to_choose(seen, most):
    """A budget that every step fills leaves one point to fit: choices are made all the same, and sound ones."""
    depth = Depth(most)
    depth._trials, depth._met = [], set(range(9))
    for _ in range(5):
        depth.steps.observe(1, seen, 3.0, 0.01)
    for requests in (1, 2, 5):
        depths = depth.choose([0.6] * requests, [most] * requests)
        assert len(depths) == requests
        assert all(0 <= d <= most for d in depths)


def test_costs_are_told_for_any_shape():
    steps, n = taught(), np.array([[1, 2, 3], [4, 9, 17]])
    for known in (steps, CostModel(), taught(sizes=(8,))):
        for told in (known.experts, lambda n, known=known: known.seconds(1, n)):
            assert told(n).shape == n.shape
            assert told(n).ravel().tolist() == pytest.approx(told(n.ravel()).tolist())


def test_good_news_is_believed_at_once():
    """One time below the line of all others was possible; one above it may be the clock's."""
    for factor, least, most in ((0.5, 0.45, 0.6), (2.0, 1.1, 1.7)):
        steps = taught()
        steps.observe(1, 12, visits(12), factor * line(12))
        assert least < steps.seconds(1, np.array([12]))[0] / line(12) < most


def live(depth, rate, cost, steps, requests=1, pass_seconds=0.001, seed=0):
    """Depths of so many steps, on a made-up clock: rate(step) keeps a draft, cost(n) are the seconds of n tokens."""
    generator, chosen = np.random.default_rng(seed), []
    known = [Acceptance(depth.acceptance) for _ in range(requests)]
    for step in range(steps):
        if depth.dozes(requests):
            depth.skip()
            depths = [0] * requests
        else:
            rates, evidence = [one.rate for one in known], [one.evidence for one in known]
            depths = depth.choose(rates, [depth.most] * requests, evidence=evidence)
        tokens = 0
        for one, drafted in zip(known, depths):
            one.reach(one.at)
            lost = np.flatnonzero(generator.random(drafted) >= rate(step))
            kept = int(lost[0]) if len(lost) else drafted
            if drafted:
                one.count(kept, drafted)
                depth.acceptance.count(kept, drafted)
                one.at += kept + 1
            else:
                one.reach(one.at + 1)
            tokens += kept + 1
        n = requests + sum(depths)
        seconds = max(depths) * pass_seconds
        if seconds:
            depth.drafts.observe(sum(d > 0 for d in depths), max(depths), seconds)
        depth.steps.observe(requests, n, visits(n), cost(n))
        depth.took(cost(n) + seconds)
        chosen.append((depths, tokens, cost(n) + seconds))
    return chosen


def speed(chosen):
    return sum(tokens for _, tokens, _ in chosen) / sum(seconds for *_, seconds in chosen)


@pytest.mark.parametrize("requests", [1, 4, 32])
@pytest.mark.parametrize(("rate", "pass_seconds"), [(0.3, 0.002), (0.5, 0.004), (0.9, 0.02)])
def test_where_drafts_lose_hardly_anything_is_lost(rate, pass_seconds, requests):
    """A look costs a step or two, and the next one waits until that is a hundredth of the time, or LONGEST_REST steps."""
    cost = lambda n: 0.004 + 0.002 * n  # noqa: E731
    chosen = live(Depth(4), lambda step: rate, cost, 1500, requests, pass_seconds)[100:]
    looked = [step for step, (depths, _, _) in enumerate(chosen) if any(depths)]
    assert looked
    gaps = np.diff(looked)
    assert ((gaps == 1) | (gaps >= REST)).all()  # a look is of one step or two
    assert np.diff(looked).max() <= LONGEST_REST + DOZE
    plain = requests / cost(requests)
    assert speed(chosen) > (1 - 3 * EXPLORE) * plain


@pytest.mark.parametrize("requests", [1, 4, 32])
@pytest.mark.parametrize("rate", [0.6, 0.8, 0.95])
def test_where_drafts_win_nearly_the_best_is_had(rate, requests):
    cost = lambda n: 0.01 + 0.0002 * n  # noqa: E731
    chosen = live(Depth(6), lambda step: rate, cost, 800, requests)[100:]
    wanted = best(rate, requests, 6, 0.001, cost).max()
    assert speed(chosen) > 0.93 * wanted  # a draw of coins is in it, too
    assert any(not any(depths) for depths, *_ in chosen)  # plain decoding is looked at as well


def test_it_wakes_up_when_drafts_become_good():
    cost = lambda n: 0.01 + 0.0002 * n  # noqa: E731
    chosen = live(Depth(6), lambda step: 0.02 if step < 400 else 0.95, cost, 1200)
    depths = np.array([sum(d) for d, *_ in chosen])
    assert depths[200:400].mean() < 0.3
    assert depths[900:].mean() > 3


def test_one_bad_stretch_is_not_the_end():
    """A request whose drafts fail for a while is tried again as soon as what was examined is forgotten: its neighbours' drafts
    are still kept."""
    depth = chooser(most=6, cost=lambda n: 0.01 + 0.0002 * n)
    for _ in range(50):
        depth.acceptance.count(6, 6)
    assert depth.choose([0.02], [6]) == [0]
    dozed = 0
    while depth.dozes(1):
        depth.skip()
        dozed += 1
    assert dozed == DOZE - 2  # one choice was before, one comes now
    assert sum(depth.choose([0.95], [6])) > 3
    hopeless = chooser(most=6, cost=lambda n: 0.01 * n)
    assert hopeless.choose([0.02], [6]) == [0]
    dozed = 0
    while hopeless.dozes(1):
        hopeless.skip()
        dozed += 1
    assert dozed >= REST - 2  # nothing that is known could change its mind


def test_what_is_tried_costs_little_by_its_own_reckoning():
    """Every trial says when the next one may be: the dearer, the later."""
    dear, cheap = chooser(pass_seconds=0.05), chooser(pass_seconds=0.002)
    pauses = []
    for depth in (dear, cheap):
        while not any(depth.choose([0.5], [6])):
            pass
        pauses.append(depth._pause)
    assert pauses[0] > pauses[1] >= REST


# Through the engine, on a clock of its own


class Clock:
    """Every forward pass takes what the test says; nothing else takes time."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def charge(self, one, step_cost, pass_cost):
        run, draft = one.runner.run, one.spec.proposer.drafter._run

        def running(batch, *more):
            self.now += step_cost(len(batch.token_ids))
            return run(batch, *more)

        def drafting(parts):
            self.now += pass_cost
            return draft(parts)

        one.runner.run, one.spec.proposer.drafter._run = running, drafting


def timed(step_cost, pass_cost, requests=4, adaptive=True, draft="itself", depth=4):
    """Seconds on the clock for some long greedy answers, and the engine."""
    clock, target = Clock(), model("moe")
    spec = {"method": "draft_model", "model": "x", "num_speculative_tokens": depth, "adaptive": adaptive}
    drafts = {"itself": target, "bad": Decoder(target.config).init_weights(0.3, seed=77).eval()}
    config = EngineConfig(max_model_len=128, speculative_config=spec if depth else None)
    one = Engine(target, config, draft=drafts[draft] if depth else None, clock=clock)
    if depth:
        clock.charge(one, step_cost, pass_cost)
    else:
        run = one.runner.run
        one.runner.run = lambda batch, *more: (
            clock.__dict__.update(now=clock.now + step_cost(len(batch.token_ids))),
            run(batch, *more),
        )[1]
    for i in range(requests):
        one.add_request(str(i), cases("moe")[i].prompt, GREEDY.clone(max_tokens=85))
    out = finish(one)
    return clock.now, one, {key: tokens_of(o) for key, o in out.items()}


SITUATIONS = {
    "tokens are free": (lambda n: 0.005 + 1e-6 * n, 0.0005, "itself"),
    "tokens are dear": (lambda n: 0.0005 + 0.006 * n, 0.002, "itself"),
    "the draft is dear": (lambda n: 0.005 + 0.0002 * n, 0.03, "itself"),
    "the draft is bad": (lambda n: 0.005 + 0.002 * n, 0.001, "bad"),
}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("requests", [1, 4])
def test_adaptive_depth_is_nearly_as_good_as_the_better_of_all_and_none(situation, requests):
    step_cost, pass_cost, draft = SITUATIONS[situation]
    off, _, wanted = timed(step_cost, pass_cost, requests, depth=0)
    fixed, _, got = timed(step_cost, pass_cost, requests, adaptive=False, draft=draft)
    seconds, one, also = timed(step_cost, pass_cost, requests, draft=draft)
    assert wanted == got == also
    # A short life: the trials at its start (five with drafts, three without) weigh more here than in a long one.
    plain = step_cost(requests)
    trials = 5 * max(0.0, step_cost(5 * requests) + 4 * pass_cost - plain) + 3 * plain
    assert seconds <= min(off, fixed) * 1.06 + trials
    assert (fixed < off) == (situation == "tokens are free")
    if situation == "tokens are free":
        assert one.metrics.steps < 40


def test_what_is_counted():
    _, one, _ = timed(*SITUATIONS["tokens are free"][:2], adaptive=False)
    m = one.get_metrics()
    assert m["acceptance_rate"] == 1.0 == m["acceptance_at"][0]
    assert m["tokens_per_verify"] > 4
    assert m["drafts_at"][0] == m["verifications"]
    assert sum(m["drafts_at"]) == m["draft_tokens"]
    assert sum(m["accepted_at"]) == m["accepted_tokens"]
    assert m["verified_tokens"] == m["accepted_tokens"] + m["verifications"]
    assert m["generation_tokens"] == m["verified_tokens"] + 4  # the first token of each follows its prompt
    assert 2 * 2 <= m["experts_per_verify"] <= 2 * 5
    assert m["draft_seconds"] > 0
    plain = engine("moe").get_metrics()
    assert (plain["draft_tokens"], plain["acceptance_rate"], plain["acceptance_at"]) == (0, 0.0, [])


def test_drafts_and_verdicts_are_told():
    spec = {"method": "self", "num_speculative_tokens": 3, "adaptive": False}
    one = engine("moe", speculative_config=spec)
    with one.trace.record() as events:
        one.add_request("greedy", cases("moe")[2].prompt, GREEDY)
        one.add_request("drawn", cases("moe")[3].prompt, seeded(1))
        finish(one)
    said = {(e.seq, e.position, e.step): e for e in events.of("draft")}
    verdicts = events.of("verify")
    assert len(said) == one.metrics.draft_tokens
    assert sum(e.accepted for e in verdicts) == one.metrics.accepted_tokens > 0
    assert not all(e.accepted for e in verdicts)
    samples = {(e.seq, e.position): e.token for e in events.of("sample")}
    for e in verdicts:
        assert said[e.seq, e.position, e.step].token == e.token
        assert said[e.seq, e.position, e.step].q == e.q
        assert 0 <= e.p <= 10**6
        if e.accepted:
            assert samples[e.seq, e.position] == e.token
    rejected = [e for e in verdicts if not e.accepted]
    undone = {(e.seq, e.step): e.start for e in events.of("undo")}
    for e in rejected:
        assert undone[e.seq, e.step] == e.position
    assert all(samples[e.seq, e.position] != e.token for e in rejected)


# Lookup


def test_lookup_repeats_what_followed_last_time():
    lookup = Lookup(2, 3)
    assert lookup.propose([1, 2, 3, 9, 1, 2], 3) == [3, 9, 1]
    assert lookup.propose([1, 2, 3, 9, 1, 2, 4, 1, 2], 5) == [4, 1, 2]  # the latest, not the first
    assert lookup.propose([1, 2, 3, 9, 1, 2, 4, 1, 2, 3, 9], 2) == [1, 2]
    assert lookup.propose([1, 2, 3, 9, 1, 2, 4, 1, 2, 3, 9, 7], 2) == []


def test_lookup_prefers_the_longest_run():
    assert Lookup(1, 3).propose([5, 6, 7, 8, 0, 7, 9, 5, 6, 7], 1) == [8]
    assert Lookup(1, 1).propose([5, 6, 7, 8, 0, 7, 9, 5, 6, 7], 1) == [9]


@pytest.mark.parametrize("seed", range(20))
def test_lookup_agrees_with_a_search(seed):
    generator = torch.Generator().manual_seed(seed)
    ids, lookup = torch.randint(4, (60,), generator=generator).tolist(), Lookup(2, 4)
    for length in range(1, 61):
        known, wanted = ids[:length], []
        for n in (4, 3, 2):
            ends = [e for e in range(n, length) if known[e - n : e] == known[length - n :]]
            if length >= n and ends:
                wanted = known[ends[-1] : ends[-1] + 3]
                break
        assert lookup.propose(known, 3) == wanted


def test_lookups_of_those_that_are_gone_are_forgotten():
    drafter = NgramDrafter(1, 2)
    one = engine("moe")
    for i in range(40):
        one.add_request(str(i), [1, 2, 1], GREEDY)
    seqs = [r.sequences[0] for r in one._requests.values()]
    for seq in seqs:
        drafter.propose(seq, 2)
    drafter.keep({seqs[0].seq_id})
    assert set(drafter._lookups) == {seqs[0].seq_id}


# Configuration

GOOD = {"method": "ngram", "num_speculative_tokens": 3}
REFUSED = [
    ("ngram", "speculative_config must be a dict or None, got 'ngram'"),
    ({"num_speculative_tokens": 3}, "speculative_config needs method"),
    ({"method": "ngram"}, "speculative_config needs num_speculative_tokens"),
    ({**GOOD, "draft": 3}, "speculative_config has no option 'draft'; known: method, num_speculative_tokens"),
    ({**GOOD, "method": "eagle"}, "method must be 'draft_model' or 'ngram' or 'self', got 'eagle'"),
    ({**GOOD, "method": ["self"]}, "method must be"),
    ({**GOOD, "acceptance": "lossy"}, "acceptance must be 'exact' or 'coupled', got 'lossy'"),
    ({**GOOD, "num_speculative_tokens": 0}, "num_speculative_tokens must be an int of at least 1, got 0"),
    ({**GOOD, "num_speculative_tokens": True}, "num_speculative_tokens must be an int of at least 1"),
    ({**GOOD, "num_speculative_tokens": 2.0}, "num_speculative_tokens must be an int of at least 1"),
    ({**GOOD, "num_speculative_tokens": 65}, "num_speculative_tokens must be at most 64, got 65"),
    ({**GOOD, "adaptive": 1}, "adaptive must be True or False, got 1"),
    ({**GOOD, "model": "quintet-draft"}, "model belongs to method 'draft_model', and the method is 'ngram'"),
    ({**GOOD, "num_experts_per_tok": 1}, "num_experts_per_tok belongs to method 'self'"),
    ({**GOOD, "method": "self", "prompt_lookup_max": 4}, "prompt_lookup_max belongs to method 'ngram'"),
    (
        {**GOOD, "method": "self", "num_experts_per_tok": 0},
        "num_experts_per_tok must be an int of at least 1",
    ),
    (
        {**GOOD, "prompt_lookup_max": 2, "prompt_lookup_min": 3},
        "prompt_lookup_min (3) exceeds prompt_lookup_max (2)",
    ),
    ({**GOOD, "prompt_lookup_max": "2"}, "prompt_lookup_max must be an int of at least 1, got '2'"),
    ({**GOOD, "method": "draft_model"}, "model must be the draft's name or folder, got None"),
    ({**GOOD, "method": "draft_model", "model": 7}, "model must be the draft's name or folder, got 7"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_what_is_refused(value, message):
    with pytest.raises(ConfigError) as error:
        EngineConfig(speculative_config=value)
    assert message in str(error.value)


def test_what_a_dict_means():
    assert SpeculativeConfig.of({**GOOD, "num_speculative_tokens": 64}).num_speculative_tokens == 64
    assert EngineConfig(speculative_config=GOOD).speculation == SpeculativeConfig(
        method="ngram", num_speculative_tokens=3, prompt_lookup_max=4, prompt_lookup_min=2
    )
    alone = SpeculativeConfig.of({"model": "quintet-draft", "num_speculative_tokens": 2})
    assert (alone.method, alone.acceptance, alone.adaptive) == ("draft_model", "exact", True)
    assert SpeculativeConfig.of({**GOOD, "prompt_lookup_max": 1}).prompt_lookup_min == 1
    assert SpeculativeConfig.of({**GOOD, "prompt_lookup_min": 7}).prompt_lookup_max == 7
    assert SpeculativeConfig.of({**GOOD, "method": "self"}).num_experts_per_tok == 1
    assert EngineConfig().speculation is None


@pytest.mark.parametrize("value", [-1, 1.5, "2", True])
def test_a_request_says_how_many_it_wants(value):
    with pytest.raises(ConfigError, match="num_speculative_tokens must be None or an int of at least 0"):
        SamplingParams(num_speculative_tokens=value)


def test_a_request_cannot_want_more_than_the_engine_has():
    for one, most in ((engine("moe"), 0), (engine("moe", speculative_config=GOOD), 3)):
        with pytest.raises(
            RequestError, match=rf"num_speculative_tokens \(4\) exceeds the engine's \({most}\)"
        ):
            one.add_request("r", [1], GREEDY.clone(num_speculative_tokens=4))
        one.add_request("none", [1], GREEDY.clone(num_speculative_tokens=0))
        finish(one)


def draft_of(**changes):
    base = {"model_type": "random", "vocab_size": 61, "hidden_size": 16, "num_attention_heads": 2}
    base |= {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 128}
    return Decoder(ModelConfig(**base | changes, layers=(LayerConfig(intermediate_size=16),))).init_weights()


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (draft_of(vocab_size=62), "the draft model has 62 token ids, the model has 61"),
        (
            draft_of(max_position_embeddings=64),
            "the draft model was built for 64 tokens, and max_model_len is 128",
        ),
        (None, "needs the draft's Decoder"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(draft, message):
    spec = {"method": "draft_model", "model": "x", "num_speculative_tokens": 2}
    with pytest.raises(ConfigError) as error:
        Engine(model("moe"), EngineConfig(max_model_len=128, speculative_config=spec), draft=draft)
    assert message in str(error.value)


def test_the_drafts_cache_is_paid_for():
    spec = {"method": "draft_model", "model": "x", "num_speculative_tokens": 2}
    options = {"max_model_len": 128, "kv_cache_bytes": 100_000, "block_size": 4}
    plain = engine("moe", **options)
    one = Engine(model("moe"), EngineConfig(**options, speculative_config=spec), draft=draft_of())
    per_token = model("moe").config.kv_elements_per_token
    share = per_token / (per_token + draft_of().config.kv_elements_per_token)
    assert one.blocks.pool.num_blocks == pytest.approx(plain.blocks.pool.num_blocks * share, abs=1)
