"""Speculation changes nothing: greedy and coupled tokens are those of the plain loop, whatever is proposed, and whatever
happens to a request meanwhile. Sampled tokens under "exact" are judged in test_spec_verify.py.
"""

from functools import cache

import numpy as np
import pytest
from tiny_models import GREEDY, NAMES, NEW, alone, cases, engine, finish, model, seeded, tokens_of

from tinymoe.core.config import EngineConfig
from tinymoe.core.model_config import ConfigError, LayerConfig, ModelConfig
from tinymoe.engine.engine import Engine
from tinymoe.engine.spec.drafter import ModelDrafter
from tinymoe.engine.spec.proposer import Proposer
from tinymoe.model.decoder import Decoder

SMALL = [name for name in NAMES if name != "quintet-moe"]
ENGINES = {
    "batched": {},
    "budget-2": {"max_num_batched_tokens": 2, "block_size": 3},
    "budget-19": {"max_num_batched_tokens": 19, "block_size": 5},
    "one-seat": {"max_num_seqs": 1, "block_size": 64},
    "no-prefix-cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 11, "block_size": 4},
    "tiny-cache": {"num_blocks": 15, "block_size": 4, "max_num_batched_tokens": 40},
    "tiny-cache-of-single-tokens": {"num_blocks": 56, "block_size": 1, "max_num_batched_tokens": 40},
}
SPECS = {
    "draft": {"method": "draft_model", "model": "a random one", "num_speculative_tokens": 4},
    "itself": {"method": "draft_model", "model": "the target", "num_speculative_tokens": 3},
    "fewer": {"method": "self", "num_speculative_tokens": 2},
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1},
}


@cache
def random_draft(vocab):
    config = {"model_type": "random", "vocab_size": vocab, "hidden_size": 16, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 128}
    layers = (LayerConfig(intermediate_size=16), LayerConfig(intermediate_size=16, sliding_window=7))
    return Decoder(ModelConfig(**config, layers=layers)).init_weights(0.3, seed=9).eval()


def guessing(name, how="draft", eos=(), spec=(), **options) -> Engine:
    """An engine that speculates, coupled and at full depth unless `spec` says otherwise."""
    target = model(name)
    if how == "fewer" and not target.config.is_moe:
        pytest.skip("a model without experts cannot have fewer")
    draft = {"draft": random_draft(target.config.vocab_size), "itself": target}.get(how)
    settings = SPECS[how] | {"acceptance": "coupled", "adaptive": False} | dict(spec)
    config = EngineConfig(**{"max_model_len": 128, **options}, speculative_config=settings)
    return Engine(target, config, eos_token_ids=eos, draft=draft)


def add_all(one, name, order=None, prefix="", **changes):
    for i in order or range(len(cases(name))):
        one.add_request(f"{prefix}greedy-{i}", cases(name)[i].prompt, GREEDY.clone(**changes))
        one.add_request(f"{prefix}seeded-{i}", cases(name)[i].prompt, seeded(i, **changes))


def check_all(out, name, order=None, prefix=""):
    for i in order or range(len(cases(name))):
        assert tokens_of(out[f"{prefix}greedy-{i}"]) == [cases(name)[i].answer], f"greedy {i}"
        assert tokens_of(out[f"{prefix}seeded-{i}"]) == [alone(name, i, i)], f"seeded {i}"


# Every model under two schedules, two of them under all: what a model computes and what a scheduler does meet in few places.
SCHEDULES = [
    (name, how)
    for name in SMALL
    for how in ENGINES
    if name in ("moe", "window") or how in ("batched", "budget-19")
]


@pytest.mark.parametrize("how", SPECS)
@pytest.mark.parametrize(("name", "engine_of"), SCHEDULES)
def test_tokens_are_those_of_the_plain_loop(name, engine_of, how):
    one = guessing(name, how, **ENGINES[engine_of])
    order = [4, 2, 0] if engine_of == "budget-2" else None
    for turn in range(2):  # the second time with prefix hits
        add_all(one, name, order, f"{turn}-")
        check_all(finish(one), name, order, f"{turn}-")
    m = one.get_metrics()
    assert m["draft_tokens"] > 0 or engine_of == "budget-2"
    if how == "itself":
        assert m["accepted_tokens"] == m["draft_tokens"]
    if engine_of.startswith("tiny-cache"):
        assert m["preemptions"] > 0


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("dense", {}, "method 'self' drafts with fewer experts, and this model has none"),
        (
            "moe",
            {"num_experts_per_tok": 99},
            "num_experts_per_tok must be at most the model's own {own}, got 99",
        ),
        (
            "moe",
            {"num_experts_per_tok": 10**30},
            "num_experts_per_tok must be at most the model's own {own}, got 1000",
        ),
    ],
)
def test_fewer_experts_than_the_model_has(name, more, message):
    config = EngineConfig(max_model_len=128, speculative_config=SPECS["fewer"] | more)
    with pytest.raises(ConfigError) as error:
        Engine(model(name), config, eos_token_ids=())
    assert message.format(own=model(name).config.max_top_k) in str(error.value)


