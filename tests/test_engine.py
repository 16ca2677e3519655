"""The engine's own promises: what it refuses, how requests end, what it reports, and that one failure stays one failure."""

import math
import random

import numpy as np
import pytest
import torch
from tiny_models import (
    CONFIGS,
    GREEDY,
    NEW,
    Routes,
    build,
    cases,
    engine,
    finish,
    judge,
    logits_of,
    model,
    seeded,
    tokens_of,
)

from tinymoe.core.model_config import ConfigError, LayerConfig, ModelConfig, MoEConfig
from tinymoe.core.params import SamplingParams
from tinymoe.engine.engine import Engine
from tinymoe.engine.intake import RequestError
from tinymoe.model.decoder import Decoder

NAMES = list(CONFIGS)
UNTIED = [name for name in NAMES if not CONFIGS[name].tie_word_embeddings]
SQUEEZED = {
    "num_blocks": 15,
    "block_size": 4,
    "max_num_batched_tokens": 24,
}  # 7 requests of 1 to 52 tokens: preempts
PIECES = {"max_num_batched_tokens": 5, "block_size": 3}


def add_cases(one, name, params=GREEDY, prefix=""):
    for i, case in enumerate(cases(name)):
        one.add_request(f"{prefix}{i}", case.prompt, params)


def check_cases(out, name, prefix=""):
    for i, case in enumerate(cases(name)):
        assert tokens_of(out[f"{prefix}{i}"]) == [case.answer]


def run(one, prompt, params=GREEDY, **options):
    one.add_request("one", prompt, params, **options)
    return finish(one)["one"]


# How requests end


def test_max_tokens_and_the_models_length_end_with_length():
    case = cases("moe")[3]
    out = run(engine("moe"), case.prompt, GREEDY.clone(max_tokens=5))
    assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason) == ("length", None)
    assert tokens_of(out) == [case.answer[:5]]
    for max_tokens in (None, 10**9):
        out = run(
            engine("moe", max_model_len=len(case.prompt) + 7),
            case.prompt,
            GREEDY.clone(max_tokens=max_tokens),
        )
        assert out.outputs[0].finish_reason == "length"
        assert tokens_of(out) == [case.answer[:7]]


def greedy_without(name, prompt, count, banned, until):
    """The plain loop with some ids forbidden for the first `until` answers."""
    ids = list(prompt)
    for number in range(count):
        logits = logits_of(model(name), ids)[-1].clone()
        if number < until:
            logits[list(banned)] = -math.inf
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def test_eos_ends_a_sequence_and_is_kept():
    case = cases("dense")[3]
    eos = case.answer[4]
    end = case.answer.index(eos) + 1
    out = run(engine("dense", eos=[eos]), case.prompt)
    assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason) == ("stop", None)
    assert tokens_of(out) == [case.answer[:end]]
    assert tokens_of(run(engine("dense", eos=[eos]), case.prompt, GREEDY.clone(ignore_eos=True))) == [
        case.answer
    ]


def test_stop_token_ids_name_the_reason_and_eos_has_precedence():
    case = cases("mixed")[4]
    stop = case.answer[2]
    params = GREEDY.clone(stop_token_ids=[stop])
    out = run(engine("mixed"), case.prompt, params)
    assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason) == ("stop", stop)
    out = run(engine("mixed", eos=[stop]), case.prompt, params)
    assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason) == ("stop", None)
    out = run(engine("mixed", eos=[stop]), case.prompt, params.clone(ignore_eos=True))
    assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason) == ("stop", stop)


