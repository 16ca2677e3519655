"""The engine on a GPU: the same promises, checked there. Judge: a plain token loop on the same device."""

import pytest
import torch

from tinymoe import LLM, SamplingParams
from tinymoe.core.model_config import ConfigError
from tinymoe.model.attention import CausalAttend
from tinymoe.ops.noise import gumbel

pytestmark = pytest.mark.gpu
PROMPTS = [
    "It was a cold morning",
    "Es war einmal",
    "def push(self, ",
    "KING RICHARD:\nWhat news?",
    "7*8=56\n12+35=",
]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, top_p=0.95, max_tokens=32, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def plain():
    """Greedy continuations by the plain loop, float32 on the GPU. Gradients are on, so no kernel of ours takes part."""
    torch.backends.cuda.matmul.allow_tf32 = False
    llm = LLM("quintet-moe", device="cuda", dtype="float32")
    model, tokenizer = llm.engine.runner.model, llm.get_tokenizer()
    found = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        start = len(ids)
        for _ in range(32):
            flat = torch.tensor(ids, device="cuda")
            with torch.enable_grad():
                logits = model(flat, torch.arange(len(ids), device="cuda"), CausalAttend(1, len(ids)))
            ids.append(int(logits[-1].argmax()))
        found.append(ids[start:])
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"block_size": 4, "num_blocks": 24},  # preempts
        {"block_size": 1, "max_num_seqs": 2},
        {"enable_prefix_caching": False},
        {"enforce_eager": True},
        {"async_scheduling": False},
        {"async_scheduling": False, "max_num_batched_tokens": 7},
        {"async_scheduling": False, "block_size": 4, "num_blocks": 24},
        {"batch_invariant": True},
    ],
)
def test_greedy_equals_the_plain_loop(plain, options):
    llm = LLM("quintet-moe", device="cuda", dtype="float32", **options)
    for _ in range(2):  # the second time with prefix hits
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] == plain
    if options.get("num_blocks"):
        assert llm.get_metrics()["preemptions"] > 0


def test_seeded_does_not_depend_on_the_batch():
    llm = LLM("quintet-moe", device="cuda", dtype="float32", enable_prefix_caching=False)
    alone = [llm.generate(p, SEEDED)[0].outputs[0].token_ids for p in PROMPTS]
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, SEEDED)] == alone
    small = LLM("quintet-moe", device="cuda", dtype="float32", max_num_batched_tokens=5, num_blocks=12)
    assert [o.outputs[0].token_ids for o in small.generate(PROMPTS, SEEDED)] == alone


@pytest.mark.parametrize("ahead", [False, True])
def test_graphs_small_then_large_then_small(plain, ahead):
    """A graph is replayed after others were: 1, then all, then 3 rows of a bucket of 4; padding is counted nowhere."""
    llm = LLM(
        "quintet-moe", device="cuda", dtype="float32", async_scheduling=ahead, enable_prefix_caching=False
    )
    for some in ([0], [0, 1, 2, 3, 4], [1, 2, 4], [3]):
        outputs = llm.generate([PROMPTS[i] for i in some], GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == [plain[i] for i in some]
    metrics = llm.get_metrics()
    loads = {sum(row) for row in metrics["expert_load"] if row}
    # A step ahead of an end that only the token tells has no place here: all end by length.
    assert loads == {2 * metrics["computed_tokens"]}
    assert llm.engine.runner.graphs is not None


def test_seeded_with_graphs_equals_eager():
    params = SamplingParams(temperature=0.9, max_tokens=48, seed=11, ignore_eos=True)
    options = {"device": "cuda", "dtype": "float32"}
    eager = LLM("quintet-moe", enforce_eager=True, **options)
    wanted = [o.outputs[0].token_ids for o in eager.generate(PROMPTS, params)]
    for ahead in (False, True):
        llm = LLM("quintet-moe", async_scheduling=ahead, **options)
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)] == wanted


def test_stops_and_logprobs_beside_graphs(plain):
    llm = LLM("quintet-moe", device="cuda", dtype="float32", async_scheduling=True)
    stops = [SamplingParams(temperature=0, max_tokens=32, stop_token_ids=[ids[9]]) for ids in plain]
    got = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, stops)]
    assert got == [ids[: ids.index(ids[9]) + 1] for ids in plain]
    logged = llm.generate(PROMPTS, GREEDY.clone(logprobs=1))
    assert [o.outputs[0].token_ids for o in logged] == plain


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_invariant_is_bitwise_in_bfloat16(params):
    """Tokens and logprobs of a request alone, in a batch, chunked and preempted: the same bits."""
    params = params.clone(logprobs=0)

    def bits(llm, prompts):
        outputs = [o.outputs[0] for o in llm.generate(prompts, params)]
        return [(o.token_ids, [step[t].logprob for step, t in zip(o.logprobs, o.token_ids)]) for o in outputs]

    options = {"device": "cuda", "batch_invariant": True, "enable_prefix_caching": False}
    llm = LLM("quintet-moe", **options)
    alone = [bits(llm, [prompt])[0] for prompt in PROMPTS]
    assert bits(llm, PROMPTS) == alone
    assert bits(llm, [*PROMPTS, *PROMPTS, *PROMPTS])[:5] == alone
    small = LLM("quintet-moe", max_num_batched_tokens=5, num_blocks=12, **options)
    assert bits(small, PROMPTS) == alone


def test_a_model_that_does_not_fit_is_refused_with_the_arithmetic():
    with pytest.raises(
        ConfigError, match=r"GiB x gpu_memory_utilization 0.001 = .* leaves .* lower max_model_len"
    ):
        LLM("quintet-moe", device="cuda", gpu_memory_utilization=0.001)


def test_bfloat16_is_close_to_float32(plain):
    """Most greedy tokens agree before the first divergence; a wrong kernel or cast agrees on almost none."""
    llm = LLM("quintet-moe", device="cuda")
    assert llm.engine.runner.model.norm.weight.dtype is torch.bfloat16
    same = 0
    for output, wanted in zip(llm.generate(PROMPTS, GREEDY), plain):
        got = output.outputs[0].token_ids
        same += next((i for i, (a, b) in enumerate(zip(got, wanted)) if a != b), 32)
    assert same >= 40


def test_noise_is_the_same_as_on_the_cpu():
    seeds, positions = torch.tensor([1, 2, 2**62]), torch.tensor([0, 7, 100_000])
    ids = torch.arange(4096)
    there = gumbel(seeds.cuda(), positions.cuda(), ids.cuda(), 0).cpu()
    torch.testing.assert_close(there, gumbel(seeds, positions, ids, 0), rtol=1e-5, atol=1e-5)


def test_routed_experts_come_back_to_the_host():
    llm = LLM("quintet-moe", device="cuda", return_routed_experts=True)
    output = llm.generate(PROMPTS[0], GREEDY)[0]
    tokens = len(output.prompt_token_ids) + 32
    assert output.outputs[0].routed_experts.shape == (tokens - 1, 6, 2)