@pytest.mark.skipif("quintet-moe" not in NAMES, reason="the bundled model is missing")
@pytest.mark.parametrize("how", ["fewer", "ngram"])
def test_the_bundled_model(how):
    one = guessing("quintet-moe", how, spec={"adaptive": True})
    add_all(one, "quintet-moe")
    check_all(finish(one), "quintet-moe")
    assert one.metrics.accepted_tokens > 0


@pytest.mark.parametrize("acceptance", ["exact", "coupled"])
@pytest.mark.parametrize("name", SMALL)
def test_the_model_with_all_its_experts_accepts_everything(name, acceptance):
    spec = {
        "num_experts_per_tok": model(name).config.max_top_k,
        "num_speculative_tokens": 4,
        "acceptance": acceptance,
    }
    one = guessing(name, "fewer", spec=spec)
    add_all(one, name)
    out = finish(one)
    m = one.get_metrics()
    assert m["accepted_tokens"] == m["draft_tokens"] > 0
    assert m["acceptance_at"] == [1.0] * 4
    assert m["steps"] <= 6  # one for the prompts, one more for twins, three runs
    assert all(len(t) == NEW for o in out.values() for t in tokens_of(o))


@pytest.mark.parametrize("name", ["moe", "window"])
@pytest.mark.parametrize("how", ["draft", "itself", "fewer"])
def test_preemption_after_every_step(name, how):
    for at in range(2, 9):
        one, out = guessing(name, how, block_size=4), {}
        add_all(one, name, [1, 3, 5])
        for _ in range(at):
            out |= {o.request_id: o for o in one.step()}
        for seq in list(one.scheduler.running):
            one.scheduler._preempt(seq)
        check_all(out | finish(one), name, [1, 3, 5])
        assert one.metrics.preemptions or at > 4


@pytest.mark.parametrize("after", range(1, 7))
@pytest.mark.parametrize("how", ["draft", "itself"])
def test_abort_after_every_step(how, after):
    one, out = guessing("moe", how, block_size=2), {}
    add_all(one, "moe")
    for _ in range(after):
        out |= {o.request_id: o for o in one.step()}
    last = one.abort_request("greedy-3")
    if last is not None:
        assert tokens_of(last)[0] == cases("moe")[3].answer[: len(tokens_of(last)[0])]
    out = {"greedy-3": None} | out | finish(one)
    for i, case in enumerate(cases("moe")):
        assert i == 3 or tokens_of(out[f"greedy-{i}"]) == [case.answer]
        assert tokens_of(out[f"seeded-{i}"]) == [alone("moe", i, i)]


@pytest.mark.parametrize("how", SPECS)
@pytest.mark.parametrize("options", [{}, {"num_blocks": 24, "block_size": 4}, {"block_size": 3}])
def test_n_answers_are_those_of_separate_requests(how, options):
    one = guessing("moe", how, max_num_seqs=5, **options)
    one.add_request("many", cases("moe")[5].prompt, seeded(40, n=4))
    one.add_request("other", cases("moe")[3].prompt, GREEDY)
    out = finish(one)
    assert tokens_of(out["many"]) == [alone("moe", 5, 40 + i) for i in range(4)]
    assert tokens_of(out["other"]) == [cases("moe")[3].answer]