@pytest.mark.parametrize("kind", ["eos", "stop"])
@pytest.mark.parametrize("options", [{}, PIECES, SQUEEZED])
def test_min_tokens_bans_every_end_before_it(kind, options):
    name, i = "window", 3
    case = cases(name)[i]
    ends = {case.answer[0], case.answer[1]}
    wanted = greedy_without(name, case.prompt, NEW, ends, until=6)
    stop_at = next((n for n, t in enumerate(wanted) if n >= 6 and t in ends), NEW - 1)
    params = GREEDY.clone(min_tokens=6, stop_token_ids=list(ends) if kind == "stop" else ())
    one = engine(name, eos=list(ends) if kind == "eos" else (), **options)
    one.add_request("one", case.prompt, params)
    for other in (5, 6):
        one.add_request(str(other), cases(name)[other].prompt, GREEDY.clone(ignore_eos=True))
    out = finish(one)
    assert tokens_of(out["one"]) == [wanted[: stop_at + 1]]
    assert tokens_of(out["6"]) == [cases(name)[6].answer]


def test_n_answers_of_one_token_each():
    one = engine("moe")
    out = run(one, [1, 2, 3], seeded(5, n=4, max_tokens=1))
    assert [len(t) for t in tokens_of(out)] == [1, 1, 1, 1]
    assert {c.finish_reason for c in out.outputs} == {"length"}
    assert not one.has_unfinished_requests()


# What is reported


def test_each_step_reports_the_requests_that_grew():
    one = engine("moe", max_num_batched_tokens=8)
    one.add_request("long", cases("moe")[6].prompt, GREEDY.clone(max_tokens=3))
    one.add_request("short", [1, 2], GREEDY.clone(max_tokens=2))
    story = []
    while one.has_unfinished_requests():
        story.append({o.request_id: (len(o.outputs[0].token_ids), o.finished) for o in one.step()})
    assert story[:2] == [{"short": (1, False)}, {"short": (2, True)}]
    assert {} in story
    assert story[-3:] == [{"long": (1, False)}, {"long": (2, False)}, {"long": (3, True)}]
    assert one.step() == []


def test_times_and_totals():
    one = engine("dense", **SQUEEZED)
    add_cases(one, "dense")
    out = finish(one)
    check_cases(out, "dense")
    for output in out.values():
        m = output.metrics
        assert (
            m.arrival_time
            <= m.first_scheduled_time
            <= m.first_token_time
            <= m.last_token_time
            <= m.finished_time
        )
        assert m.num_generation_tokens == NEW
        assert 0 <= m.queue_time <= m.ttft
        assert m.tpot == (m.last_token_time - m.first_token_time) / (NEW - 1)
    m, prompts = one.metrics, [case.prompt for case in cases("dense")]
    assert (m.requests, m.finished_requests, m.generation_tokens) == (7, 7, 7 * NEW)
    assert m.prompt_tokens == sum(map(len, prompts))
    assert m.preemptions == sum(o.metrics.num_preemptions for o in out.values()) > 0
    assert m.peak_blocks == 15
    assert m.prefix_query_tokens >= m.prompt_tokens


@pytest.mark.parametrize(
    ("name", "options"), [("dense", {}), ("moe", PIECES), ("mixed", SQUEEZED), ("window", SQUEEZED)]
)
def test_logprobs_are_the_models_own(name, options):
    one = engine(name, **options)
    for i, case in enumerate(cases(name)):
        one.add_request(f"greedy-{i}", case.prompt, GREEDY.clone(logprobs=3))
        one.add_request(f"drawn-{i}", case.prompt, seeded(i, logprobs=0, top_k=5, n=2))
    out = finish(one)
    for i, case in enumerate(cases(name)):
        for output in (out[f"greedy-{i}"], out[f"drawn-{i}"]):
            for c in output.outputs:
                ids = case.prompt + c.token_ids
                wanted = logits_of(model(name), ids[:-1])[len(case.prompt) - 1 :].double().log_softmax(-1)
                assert len(c.logprobs) == len(c.token_ids) == NEW
                check_logprobs(
                    c.logprobs, c.token_ids, wanted, 3 if output.request_id.startswith("greedy") else 0
                )
                total = sum(float(wanted[t, token]) for t, token in enumerate(c.token_ids))
                assert c.cumulative_logprob == pytest.approx(total, abs=1e-3)


