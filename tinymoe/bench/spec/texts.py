"""Prompts of a domain: beginnings that a model goes on from."""

import json
from pathlib import Path

import numpy as np

from tinymoe.text import Tokenizer
from tinymoe.train.sums import held_out_problems

ROOT = Path(__file__).resolve().parents[3]
SOLVED = 4  # problems with their answers before the one that is asked


def english(requests: int) -> list[str]:
    """Passages of notebook 02, which no model was trained on; after the sixteenth, the same from a later word on."""
    passages = json.loads((ROOT / "notebooks" / "passages.json").read_text(encoding="utf-8"))["passages"]["english"]  # fmt: skip
    texts = []
    for i in range(requests):
        words = passages[i % len(passages)].split(" ")
        skip = 3 * (i // len(passages)) % max(1, len(words) - 8)
        texts.append(" ".join(words[skip:]))
    return texts


def sums(requests: int, seed: int) -> list[str]:
    """A few held-out problems with their answers and one without, as train.sums writes them."""
    problems = held_out_problems(requests * (SOLVED + 1), seed)
    lines = [f"{q}{a}\n" for q, a in zip(problems.prompts(), problems.answer.tolist())]
    asked = np.array(problems.prompts()).reshape(requests, -1)[:, -1].tolist()
    parts = np.array(lines).reshape(requests, -1)[:, :-1].tolist()
    return ["".join(solved) + question for solved, question in zip(parts, asked)]


DOMAINS = ("english", "sums")


def prompts(domain: str, requests: int, seed: int, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids; no two of 64 neighbours are equal."""
    texts = english(requests) if domain == "english" else sums(requests, seed)
    return [tokenizer.encode(text) for text in texts]
