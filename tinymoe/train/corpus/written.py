"""Text that a model writes itself: beginnings from a corpus, which it continues greedily or by drawing.

A draft model has to guess what its target writes, and that is not what people write: a small target, decoding greedily,
soon repeats itself. So its own text belongs into what the draft is distilled on (sequence-level distillation: Kim & Rush
2016, arXiv 1606.07947; for drafts: Zhou et al. 2023, DistillSpec, arXiv 2310.08461).
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from tinymoe.core.model_config import ModelConfig
from tinymoe.model.decoder import Decoder
from tinymoe.train.corpus.streams import Corpus

WRITTEN = "written"
GREEDY_SHARE = 0.6  # of the sequences; the others are drawn at temperature 1
GIVEN, FREE = (8, 65), (48, 193)  # tokens of a beginning and of what follows it, drawn from these ranges
TOGETHER = 8192  # sequences written at once


def beginnings(
    corpus: Corpus, weights: dict[str, float], sequences: int, length: int, end_of_text: int, seed: int
) -> np.ndarray:
    """int64 [S, length]: tokens where text is given, -1 where the model writes. The first of a row is given.

    A row holds several texts. Each begins somewhere in a domain drawn by `weights` (at an opening, where the domain has
    them), and all but the first come after one end_of_text.
    """
    rng = np.random.default_rng((seed, 0xB0B))
    domains = list(weights)
    shares = np.array([weights[d] for d in domains], float)
    rows_SL = np.full((sequences, length), -1, np.int64)
    for row in rows_SL:
        at = 0
        while at < length:
            domain = domains[rng.choice(len(domains), p=shares / shares.sum())]
            first, end = corpus.spans[domain]
            given = min(int(rng.integers(*GIVEN)), end - first)
            start = int(rng.integers(end - first - given + 1))
            if domain in corpus.openings:  # the last that is not behind it
                places = corpus.openings[domain]
                start = int(places[max(0, np.searchsorted(places, start, side="right") - 1)])
            start += first
            text = [*([end_of_text] if at else []), *corpus.tokens[start : start + given].tolist()]
            row[at : at + len(text)] = text[: length - at]
            at += len(text) + int(rng.integers(*FREE))
    return rows_SL


class Cache:
    """Attention over keys and values of `sequences` sequences that grow together, one token each per call."""

    def __init__(self, config: ModelConfig, sequences: int, length: int, like: Tensor):
        shape = (sequences, config.num_key_value_heads, length, config.head_dim)
        self.windows = [layer.sliding_window for layer in config.layers]
        self.keys = [like.new_empty(shape) for _ in self.windows]
        self.values = [like.new_empty(shape) for _ in self.windows]
        self.position = 0

    def __call__(self, layer: int, q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor) -> Tensor:
        t, window = self.position, self.windows[layer]
        keys, values = self.keys[layer], self.values[layer]
        keys[:, :, t], values[:, :, t] = k_TGH, v_TGH
        seen = slice(0 if window is None else max(0, t + 1 - window), t + 1)
        out = F.scaled_dot_product_attention(
            q_TNH[:, :, None],
            keys[:, :, seen],
            values[:, :, seen],
            enable_gqa=q_TNH.shape[1] != k_TGH.shape[1],
        )
        return out[:, :, 0]


@torch.inference_mode()
def write(model: Decoder, rows_SL: Tensor, temperature_S: Tensor, seed: int) -> Tensor:
    """Fill in every -1 of rows int64 [S, L], column after column: at temperature 0 the likeliest token, the lowest id of
    equals; else one drawn. Column 0 must be given. Returns a new tensor."""
    rows_SL = rows_SL.clone()
    S, L = rows_SL.shape
    cache = Cache(model.config, S, L, model.embed.weight)
    generator = torch.Generator(rows_SL.device).manual_seed(seed)
    heat_S1 = temperature_S[:, None]
    for t in range(L - 1):
        cache.position = t
        logits_SV = model(rows_SL[:, t], torch.full_like(rows_SL[:, t], t), cache)
        noise_SV = torch.empty_like(logits_SV).exponential_(generator=generator)
        # -log of an exponential is Gumbel noise; 0 would be infinite, and 0 times that NaN.
        chosen_S = (logits_SV - heat_S1 * noise_SV.clamp_(min=1e-30).log_()).argmax(-1)
        rows_SL[:, t + 1] = torch.where(rows_SL[:, t + 1] < 0, chosen_S, rows_SL[:, t + 1])
    return rows_SL


def written(
    model: Decoder,
    corpus: Corpus,
    weights: dict[str, float],
    *,
    sequences: int,
    length: int,
    end_of_text: int,
    seed: int,
    cache: Path | None = None,
) -> np.ndarray:
    """uint16 [sequences, length] that `model` wrote. With `cache`, kept there by its settings and the model's weights."""
    kept = None
    if cache is not None:
        mark = float(sum(p.detach().double().abs().sum() for p in model.parameters()))
        kept = cache / f"written.{sequences}x{length}.{seed}.{mark:.6e}.npy"
        if kept.is_file():
            return np.load(kept, allow_pickle=False)
    device = model.embed.weight.device
    rows_SL = beginnings(corpus, weights, sequences, length, end_of_text, seed)
    greedy_S = np.random.default_rng((seed, 0x6EED)).random(sequences) < GREEDY_SHARE
    parts = []
    for first in tqdm(range(0, sequences, TOGETHER), desc="write", mininterval=2):
        some = slice(first, first + TOGETHER)
        temperature_S = torch.from_numpy(np.where(greedy_S[some], 0.0, 1.0)).float().to(device)
        done = write(model, torch.from_numpy(rows_SL[some]).to(device), temperature_S, seed + first)
        parts.append(done.cpu().numpy().astype(np.uint16))
    rows_SL = np.concatenate(parts)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.save(kept, rows_SL, allow_pickle=False)
    return rows_SL