def check_logprobs(entries, tokens, wanted_TV, top):
    for t, (entry, token) in enumerate(zip(entries, tokens)):
        best = wanted_TV[t].sort(descending=True, stable=True).indices.tolist()
        assert entry[token].rank == best.index(token) + 1
        assert set(entry) == {token, *best[:top]}
        for i, report in entry.items():
            assert report.logprob == pytest.approx(float(wanted_TV[t, i]), abs=2e-4)
            assert report.rank == best.index(i) + 1


@pytest.mark.parametrize(
    ("name", "options"),
    [("full", {}), ("moe", PIECES), ("window", PIECES), ("dense", SQUEEZED), ("mixed", SQUEEZED)],
)
def test_prompt_logprobs_in_pieces_and_computed_again(name, options):
    one = engine(name, **options)
    add_cases(one, name, prefix="warms-the-cache-")
    finish(one)
    add_cases(one, name, GREEDY.clone(prompt_logprobs=2))
    out = finish(one)
    check_cases(out, name)
    for i, case in enumerate(cases(name)):
        have = out[str(i)].prompt_logprobs
        assert len(have) == len(case.prompt)
        assert have[0] is None
        check_logprobs(have[1:], case.prompt[1:], case.logits.double().log_softmax(-1), 2)
        assert out[str(i)].num_cached_tokens == 0  # logits of cached tokens would be missing
    if options is SQUEEZED:
        assert one.metrics.preemptions > 0


def test_no_logprobs_unless_asked():
    out = run(engine("moe"), [1, 2, 3])
    c = out.outputs[0]
    assert (out.prompt_logprobs, c.logprobs, c.cumulative_logprob, c.routed_experts) == (
        None,
        None,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("moe", {}),
        ("window", PIECES),
        ("mixed", PIECES),
        ("mixed", SQUEEZED),
        ("moe", {"enable_prefix_caching": False}),
    ],
)
def test_routed_experts_of_every_token(name, options):
    one = engine(name, return_routed_experts=True, **options)
    L, K = len(CONFIGS[name].layers), CONFIGS[name].max_top_k
    for turn in ("cold", "warm"):
        add_cases(one, name)
        out = finish(one)
        for i, case in enumerate(cases(name)):
            got = out[str(i)].outputs[0].routed_experts
            assert got.dtype == np.int16
            assert got.shape == (len(case.prompt) + NEW - 1, L, K)
            wanted = np.full_like(got, -1)
            for layer, ids_TK in case.experts.items():
                wanted[:, layer, : ids_TK.shape[1]] = ids_TK.numpy()
            assert np.array_equal(got, wanted)
        if turn == "warm" and options in ({}, PIECES):
            assert max(o.num_cached_tokens for o in out.values()) > 16
    if options is SQUEEZED:
        assert one.metrics.preemptions > 0


def test_routed_experts_of_n_answers_share_the_prompt():
    case = cases("moe")[5]
    one = engine("moe", return_routed_experts=True, block_size=4)
    out = run(one, case.prompt, seeded(1, n=3))
    for c in out.outputs:
        whole = judge_experts("moe", case.prompt + c.token_ids)
        assert np.array_equal(c.routed_experts, whole)


def judge_experts(name, ids):
    routes = Routes()
    logits_of(model(name), ids[:-1], routes)
    return np.stack([routes.ids[layer].numpy() for layer in sorted(routes.ids)], axis=1)