@pytest.mark.parametrize("max_tokens", range(1, NEW))
def test_max_tokens_and_the_models_length_inside_a_run(max_tokens):
    case = cases("moe")[3]
    for options in ({}, {"max_model_len": len(case.prompt) + max_tokens}):
        one = guessing("moe", "itself", spec={"num_speculative_tokens": 8}, block_size=2, **options)
        one.add_request("r", case.prompt, GREEDY.clone(max_tokens=None if options else max_tokens))
        out = finish(one)["r"]
        assert tokens_of(out) == [case.answer[:max_tokens]]
        assert out.outputs[0].finish_reason == "length"
        m = one.metrics
        assert m.draft_tokens + m.verifications <= max_tokens - 1  # not one draft too many


@pytest.mark.parametrize("name", ["moe", "dense"])
@pytest.mark.parametrize("kind", ["stop", "eos"])
def test_ends_inside_a_run_of_accepted_drafts(name, kind):
    for case in cases(name):
        for at in range(1, NEW):
            token = case.answer[at]
            if token in case.answer[:at]:
                continue
            eos = (token,) if kind == "eos" else ()
            one = guessing(
                name, "itself", eos, {"num_speculative_tokens": 6}, block_size=4, return_routed_experts=True
            )
            one.add_request("r", case.prompt, GREEDY.clone(stop_token_ids=[] if eos else [token]))
            (answer,) = finish(one)["r"].outputs
            assert answer.token_ids == case.answer[: at + 1]
            assert answer.finish_reason == "stop"
            if name == "moe":
                assert len(answer.routed_experts) == len(case.prompt) + at
            # Nothing behind the end may be found by others.
            keys = len(one.blocks.prefix)
            assert keys <= (len(case.prompt) + at) // 4


@pytest.mark.parametrize("how", SPECS)
def test_experts_that_come_back_are_those_of_real_tokens(how):
    one, plain = (
        guessing("mixed", how, return_routed_experts=True),
        engine("mixed", return_routed_experts=True),
    )
    for each in (one, plain):
        add_all(each, "mixed")
    got, wanted = finish(one), finish(plain)
    for key, output in wanted.items():
        np.testing.assert_array_equal(got[key].outputs[0].routed_experts, output.outputs[0].routed_experts)
    rejected = one.metrics.draft_tokens - one.metrics.accepted_tokens
    assert (rejected > 0) == (how != "itself")
    visits = (
        one.routes.load.sum() - plain.routes.load.sum()
    )  # rejected drafts were computed, so they count as load
    assert visits == rejected * (2 + 3)


OPTIONS = {
    "logprobs": {"logprobs": 3},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "bans": {"logit_bias": {3: -5.0, 9: 4.0}, "min_tokens": 6, "stop_token_ids": [9, 11, 40]},
    "allowed": {"allowed_token_ids": tuple(range(5, 30))},
    "nucleus": {"top_p": 0.8, "top_k": 12, "min_p": 0.01},
    "prompt-logprobs": {"prompt_logprobs": 2},
}


@pytest.mark.parametrize("how", SPECS)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_of_a_request(options, how):
    """Drafts count as history for penalties, bans and min_tokens."""
    one, plain = guessing("moe", how, block_size=4), engine("moe", block_size=4)
    for each in (one, plain):
        add_all(each, "moe", **OPTIONS[options])
        add_all(each, "moe", prefix="plain-")  # neighbours without
    got, wanted = finish(one), finish(plain)
    for key, output in wanted.items():
        (a,), (b,) = got[key].outputs, output.outputs
        assert a.token_ids == b.token_ids, key
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
        if options == "logprobs" and not key.startswith("plain"):
            assert len(a.logprobs) == len(a.token_ids)
            for x, y in zip(a.logprobs, b.logprobs):
                assert {t: l.rank for t, l in x.items()} == {t: l.rank for t, l in y.items()}
                assert [l.logprob for l in x.values()] == pytest.approx(
                    [l.logprob for l in y.values()], abs=1e-4
                )
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-3)


def test_logprobs_under_rejection_sampling_are_those_of_the_model():
    one = guessing("moe", "draft", spec={"acceptance": "exact"})
    one.add_request("r", cases("moe")[2].prompt, seeded(3, logprobs=1, max_tokens=40))
    (answer,) = finish(one)["r"].outputs
    teacher = engine("moe")
    whole = cases("moe")[2].prompt + answer.token_ids
    teacher.add_request("t", whole, GREEDY.clone(prompt_logprobs=1, max_tokens=1))
    wanted = finish(teacher)["t"].prompt_logprobs[-40:]
    for token, mine, its in zip(answer.token_ids, answer.logprobs, wanted):
        assert mine[token].logprob == pytest.approx(its[token].logprob, abs=1e-4)
        assert mine[token].rank == its[token].rank
    assert one.metrics.accepted_tokens > 0


