"""What scheduling and page accounting cost: a steady decode without a model, step by step."""

import time
from typing import Any

from tinymoe.bench.results import timing
from tinymoe.cache.blocks import BlockManager
from tinymoe.core.config import EngineConfig
from tinymoe.core.metrics import EngineMetrics
from tinymoe.core.params import SamplingParams
from tinymoe.core.sequence import Request, Sequence
from tinymoe.core.trace import Trace
from tinymoe.engine.scheduler import Scheduler

PROMPT_TOKENS = 64


def measure_scheduling(
    num_seqs: int = 256, steps: int = 400, *, block_size: int = 16, listen: bool = False
) -> dict[str, Any]:
    """Milliseconds per step of schedule(), place() and settle() while `num_seqs` requests decode.

    Prompts are staggered, so that every step some of them need a new block and some fill one, as in a long run.
    listen: with somebody who records the trace. Returns a row for a results file: median and quartiles of the whole and
    of both halves. No other job should run beside it: the quartile p25 is what a busy machine still shows.
    """
    whole = PROMPT_TOKENS + block_size  # the longest prompt; the budget takes all of them in the first step
    config = EngineConfig(
        max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs * whole, block_size=block_size
    )
    length = whole + steps + 8
    trace, metrics = Trace(), EngineMetrics()
    blocks = BlockManager(
        num_seqs * -(-length // block_size),
        block_size,
        max_num_seqs=num_seqs,
        max_model_len=length,
        trace=trace,
    )
    scheduler = Scheduler(config, blocks, metrics, trace)
    for number in range(num_seqs):
        prompt = [number] * (PROMPT_TOKENS + number % block_size)
        request = Request(str(number), number, prompt, SamplingParams(max_tokens=None), number)
        seq = Sequence(number, request)
        request.sequences.append(seq)
        scheduler.add(seq)
    _step(scheduler, blocks)
    recording = trace.start() if listen else None
    schedule, settle = [], []
    for _ in range(steps):
        a, b = _step(scheduler, blocks)
        schedule.append(a * 1e3)
        settle.append(b * 1e3)
        if recording is not None:
            recording.clear()
    return {
        "mode": "schedule, steady decode",
        "requests": num_seqs,
        "block_size": block_size,
        "trace": listen,
        "step_ms": timing([a + b for a, b in zip(schedule, settle)]),
        "schedule_ms": timing(schedule),
        "settle_ms": timing(settle),
    }


def _step(scheduler: Scheduler, blocks: BlockManager) -> tuple[float, float]:
    """One step with a token for everybody: seconds in schedule() with reserve, and in place() and settle()."""
    start = time.perf_counter()
    chunks = scheduler.schedule()
    middle = time.perf_counter()
    blocks.place()
    blocks.settle()
    end = time.perf_counter()
    for chunk in chunks:
        if chunk.samples:
            chunk.seq.token_ids.append(chunk.stop % 1000)
    return middle - start, end - middle