@pytest.mark.parametrize(("name", "options"), [("dense", {}), ("moe", PIECES), ("mixed", SQUEEZED)])
def test_expert_load_counts_every_token_that_was_run(name, options):
    one = engine(name, **options)
    add_cases(one, name)
    events = one.trace.start()
    check_cases(finish(one), name)
    ran = sum(e.stop - e.start for e in events.of("chunk"))
    assert one.metrics.computed_tokens == ran
    steps = {e.step for e in events.of("chunk")}
    for layer, config in enumerate(CONFIGS[name].layers):
        assert one.routes.load[layer].sum() == (ran * config.moe.top_k if config.moe else 0)
        routes = [e for e in events.of("route") if e.layer == layer]
        counts = np.bincount([i for e in routes for i in e.experts], minlength=one.routes.load.shape[1])
        assert np.array_equal(one.routes.load[layer], counts)
        distinct = sum(len({i for e in routes if e.step == s for i in e.experts}) for s in steps)
        assert one.routes.distinct[layer] == distinct
    load = one.routes.load[[i for i, c in enumerate(CONFIGS[name].layers) if c.moe]].astype(float)
    experts = [c.moe.num_experts for c in CONFIGS[name].layers if c.moe]
    wanted = [row.max() / (row.sum() / count) for row, count in zip(load, experts)]
    assert one.routes.max_over_mean().tolist() == pytest.approx(wanted)


def test_seeds_come_from_the_engine_where_a_request_has_none():
    draw = lambda seed: tokens_of(run(engine("moe", seed=seed), [1, 2, 3], SamplingParams(max_tokens=12)))  # noqa: E731
    assert draw(1) == draw(1) != draw(2)
    one = engine("moe")
    for i in range(2):
        one.add_request(str(i), [1, 2, 3], SamplingParams(max_tokens=12))
    out = finish(one)
    assert tokens_of(out["0"]) != tokens_of(out["1"])


def test_resetting_the_prefix_cache():
    one, prompt = engine("moe", block_size=4), cases("moe")[6].prompt
    assert run(one, prompt).num_cached_tokens == 0
    assert run(one, prompt).num_cached_tokens > 0
    one.add_request("runs", prompt, GREEDY)
    one.step()
    assert not one.reset_prefix_cache()
    one.abort_request("runs")
    assert one.reset_prefix_cache()
    assert run(one, prompt).num_cached_tokens == 0


# NaN


def with_bad_token(name, token=60):
    decoder = build(name)
    with torch.no_grad():
        decoder.embed.weight[token] = math.nan
    return decoder


@pytest.mark.parametrize(
    "options", [{}, PIECES, SQUEEZED, {"block_size": 64}, {"enable_prefix_caching": False}]
)
@pytest.mark.parametrize("name", UNTIED)
def test_a_request_with_nan_ends_with_an_error_and_harms_nobody(name, options):
    """A token whose embedding is NaN, beside healthy requests, before them in their pages, and after their prefix."""
    one = engine(with_bad_token(name), **options)
    good = [case for case in cases(name) if 60 not in case.prompt + case.answer]
    assert len(good) >= 3
    for turn in range(2):
        r, out = random.Random(turn), {}
        bad = [[60], [*good[-1].prompt[:25], 60], [60, *good[-2].prompt], [*good[-1].prompt[:10], 60, 1, 2]]
        queue = [("bad", i) for i in range(len(bad))] + [("good", i) for i in range(len(good))]
        for kind, i in r.sample(queue, len(queue)):
            one.add_request(f"{kind}-{i}", bad[i] if kind == "bad" else good[i].prompt, GREEDY)
            if r.random() < 0.5:
                out |= {o.request_id: o for o in one.step()}
        out |= finish(one)
        for i, case in enumerate(good):
            assert tokens_of(out[f"good-{i}"]) == [case.answer]
            assert out[f"good-{i}"].error is None
        for i, prompt in enumerate(bad):
            if name == "window" and i == 2:
                continue  # 60 is out of sight of the last token: see below
            assert out[f"bad-{i}"].finished
            assert tokens_of(out[f"bad-{i}"]) == [[]]
            assert out[f"bad-{i}"].outputs[0].finish_reason == "error"
            assert f"logits contain NaN at position {len(prompt)} (61 of 61 values" in out[f"bad-{i}"].error