@pytest.mark.parametrize("how", SPECS)
@pytest.mark.parametrize("seats", [1, 2, 8])
def test_adaptive_depth_lives_with_steps_that_prompts_and_decodes_fill(how, seats):
    """No token is ever left for a draft, so that nothing but steps of one size is seen."""
    one = guessing("moe", how, spec={"adaptive": True}, max_num_batched_tokens=seats, max_num_seqs=seats)
    for turn in range(3):
        add_all(one, "moe", prefix=f"{turn}-")
        check_all(finish(one), "moe", prefix=f"{turn}-")


def test_requests_with_and_without_drafts_share_a_batch():
    one = guessing("moe", "draft")
    add_all(one, "moe", prefix="none-", num_speculative_tokens=0)
    add_all(one, "moe", [0, 1, 2], prefix="one-", num_speculative_tokens=1)
    before = one.metrics.draft_tokens
    out = finish(one)
    check_all(out, "moe", prefix="none-")
    check_all(out, "moe", [0, 1, 2], prefix="one-")
    assert one.metrics.draft_tokens > before
    assert one.metrics.drafts_at[1:] == [0, 0, 0]
    add_all(one, "moe", [3], num_speculative_tokens=0)
    before = one.metrics.draft_tokens
    finish(one)
    assert one.metrics.draft_tokens == before


def test_each_step_delivers_what_it_brought():
    """Streaming: a run arrives at once, and runs join to the answer."""
    one = guessing("moe", "itself")
    case = cases("moe")[4]
    one.add_request("r", case.prompt, GREEDY)
    lengths = []
    while one.has_unfinished_requests():
        for output in one.step():
            (tokens,) = tokens_of(output)
            assert tokens == case.answer[: len(tokens)]
            lengths.append(len(tokens))
    assert lengths == [1, 5, 9, 12]


@pytest.mark.parametrize("acceptance", ["exact", "coupled"])
def test_a_seed_gives_the_same_tokens_again(acceptance):
    """Under "exact" even when depths are chosen by a clock: requests with a seed are offered all drafts."""
    answers = []
    for _ in range(2):
        one = guessing("moe", "draft", spec={"acceptance": acceptance, "adaptive": True})
        add_all(one, "moe")
        answers.append({key: tokens_of(o) for key, o in finish(one).items()})
    assert answers[0] == answers[1]


def test_coupled_drafts_share_the_noise_and_agree_more_often(monkeypatch):
    rates = []
    for shared in (True, False):
        one = guessing("moe", "fewer")
        if not shared:
            sampler = one.spec.proposer.sampler
            sample = sampler.sample
            monkeypatch.setattr(sampler, "sample", lambda x, rows, stream, s=sample: s(x, rows, stream=1))
        for i in range(60):
            one.add_request(str(i), cases("moe")[i % 7].prompt, seeded(i))
        finish(one)
        rates.append(one.get_metrics()["acceptance_rate"])
    assert rates[0] > rates[1] + 0.1


# Pages


class Wrong(Proposer):
    """Proposes what the model surely does not say."""

    def propose(self, counts):
        super().propose(counts)
        for seq in counts:
            case = cases("moe")[int(seq.request.request_id)]
            at = seq.num_tokens - seq.num_prompt_tokens
            seq.draft_token_ids = [(t + 1) % 61 for t in (case.answer + [0] * 9)[at : at + counts[seq]]]


@pytest.mark.parametrize("size", [1, 2, 3, 16])
@pytest.mark.parametrize("caching", [True, False])
def test_after_rejections_everything_is_as_if_nothing_had_been_proposed(size, caching):
    """In step with an engine that does not speculate: tables, counts, the order of the free list, the prefix index."""
    options = {"block_size": size, "enable_prefix_caching": caching, "max_num_batched_tokens": 64}
    one, plain = guessing("moe", "itself", **options), engine("moe", **options)
    one.spec.proposer.__class__ = Wrong
    for each in (one, plain):
        for i, case in enumerate(cases("moe")):
            each.add_request(str(i), case.prompt, GREEDY)
    steps = 0
    while plain.has_unfinished_requests():
        assert [(o.request_id, tokens_of(o)) for o in one.step()] == [
            (o.request_id, tokens_of(o)) for o in plain.step()
        ]
        a, b = one.blocks, plain.blocks
        np.testing.assert_array_equal(a.tables, b.tables)
        np.testing.assert_array_equal(a.lengths, b.lengths)
        np.testing.assert_array_equal(a.pool.refs, b.pool.refs)
        assert a.pool.free_list() == b.pool.free_list()
        if caching:
            assert a.prefix._block_of == b.prefix._block_of
        assert [s.num_computed_tokens for s in one.scheduler.running] == [
            s.num_computed_tokens for s in plain.scheduler.running
        ]
        steps += 1
    assert one.metrics.draft_tokens > steps
    assert one.metrics.accepted_tokens == 0


