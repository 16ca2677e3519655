"""The whole engine on a GPU, requests in and tokens out, on published shapes with random weights; vLLM beside it."""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from tinymoe.bench.gpu.e2e.models import (
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    MODELS,
    WORKLOADS,
    Workload,
    prompts_of,
    write_config,
)
from tinymoe.bench.gpu.moe import ceilings
from tinymoe.bench.results import write_results
from tinymoe.core.model_config import ConfigError
from tinymoe.core.params import SamplingParams
from tinymoe.llm import LLM

MODES: dict[str, dict] = {
    "default": {},
    "sync": {"async_scheduling": False},
    "eager": {"enforce_eager": True},
    "invariant": {"batch_invariant": True},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results JSON here")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--modes", nargs="+", default=["default"], choices=list(MODES), metavar="MODE")
    parser.add_argument(
        "--requests", nargs="+", type=int, help="only these workloads in the modes after the first"
    )
    parser.add_argument("--passes", type=int, default=2, help="runs of each workload; the fastest counts")
    parser.add_argument("--budget", type=int, default=16384, help="max_num_batched_tokens of tinymoe")
    parser.add_argument(
        "--vllm",
        action="store_true",
        help="measure vLLM too, which must be importable; set its variables (VLLM_ENABLE_V1_MULTIPROCESSING=0, ...) yourself",
    )


def run_once(llm: LLM, workload: Workload, prompts: list[list[int]]) -> tuple[float, float | None]:
    """Seconds, and the mean number of distinct experts that a layer read in a step."""
    params = SamplingParams(
        max_tokens=workload.tokens_out, ignore_eos=True, temperature=1.0, detokenize=False
    )
    routes = llm.engine.routes
    before, steps = routes.distinct, routes.routed_steps
    torch.cuda.synchronize()
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    seconds = time.perf_counter() - start
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    if made != workload.requests * workload.tokens_out:
        raise ValueError(f"{made} tokens were made for {workload}")
    distinct = (routes.distinct - before) / max(1, routes.routed_steps - steps)
    return seconds, float(np.mean(distinct)) if distinct.any() else None


def run_ours(name: str, folder: Path, mode: str, arguments: argparse.Namespace) -> list[dict]:
    """One row per workload."""
    start = time.perf_counter()
    llm = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, device="cuda", max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=arguments.budget, gpu_memory_utilization=0.85,
        enable_prefix_caching=False, **MODES[mode],
    )  # fmt: skip
    torch.cuda.synchronize()
    started = time.perf_counter() - start
    rows = []
    for number, workload in enumerate(WORKLOADS):
        first = mode == arguments.modes[0]
        if not first and arguments.requests and workload.requests not in arguments.requests:
            continue
        passes = []
        for i in range(arguments.passes):
            prompts = prompts_of(workload, MODELS[name]["vocab_size"], number * arguments.passes + i)
            laps = dict(llm.get_metrics())
            passes.append((*run_once(llm, workload, prompts), laps))
        seconds, distinct, _ = min(passes, key=lambda one: one[0])
        row = {
            "model": name, "mode": mode, "requests": workload.requests, "in": workload.tokens_in,
            "out": workload.tokens_out, "seconds": seconds,
            "tok_s": workload.requests * workload.tokens_out / seconds, "distinct_experts": distinct,
            "start_s": started, "peers": {},
        }  # fmt: skip
        after = llm.get_metrics()
        parts = ("schedule_seconds", "forward_seconds", "sample_seconds", "commit_seconds", "steps")
        last = passes[-1][2]
        row["host"] = {part: after[part] - last[part] for part in parts}  # of the last pass
        rows.append(row)
        print(f"{name} {mode} {tuple(workload)}: {row['tok_s']:.0f} tok/s {row['host']}", file=sys.stderr)
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    return rows


def run_vllm(folder: Path, passes: int) -> list[dict]:
    """What the peer's process prints."""
    command = [sys.executable, "-m", "tinymoe.bench.gpu.e2e.peer_vllm", str(folder), str(passes)]
    command += [str(MAX_NUM_SEQS), str(MAX_MODEL_LEN)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(f"vLLM ended with {done.returncode}; its figures so far count", file=sys.stderr)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def run(arguments: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise ConfigError("bench e2e measures on a GPU, and torch sees none: run it where there is one")
    rows, version = [], None
    with tempfile.TemporaryDirectory() as root:
        for name in arguments.models:
            folder = write_config(name, Path(root) / name)
            mine = [row for mode in arguments.modes for row in run_ours(name, folder, mode, arguments)]
            for line in run_vllm(folder, arguments.passes) if arguments.vllm else ():
                version = line.get("version", version)
                for row in mine if "workload" in line else ():
                    if [row["requests"], row["in"], row["out"]] == line["workload"]:
                        row["peers"]["vllm"] = row["requests"] * row["out"] / line["seconds"]
            rows += mine
    table = Table(title="output tokens a second")
    for column in ("model", "mode", "requests", "in", "out", "tok/s", "vLLM", "ratio", "distinct"):
        table.add_column(column, justify="right")
    for row in rows:
        peer = row["peers"].get("vllm")
        ratio = f"{row['tok_s'] / peer:.2f}" if peer else ""
        cells = (row["requests"], row["in"], row["out"], f"{row['tok_s']:.0f}", f"{peer or 0:.0f}", ratio)
        table.add_row(row["model"], row["mode"], *map(str, cells), f"{row['distinct_experts'] or 0:.1f}")
    Console(width=110).print(table)
    if arguments.out:
        command = f"python -m tinymoe bench e2e --models {' '.join(arguments.models)} --modes {' '.join(arguments.modes)}"
        command += f" --requests {' '.join(map(str, arguments.requests))}" if arguments.requests else ""
        command += f" --passes {arguments.passes} --budget {arguments.budget}" + (
            " --vllm" if version else ""
        )
        body = write_results(arguments.out, command=command, rows=rows, ceilings=ceilings())
        if version:
            body["versions"]["vllm"] = version
            arguments.out.write_text(json.dumps(body, indent=1) + "\n")
    return 0