@pytest.mark.parametrize("name", UNTIED)
def test_nan_does_not_reach_back_into_a_prefix_that_others_share(name):
    """One chunk holds the prefix and the broken token; the prefix is indexed, and must be sound."""
    case = cases(name)[-1]
    bad = next(token for token in range(61) if token not in case.prompt + case.answer)
    one = engine(with_bad_token(name, bad), block_size=4)
    assert "NaN" in run(one, [*case.prompt[:25], bad]).error
    out = run(one, case.prompt)
    assert out.num_cached_tokens == 24
    assert tokens_of(out) == [case.answer]


@pytest.mark.parametrize("options", [{}, PIECES, {"max_num_batched_tokens": 1}])
def test_nan_behind_a_sliding_window_is_out_of_sight(options):
    """Two layers of window 3 see at most 4 tokens back: NaN further back than that is nobody's business."""
    layers = (LayerConfig(intermediate_size=16, sliding_window=3),) * 2
    config = ModelConfig(
        model_type="random", vocab_size=61, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        layers=layers, max_position_embeddings=64,
    )  # fmt: skip
    sane, broken = (Decoder(config).init_weights(0.4).eval() for _ in range(2))
    with torch.no_grad():
        broken.embed.weight[60] = math.nan
    wanted = judge(sane, [7, 1, 2, 3, 4, 5], new=8).answer
    one = engine(broken, max_model_len=64, **options)
    assert tokens_of(run(one, [7, 1, 2, 3, 4, 5], GREEDY.clone(max_tokens=8))) == [wanted]
    out = run(one, [60, 1, 2, 3, 4, 5], GREEDY.clone(max_tokens=8))
    assert out.error is None
    assert tokens_of(out) == [judge_tail(sane, [7, 1, 2, 3, 4, 5], 8)]


def judge_tail(decoder, prompt, new):
    """The first token cannot be seen by any that matters, so it may be any other."""
    answers = {tuple(judge(decoder, [first, *prompt[1:]], new=new).answer) for first in (7, 8, 9)}
    assert len(answers) == 1
    return list(answers.pop())


def test_one_broken_expert_ends_only_the_requests_that_visit_it():
    moe = LayerConfig(moe=MoEConfig(num_experts=16, top_k=1, intermediate_size=8))
    config = CONFIGS["full"]
    config = ModelConfig(
        **{**{f: getattr(config, f) for f in config.__dataclass_fields__}, "layers": (moe, moe)}
    )
    decoder = Decoder(config).init_weights(0.4).eval()
    r = random.Random(0)
    judged = [judge(decoder, [r.randrange(61) for _ in range(2)], new=4) for _ in range(24)]
    visits = [{int(e) for e in j.experts[0].flatten()} for j in judged]
    expert = max(range(16), key=lambda e: min(sum(e in v for v in visits), sum(e not in v for v in visits)))
    with torch.no_grad():
        decoder.layers[0].mlp.experts.gate_up[expert] = math.nan
        decoder.layers[0].mlp.experts.down[expert] = math.nan
    one = engine(decoder, block_size=2)
    for i, j in enumerate(judged):
        one.add_request(str(i), j.prompt, GREEDY.clone(max_tokens=4))
    out = finish(one)
    hit = [expert in v for v in visits]
    assert 3 <= sum(hit) <= 21
    for i, j in enumerate(judged):
        assert (out[str(i)].error is not None) == hit[i]
        c = out[str(i)].outputs[0]
        first = next((t for t, e in enumerate(j.experts[0].flatten().tolist()) if e == expert), None)
        count = 4 if first is None else max(0, first - 1)
        assert c.token_ids == j.answer[:count]
        assert c.finish_reason == ("error" if hit[i] else "length")


