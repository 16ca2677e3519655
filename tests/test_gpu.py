"""The engine on a GPU: the same promises, checked there. Judge: a plain token loop on the same device."""

import pytest
import torch

from tinymoe import LLM, SamplingParams
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