def test_drafts_preempt_nobody_and_take_no_token_from_a_prompt():
    plain = engine("moe", num_blocks=24, block_size=4, max_num_batched_tokens=12)
    one = guessing("moe", "itself", num_blocks=24, block_size=4, max_num_batched_tokens=12)
    one.spec.proposer.__class__ = Wrong
    for each in (one, plain):
        for i, case in enumerate(cases("moe")):
            each.add_request(str(i), case.prompt, GREEDY)
        finish(each)
    assert one.metrics.draft_tokens > 0
    assert one.metrics.steps == plain.metrics.steps
    assert one.metrics.preemptions == plain.metrics.preemptions
    assert one.metrics.recomputed_tokens == plain.metrics.recomputed_tokens


# The draft's own cache


def counted(one):
    """The tokens that the draft runs from now on."""
    drafter, ran = one.spec.proposer.drafter, []
    run = drafter._run
    drafter._run = lambda parts: ran.append(sum(len(p[2]) for p in parts)) or run(parts)
    return ran


def test_the_draft_computes_only_what_it_has_not():
    one, case = guessing("moe", "itself", block_size=4), cases("moe")[6]
    ran = counted(one)
    one.add_request("cold", case.prompt, GREEDY.clone(max_tokens=6))
    finish(one)
    assert ran == [
        len(case.prompt) + 1,
        1,
        1,
    ]  # one prefill, then drafts; the run that follows ends the request
    ran.clear()
    one.add_request("warm", case.prompt + case.answer[:1], GREEDY.clone(max_tokens=5))
    finish(one)
    cached = (len(case.prompt) + 1 - 1) // 4 * 4
    assert ran[0] == len(case.prompt) + 2 - cached


def test_a_long_prompt_is_caught_up_in_pieces():
    one, case = guessing("moe", "itself", max_num_batched_tokens=7), cases("moe")[6]
    ran = counted(one)
    one.add_request("r", case.prompt, GREEDY)
    assert tokens_of(finish(one)["r"]) == [case.answer]
    assert max(ran) <= 7
    assert one.metrics.accepted_tokens == one.metrics.draft_tokens > 0


def test_forks_and_copies_carry_the_drafts_cache_along():
    """All drafts of a draft that is the target are accepted, so its cache must be right, in copied and reused pages too."""
    for how, caching in (("itself", True), ("itself", False), ("fewer", True)):
        spec = {"num_experts_per_tok": model("moe").config.max_top_k} if how == "fewer" else {}
        one = guessing("moe", how, spec=spec, block_size=64, enable_prefix_caching=caching)
        for turn in "ab":
            one.add_request(f"{turn}-many", cases("moe")[5].prompt, seeded(40, n=4))
            add_all(one, "moe", prefix=f"{turn}-")
            finish(one)
        assert one.metrics.accepted_tokens == one.metrics.draft_tokens > 0, (how, caching)


def test_a_draft_that_breaks_is_only_a_bad_draft(monkeypatch):
    for acceptance in ("exact", "coupled"):
        one = guessing("moe", "draft", spec={"acceptance": acceptance})
        run = ModelDrafter._run
        monkeypatch.setattr(
            ModelDrafter, "_run", lambda self, parts, run=run: run(self, parts) * float("nan")
        )
        add_all(one, "moe")
        out = finish(one)
        for i, case in enumerate(cases("moe")):
            assert tokens_of(out[f"greedy-{i}"]) == [case.answer]
            if acceptance == "coupled":
                assert tokens_of(out[f"seeded-{i}"]) == [alone("moe", i, i)]
        monkeypatch.undo()
