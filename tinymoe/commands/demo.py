"""`tinymoe demo`: seven prompts, one engine. Streams the answers, draws expert load and page table, says what speculation
saved, ends with one JSON line."""

import argparse
import json
import time

import numpy as np
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tinymoe.commands.options import add_engine_arguments, add_model_arguments, make_llm
from tinymoe.core.config import SpeculativeConfig
from tinymoe.core.metrics import EngineMetrics
from tinymoe.core.model_config import require
from tinymoe.core.outputs import RequestOutput
from tinymoe.core.params import SamplingParams
from tinymoe.core.trace import Recording
from tinymoe.lab import terminal
from tinymoe.lab.frames import load, pages
from tinymoe.lab.frames.view import count, letters
from tinymoe.llm import LLM

SHARED = (
    "The old lighthouse stood at the end of the long grey pier, and nobody in the village could remember a time when its "
    "lamp had not been lit. Every evening, as the sun went down behind the hills, the keeper climbed the narrow stairs, "
    "trimmed the wick, and looked out over the dark water. On the night of the great storm, "
)
PROMPTS = {
    "english": "It was a cold morning in November when the old gentleman came down to breakfast and said to his daughter: ",
    "german": "Es war einmal ein alter Mann, der lebte mit seiner Tochter in einem kleinen Hause am Rande des Waldes. ",
    "python": 'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self):\n        self.items = []\n\n    def push(self, ',
    "verse": "KING RICHARD:\nWhat news, my lord? Why dost thou look so pale?\n\nDUKE:\n",
    "sums": "12+35=47\n61-18=43\n7*8=56\n23+49=",
    "pair A": SHARED + "he heard a knock at the door",
    "pair B": SHARED + "the lamp went out",
}
# Looking up costs next to nothing, keeps the sampled tokens of plain decoding, and stops where the clock says so. With seven
# requests on a CPU a draft model saves steps, but no time.
SPECULATION = {"method": "ngram", "num_speculative_tokens": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_engine_arguments(parser)
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens to generate for each prompt")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise")
    parser.add_argument(
        "--no-speculation",
        action="store_true",
        help=f"one token a step; without this and --speculative-config: {json.dumps(SPECULATION)}",
    )


def run(arguments: argparse.Namespace) -> int:
    console = Console(highlight=False)
    if arguments.num_blocks is None and arguments.kv_cache_bytes is None:
        arguments.num_blocks = 128  # small enough to draw
    asked = arguments.speculative_config
    require(
        asked is None or not arguments.no_speculation,
        "--no-speculation and --speculative-config contradict each other: give one of them",
    )
    if asked is None and not arguments.no_speculation:
        arguments.speculative_config = SPECULATION
    llm = make_llm(arguments)
    config = llm.model_config
    console.print(
        f"[bold]{arguments.model}[/]: {config.num_parameters() / 1e6:.1f} M parameters, "
        f"{config.num_parameters(active=True) / 1e6:.1f} M active per token, on {llm.device}"
    )
    params = SamplingParams(
        temperature=0.7, top_p=0.95, max_tokens=arguments.max_tokens, seed=arguments.seed, ignore_eos=True
    )
    finals, events, seconds = serve(llm, params, console)
    console.print(draw_pages(events, llm))
    if config.is_moe:
        console.print(draw_load(events))
    if options := llm.engine.config.speculation:
        console.print(speculation(options, llm.engine.metrics), markup=False)
    print(json.dumps(summary(llm, finals, seconds)))
    return 0


