"""The engine against transformers' generate: same weights, same prompts, same threads, interleaved in one run."""

import argparse
import time
import timeit
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from tinymoe.bench.results import timing, write_results
from tinymoe.bench.scheduling import measure_scheduling
from tinymoe.core.model_config import require
from tinymoe.core.params import SamplingParams
from tinymoe.core.trace import Trace
from tinymoe.llm import LLM, resolve_model

REQUESTS = (1, 8, 32)
SHORTEST, LONGEST = 16, 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results JSON here")
    parser.add_argument("--model", default="quintet-moe", help="bundled model or local folder")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each arm, interleaved")
    parser.add_argument("--output-tokens", type=int, default=64, help="tokens generated per request")
    parser.add_argument("--threads", type=int, default=2, help="torch threads, for both arms")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts")


def draw_prompts(requests: int, vocab: int, rng: np.random.Generator) -> list[list[int]]:
    """Ragged prompts of random ids: 16 to 256 tokens, or one of 64."""
    lengths = [64] if requests == 1 else rng.integers(SHORTEST, LONGEST + 1, requests)
    return [rng.integers(1, vocab, n).tolist() for n in lengths]


def run_ours(llm: LLM, prompts: list[list[int]], tokens: int) -> float:
    """Seconds for all prompts, from a cold prefix cache."""
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - start


@torch.inference_mode()
def run_transformers(model, prompts: list[list[int]], tokens: int) -> float:
    """Seconds for one static batch, left-padded to the longest prompt, with its KV cache on."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=0,
    )
    seconds = time.perf_counter() - start
    if out.shape[1] != width + tokens:
        raise ValueError(f"transformers produced {out.shape[1] - width} tokens, {tokens} wanted")
    return seconds


class CountingTrace(Trace):
    """Counts how often the engine asks whether somebody listens."""

    def __init__(self):
        self.asked = 0
        super().__init__()

    @property
    def on(self) -> bool:
        self.asked += 1
        return False

    @on.setter
    def on(self, value: bool) -> None:
        pass


def measure_trace(arguments: argparse.Namespace, prompts: list[list[int]]) -> dict[str, float]:
    """What the silent trace costs: questions asked per step times the price of one, as a share of the step."""
    llm = LLM(arguments.model, skip_tokenizer_init=True)
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=arguments.output_tokens, ignore_eos=True)
    counting = CountingTrace()
    for room in (engine, engine.scheduler, engine.blocks, engine.blocks.pool, engine.routes):
        room.trace = counting
    start = time.perf_counter()
    llm.generate(prompts, params)
    step = (time.perf_counter() - start) / engine.metrics.steps
    trace = Trace()
    price = min(timeit.repeat("trace.on", globals={"trace": trace}, number=100_000, repeat=5)) / 100_000
    asked = counting.asked / engine.metrics.steps
    return {"questions_per_step": asked, "price_ns": price * 1e9, "share_of_step": asked * price / step}


def measure_step(llm: LLM, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """Where a steady decode step's time goes, as shares: forward, sampling, and everything else."""
    engine = llm.engine
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(f"steady-{i}", prompt, params)
    while any(
        s.num_computed_tokens < s.num_prompt_tokens
        for s in (*engine.scheduler.waiting, *engine.scheduler.running)
    ):
        engine.step()
    m = engine.metrics
    parts = ("schedule", "forward", "sample", "commit")
    before = {p: getattr(m, f"{p}_seconds") for p in parts}
    while engine.has_unfinished_requests():
        engine.step()
    spent = {p: getattr(m, f"{p}_seconds") - before[p] for p in parts}
    total = sum(spent.values())
    outside = spent["schedule"] + spent["commit"]
    return {
        "forward": spent["forward"] / total,
        "sampling": spent["sample"] / total,
        "outside": outside / total,
    }


def run(arguments: argparse.Namespace) -> int:
    for name, least in (("repeats", 1), ("output_tokens", 1), ("threads", 1), ("seed", 0)):
        value = getattr(arguments, name)
        require(value >= least, f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    torch.set_num_threads(arguments.threads)
    rng = np.random.default_rng(arguments.seed)
    llm = LLM(arguments.model, skip_tokenizer_init=True)
    peer = AutoModelForCausalLM.from_pretrained(resolve_model(arguments.model), dtype=torch.float32).eval()
    tokens, vocab = arguments.output_tokens, llm.model_config.vocab_size
    rows = []
    for requests in REQUESTS:
        warm = draw_prompts(requests, vocab, rng)
        run_ours(llm, warm, 8)
        run_transformers(peer, warm, 8)
        ours, theirs = [], []
        for _ in range(arguments.repeats):
            prompts = draw_prompts(requests, vocab, rng)
            ours.append(requests * tokens / run_ours(llm, prompts, tokens))
            theirs.append(requests * tokens / run_transformers(peer, prompts, tokens))
        rows.append(
            {
                "model": arguments.model,
                "dtype": "float32",
                "mode": "greedy",
                "seed": arguments.seed,
                "requests": requests,
                "out": tokens,
                "tok_s": timing(ours),
                "peers": {"transformers": timing(theirs)},
                "ratio": timing([a / b for a, b in zip(ours, theirs)]),
            }
        )
    many = draw_prompts(REQUESTS[-1], vocab, rng)
    controls = [
        {"what": "shares of a steady decode step, 32 requests", **measure_step(llm, many, tokens)},
        {"what": "the trace when nobody listens, 32 requests", **measure_trace(arguments, many)},
        {"what": "schedule() and page accounting, 256 running", **measure_scheduling()},
    ]
    show(rows, controls)
    if arguments.out:
        command = f"tinymoe bench engine --repeats {arguments.repeats} --threads {arguments.threads} --out {arguments.out}"
        ceilings = {"threads": arguments.threads}
        write_results(
            arguments.out,
            command=command,
            rows=rows,
            controls=controls,
            ceilings=ceilings,
            packages=["transformers"],
        )
    return 0


def show(rows: list[dict], controls: list[dict]) -> None:
    table = Table(title="Output tokens per second (median)")
    for name in ("requests", "tinymoe", "transformers", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        peer = row["peers"]["transformers"]["median"]
        table.add_row(
            str(row["requests"]),
            f"{row['tok_s']['median']:.0f}",
            f"{peer:.0f}",
            f"{row['ratio']['median']:.2f}",
        )
    console = Console()
    console.print(table)
    for control in controls:
        console.print(control)