def test_an_error_in_one_of_n_answers_ends_the_request():
    decoder = build("full")
    with torch.no_grad():
        decoder.embed.weight[:30] = math.nan  # half of what is drawn cannot be read
    one = engine(decoder, block_size=2)
    one.add_request("many", [40, 41], SamplingParams(n=4, temperature=5.0, max_tokens=30, seed=1))
    one.add_request("other", [41, 42], GREEDY.clone(allowed_token_ids=list(range(30, 61))))
    out = finish(one)
    assert {c.finish_reason for c in out["many"].outputs} <= {"error", "length"}
    assert "logits contain NaN" in out["many"].error
    assert len(out["many"].outputs) == 4
    assert out["other"].error is None
    assert len(tokens_of(out["other"])[0]) == NEW


def test_bans_that_leave_nothing_are_an_error_of_that_request():
    one = engine("moe")
    one.add_request("empty", [1, 2], GREEDY.clone(allowed_token_ids=[3], stop_token_ids=[3], min_tokens=2))
    add_cases(one, "moe")
    out = finish(one)
    assert out["empty"].outputs[0].finish_reason == "error"
    assert "every token is banned at position 2" in out["empty"].error
    assert "min_tokens" in out["empty"].error
    check_cases(out, "moe")


# A forward pass that dies


class Dies:
    """Stands in for a function and raises at its nth call."""

    def __init__(self, function, nth, error):
        self.function, self.nth, self.error = function, nth, error

    def __call__(self, *args, **options):
        self.nth -= 1
        if self.nth == 0:
            raise self.error
        return self.function(*args, **options)


@pytest.mark.parametrize(
    ("place", "error", "options"),
    [
        ("write", RuntimeError("out of memory"), SQUEEZED),
        ("write", KeyboardInterrupt(), {"block_size": 4, "max_num_batched_tokens": 24}),
        ("sample", RuntimeError("bad luck"), {"block_size": 4}),
        ("sample", KeyboardInterrupt(), SQUEEZED),
        ("copy", KeyboardInterrupt(), {"block_size": 4}),
        ("schedule", KeyboardInterrupt(), {"block_size": 4, "max_num_batched_tokens": 24}),
    ],
    ids=str,
)
def test_a_step_that_dies_is_undone(place, error, options):
    name = "mixed"
    one = engine(name, **options)
    add_cases(one, name)
    one.add_request("many", cases(name)[5].prompt, seeded(40, n=3))
    holder, attribute = {
        "write": (one.runner.storage, "write"),
        "sample": (one.sampler, "sample"),
        "copy": (one.runner.storage, "copy_blocks"),
        "schedule": (one.scheduler, "_record"),
    }[place]
    function, out, deaths = getattr(holder, attribute), {}, 0
    r = random.Random(2)
    while one.has_unfinished_requests():
        setattr(holder, attribute, Dies(function, r.randint(1, 6), error))
        before = (one.metrics.computed_tokens, one.routes.load.sum(), one.metrics.generation_tokens)
        state = [(s.num_computed_tokens, len(s.token_ids)) for s in one.scheduler.running]
        events = one.trace.start()
        try:
            out |= {o.request_id: o for o in one.step()}
        except type(error):
            deaths += 1
            assert before == (
                one.metrics.computed_tokens,
                one.routes.load.sum(),
                one.metrics.generation_tokens,
            )
            if not events.of("admit", "preempt"):
                assert state == [(s.num_computed_tokens, len(s.token_ids)) for s in one.scheduler.running]
            assert one.blocks._chunks == one.blocks._log == one.blocks.copies == []
        one.trace.stop(events)
    assert deaths > 3
    setattr(holder, attribute, function)
    out |= finish(one)
    check_cases(out, name)
    alone = engine(name)
    alone.add_request("many", cases(name)[5].prompt, seeded(40, n=3))
    assert tokens_of(out["many"]) == tokens_of(finish(alone)["many"])
    for layer, config in enumerate(CONFIGS[name].layers):
        assert one.routes.load[layer].sum() == (
            one.metrics.computed_tokens * config.moe.top_k if config.moe else 0
        )


