"""`tinymoe demo`: seven prompts, one engine. Streams the answers, draws expert load and page table, ends with one JSON line."""

import argparse
import json
import time

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tinymoe.commands.options import add_model_arguments, make_llm
from tinymoe.core.outputs import RequestOutput
from tinymoe.core.params import SamplingParams
from tinymoe.core.trace import Recording
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
    "shared A": SHARED + "he heard a knock at the door",
    "shared B": SHARED + "the lamp went out",
}
SHADES = " ·░▒▓█"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--max-tokens", type=int, default=48, help="tokens to generate for each prompt")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise")


def run(arguments: argparse.Namespace) -> int:
    console = Console(highlight=False)
    llm = make_llm(arguments, return_routed_experts=True)
    config = llm.model_config
    console.print(
        f"[bold]{arguments.model}[/]: {config.num_parameters() / 1e6:.1f} M parameters, "
        f"{config.num_parameters(active=True) / 1e6:.1f} M active per token, on {llm.device}"
    )
    params = SamplingParams(
        temperature=0.7, top_p=0.95, max_tokens=arguments.max_tokens, seed=arguments.seed, ignore_eos=True
    )
    finals, pages, seconds = serve(llm, params, console)
    console.print(draw_pages(pages, llm))
    if config.is_moe:
        console.print(draw_load(finals, config.max_experts))
    print(json.dumps(summary(llm, finals, seconds)))
    return 0


def serve(
    llm: LLM, params: SamplingParams, console: Console
) -> tuple[dict[str, RequestOutput], Recording, float]:
    """Run all prompts in one engine; returns the finished requests, the page events, and the seconds it took."""
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


def draw_load(outputs: dict[str, RequestOutput], num_experts: int) -> Table:
    """Share of each domain's tokens that each expert got, in the layer where the domains differ most."""
    shares = {}
    for name, output in outputs.items():
        experts = output.outputs[0].routed_experts
        counts = np.stack(
            [np.bincount(layer[layer >= 0], minlength=num_experts) for layer in experts.swapaxes(0, 1)]
        )
        shares[name] = counts / counts.sum(1, keepdims=True).clip(min=1)
    stacked = np.stack(list(shares.values()))
    layer = int(stacked.std(0).sum(1).argmax())
    table = Table(title=f"Who gets the work: layer {layer}, share of each prompt's visits (darker: more)")
    table.add_column("prompt", style="bold")
    for expert in range(num_experts):
        table.add_column(f"{expert}", justify="center")
    table.add_column("max/mean")
    for name, share in shares.items():
        row = share[layer]
        cells = [
            SHADES[min(len(SHADES) - 1, int(np.ceil(x * num_experts / 4 * (len(SHADES) - 1))))] * 2
            for x in row
        ]
        table.add_row(name, *cells, f"{row.max() * num_experts:.1f}")
    return table


def draw_pages(events: Recording, llm: LLM) -> Table:
    """Block tables at the step with the most pages in use, rebuilt from the trace. Shared pages carry a star."""
    tables, best, owners = {}, {}, {}
    names = {}
    for event in events:
        if event.kind == "admit":
            names[event.seq] = list(PROMPTS)[event.request]
        if event.kind in ("alloc", "share"):
            tables.setdefault(event.seq, []).append(event.block)
        elif event.kind == "cow":
            tables[event.seq][event.index] = event.new
        elif event.kind in ("finish", "preempt"):
            tables.pop(event.seq, None)
        if sum(map(len, tables.values())) > sum(map(len, best.values())):
            best = {seq: list(blocks) for seq, blocks in tables.items()}
    for blocks in best.values():
        for block in blocks:
            owners[block] = owners.get(block, 0) + 1
    size, total = llm.engine.config.block_size, llm.engine.blocks.pool.num_blocks
    used = len(owners)
    table = Table(title=f"Page table at its fullest: {used} of {total} pages of {size} tokens, * = shared")
    table.add_column("prompt", style="bold")
    table.add_column("pages")
    for seq, blocks in best.items():
        table.add_row(names[seq], " ".join(f"{b}*" if owners[b] > 1 else str(b) for b in blocks))
    return table


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
    }