def serve(
    llm: LLM, params: SamplingParams, console: Console
) -> tuple[dict[str, RequestOutput], Recording, float]:
    """Run all prompts in one engine; returns the finished requests, what happened, and the seconds it took (with the
    recording on, which costs some speed)."""
    engine, seen = llm.engine, {}
    with engine.trace.record() as events, Live(console=console, refresh_per_second=8, transient=True) as live:
        start = time.perf_counter()
        for name, prompt in PROMPTS.items():
            engine.add_request(name, prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                seen[output.request_id] = output
            if console.is_terminal:
                live.update(draw_answers(seen))
        seconds = time.perf_counter() - start
    console.print(draw_answers(seen))
    return seen, events, seconds


def draw_answers(outputs: dict[str, RequestOutput]) -> Table:
    """Each prompt's end, and what the model made of it."""
    table = Table(show_header=False, show_lines=True, expand=True)
    table.add_column(width=9, style="bold")
    table.add_column(ratio=1)
    for name in PROMPTS:
        if name in outputs:
            prompt, answer = PROMPTS[name], outputs[name].outputs[0].text
            tail = prompt if len(prompt) <= 60 else "…" + prompt[-59:]
            table.add_row(name, Text.assemble((tail, "dim"), (answer, "default")))
    return table


def draw_load(events: Recording) -> RenderableType:
    """Who gets the work: tokens per expert and prompt, in the layer where the prompts differ most."""
    groups = {e.seq: list(PROMPTS)[e.request] for e in events.of("arrive")}
    layers = sorted({e.layer for e in events.of("route")})
    frames = {layer: load.by_group(events, groups, layer) for layer in layers}

    def spread(layer: int) -> float:
        return float(np.asarray(load.percent_of_mean(frames[layer])).std(0).sum())

    layer = max(layers, key=spread)
    title = f"Who gets the work: layer {layer}, percent of the mean, per prompt"
    return terminal.expert_load(frames[layer], title)


def draw_pages(events: Recording, llm: LLM) -> RenderableType:
    """The page table just before the first request ends, when all seven hold pages."""
    end = events.of("finish")[0]
    last_step = max(e.index for e in events.of("step") if e.index < end.index)
    pool, size = llm.engine.blocks.pool, llm.engine.config.block_size
    frame = pages.frame(events, last_step, num_blocks=min(pool.num_blocks, 128), block_size=size)
    moment = (
        f"Taken in step {frame['step']}, just before the first request ({list(PROMPTS)[end.request]}) ends"
    )
    names = ", ".join(f"{letters(e.seq)} {list(PROMPTS)[e.request]}" for e in events.of("arrive"))
    return terminal.page_table(frame, f"{moment}: {names}. {pages.caption(frame)}")


def speculation(options: SpeculativeConfig, m: EngineMetrics) -> str:
    """What guessing ahead came to, in two sentences. An accepted draft is a token that needed no pass of its own."""
    known = {"ngram": "by looking up", "self": "by the model with fewer experts"}
    said = f"Speculation {known.get(options.method, f'by {options.model}')}, at most {count(options.num_speculative_tokens, 'token')} ahead: "
    if not m.draft_tokens:
        return said + "nothing was drafted."
    said += f"{m.draft_tokens} drafted, {m.accepted_tokens} accepted, in {m.verify_steps} of {count(m.steps, 'step')}"
    said += ", as many as seemed to pay. " if options.adaptive else ". "
    saved = f"{m.accepted_tokens} pass{'es' * (m.accepted_tokens != 1)}"
    coupled = options.method == "ngram" or options.acceptance == "coupled"
    same = "are those" if coupled else "are distributed as those"
    return (
        f"{said}{count(m.verifications, 'verification')} made {count(m.verified_tokens, 'token')}, which saved {saved} of one "
        f"sequence through the model; the texts {same} of --no-speculation."
    )


def summary(llm: LLM, outputs: dict[str, RequestOutput], seconds: float) -> dict[str, object]:
    """The last line of the demo. Later versions only add keys."""
    metrics, spread = llm.engine.metrics, llm.engine.routes.max_over_mean()
    return {
        "requests": len(outputs),
        "output_tokens": metrics.generation_tokens,
        "tokens_per_s": round(metrics.generation_tokens / seconds, 1),
        "prefix_hit_tokens": metrics.prefix_hit_tokens,
        "expert_max_over_mean": round(float(spread.mean()), 3) if len(spread) else None,
        "device": str(llm.device),
        "draft_tokens": metrics.draft_tokens,
        "accepted_tokens": metrics.accepted_tokens,
        "verify_steps": metrics.verify_steps,
        "steps": metrics.steps,
    }