# Refusals


class Words:
    """A tokenizer of sorts: one id a character."""

    def encode(self, text):
        return [ord(c) - 96 for c in text]

    def text_state(self, params, prompt_token_ids):
        return None

    def bad_word_ids(self, words):
        return [self.encode(w) for w in words]

    def decoded_token(self, token_id):
        return chr(token_id + 96)


OK = [1, 2, 3]
REFUSED = {
    "empty": (([],), "the prompt is empty: it needs at least one token"),
    "empty dict": (({"prompt_token_ids": []},), "the prompt is empty"),
    "too big": (([1, 61, 2],), r"prompt has token ids outside 0\.\.60: \[61\]"),
    "negative": (([-1, 2, 99],), r"prompt has token ids outside 0\.\.60: \[-1, 99\]"),
    "float ids": (([1.0, 2],), "prompt_token_ids must be a list of ints, got"),
    "numpy floats": ((np.array([1.5, 2.0], dtype=np.float32),), "prompt_token_ids must be a list of ints"),
    "bools": (([True, 2],), "prompt_token_ids must be a list of ints"),
    "words as ids": ((["a"],), "prompt_token_ids must be a list of ints"),
    "none": ((None,), "prompt_token_ids must be a list of ints, got None"),
    "a number": ((5,), "prompt_token_ids must be a list of ints, got 5"),
    "unknown key": (({"tokens": [1]},), r"a prompt dict has 'prompt' or 'prompt_token_ids', got keys \['tokens'\]"),
    "text": (("abc",), r"a text prompt needs a tokenizer: give \{'prompt_token_ids'"),
    "too long": ((OK * 22,), "the prompt has 66 tokens and leaves no room for output: max_model_len is 64"),
    "as long": (([1] * 64,), "leaves no room for output"),
    "min too long": ((OK, {"min_tokens": 62, "max_tokens": 99}), r"prompt \(3\) \+ min_tokens \(62\) exceeds max_model_len \(64\)"),
    "never fits": ((OK, {"max_tokens": 47}), r"can never fit: 50 tokens \(prompt 3, max_tokens 47\) need 13 blocks of 4, the cache has 12; lower max_tokens or raise num_blocks"),
    "never fits without a limit": ((OK, {"max_tokens": None}), "can never fit: 64 tokens"),
    "too many answers": ((OK, {"n": 4, "max_tokens": 2}), r"n \(4\) exceeds max_num_seqs \(3\)"),
    "stop id": ((OK, {"stop_token_ids": [99]}), r"stop_token_ids has token ids outside 0\.\.60: \[99\]"),
    "bias id": ((OK, {"logit_bias": {70: 1.0}}), r"logit_bias has token ids outside 0\.\.60: \[70\]"),
    "allowed id": ((OK, {"allowed_token_ids": [-1]}), r"allowed_token_ids has token ids outside"),
    "logprobs": ((OK, {"logprobs": 62}), r"logprobs \(62\) exceeds the vocabulary \(61\)"),
    "prompt logprobs": ((OK, {"prompt_logprobs": 62}), r"prompt_logprobs \(62\) exceeds the vocabulary \(61\)"),
    "stop strings": ((OK, {"stop": ["x"]}), "stop strings and bad_words need a tokenizer"),
    "bad words": ((OK, {"bad_words": ["x"]}), "stop strings and bad_words need a tokenizer"),
}  # fmt: skip


def busy():
    """An engine in the middle of things, and what must not change in it."""
    one = engine("moe", max_model_len=64, max_num_seqs=3, num_blocks=12, block_size=4)
    one.add_request("runs", cases("moe")[3].prompt, GREEDY)
    one.add_request("unseeded", [5], SamplingParams(max_tokens=5))
    one.step()
    return one


