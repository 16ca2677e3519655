"""Speculation on a GPU, in captured graphs and without: the tokens are those of plain decoding there, which test_gpu.py holds
against a plain loop.
"""

import pytest
from test_gpu import GREEDY, PROMPTS, SEEDED, plain  # noqa: F401 (a fixture)

from tinymoe import LLM

pytestmark = pytest.mark.gpu
SPECS = {
    "draft_model": {"method": "draft_model", "model": "quintet-draft", "num_speculative_tokens": 4},
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1},
    "self": {"method": "self", "num_speculative_tokens": 2},
}
OPTIONS = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "synchronous": {"async_scheduling": False},
    "budget": {"max_num_batched_tokens": 7},
    "preempts": {"block_size": 4, "num_blocks": 30},
    "two-seats": {"block_size": 1, "max_num_seqs": 2},
}


def guessing(how, adaptive=False, dtype="float32", acceptance="coupled", **options):
    spec = SPECS[how] | {"adaptive": adaptive, "acceptance": acceptance}
    return LLM("quintet-moe", device="cuda", dtype=dtype, speculative_config=spec, **options)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("how", SPECS)
def test_greedy_equals_the_plain_loop(plain, how, options, adaptive):  # noqa: F811
    llm = guessing(how, adaptive, **OPTIONS[options])
    for _ in range(2):  # the second time with prefix hits
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] == plain
    metrics = llm.get_metrics()
    assert metrics["accepted_tokens"] > 0
    if options == "preempts":
        assert metrics["preemptions"] > 0
    assert (llm.engine.runner.graphs is None) == (options == "eager")
    drafter = llm.engine.spec.proposer.drafter
    assert drafter is None or (drafter.graphs is None) == (options == "eager")


@pytest.mark.parametrize("how", SPECS)
def test_coupled_samples_are_those_of_plain_decoding(how):
    alone = LLM("quintet-moe", device="cuda", dtype="float32").generate(PROMPTS, SEEDED.clone(top_p=1.0))
    llm = guessing(how)
    outputs = llm.generate(PROMPTS, SEEDED.clone(top_p=1.0))
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in alone]
    assert llm.get_metrics()["accepted_tokens"] > 0


@pytest.mark.parametrize("how", ["draft_model", "self"])
def test_rejection_sampling_is_the_same_with_graphs(how):
    wanted, got = (
        guessing(how, acceptance="exact", enforce_eager=eager).generate(PROMPTS, SEEDED)
        for eager in (True, False)
    )
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in wanted]


@pytest.mark.parametrize("how", SPECS)
def test_invariant_speculation_is_bitwise_plain_in_bfloat16(how):
    """Verification of several tokens at once adds in the order of one at a time, so that even near ties fall alike."""
    options = {"dtype": "bfloat16", "batch_invariant": True}
    alone = LLM("quintet-moe", device="cuda", **options).generate(PROMPTS, GREEDY.clone(max_tokens=96))
    llm = guessing(how, **options)
    outputs = llm.generate(PROMPTS, GREEDY.clone(max_tokens=96))
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in alone]
    assert llm.get_metrics()["accepted_tokens"] > 0