def state(one):
    return (one.metrics.requests, one.metrics.prompt_tokens, one.intake.count, one._next_seq_id, [*one._requests],
            one.blocks.pool.free_list(), one.blocks.tables.tolist(), len(one.scheduler.waiting))  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused_disturbs_nothing(why):
    (prompt, *options), message = REFUSED[why]
    one = busy()
    before = state(one)
    with pytest.raises(RequestError, match=message):
        one.add_request("new", prompt, SamplingParams(**(options[0] if options else {})))
    assert state(one) == before
    assert one.abort_request("new") is None
    after, calm = finish(one), finish(busy())
    assert {k: tokens_of(v) for k, v in after.items()} == {k: tokens_of(v) for k, v in calm.items()}
    assert tokens_of(after["runs"]) == [cases("moe")[3].answer]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": "high"}, "priority must be an int"),
        ({"priority": 1.0}, "priority must be an int"),
        ({"priority": True}, "priority must be an int"),
        ({"cache_salt": ""}, "cache_salt must be a non-empty string or None"),
        ({"cache_salt": 5}, "cache_salt must be a non-empty string or None"),
        ({"sampling_params": {"n": 1}}, "sampling_params must be a SamplingParams, got dict"),
        ({"request_id": "runs"}, "request id 'runs' is in use: wait until it ends, or abort it"),
        ({"request_id": 5}, "request_id must be a string, got 5"),
        ({"request_id": ["a"]}, "request_id must be a string"),
    ],
)
def test_bad_options_of_a_request(options, message):
    one = busy()
    before = state(one)
    with pytest.raises(RequestError, match=message):
        one.add_request(**{"request_id": "new", "prompt": OK, **options})
    assert state(one) == before
    with pytest.raises(TypeError, match="temperature"):
        one.add_request("new", OK, temperature=1)
    finish(one)


def test_steps_without_work_are_no_steps():
    one = engine("moe")
    run(one, OK)
    before = one.get_metrics()
    with one.trace.record() as events:
        assert [one.step() for _ in range(20)] == [[]] * 20
        assert one.scheduler.schedule() == []
    assert events == []
    assert one.get_metrics() == before


def test_an_id_can_be_used_again_once_its_request_has_ended():
    one = busy()
    one.abort_request("runs")
    one.add_request("runs", cases("moe")[3].prompt, GREEDY)
    assert tokens_of(finish(one)["runs"]) == [cases("moe")[3].answer]
    assert one.abort_request("never-seen") is None


@pytest.mark.parametrize(
    "prompt",
    [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), torch.tensor([1, 2, 3]), {"prompt_token_ids": np.array([1, 2, 3])}, "abc",
     {"prompt": "abc"}, {"prompt": "xyz", "prompt_token_ids": [1, 2, 3]}],
    ids=str,
)  # fmt: skip
def test_all_forms_of_a_prompt(prompt):
    one = Engine(model("moe"), text=Words())
    one.add_request("a", prompt, GREEDY)
    out = finish(one)["a"]
    assert out.prompt_token_ids == [1, 2, 3]
    assert tokens_of(out) == tokens_of(run(engine("moe"), [1, 2, 3]))
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    assert out.prompt == (text if isinstance(text, str) else None)


def test_the_longest_request_that_fits_is_served():
    one = engine("moe", max_model_len=64, num_blocks=12, block_size=4)
    one.add_request("exact", OK, GREEDY.clone(max_tokens=46))  # 49 tokens, of which the last is never run
    one.add_request("beside", OK, GREEDY.clone(max_tokens=46))
    out = finish(one)
    assert (
        tokens_of(out["exact"])
        == tokens_of(out["beside"])
        == tokens_of(run(engine("moe"), OK, GREEDY.clone(max_tokens=46)))
    )


def test_an_engine_that_cannot_be_built():
    with pytest.raises(ConfigError, match="exceeds the model's max_position_embeddings"):
        engine("moe", max_model_len=129)
    with pytest.raises(ConfigError, match="is less than one block"):
        engine("moe", kv_cache_bytes=100)
