"""Text that a model writes itself: what is given stays, the rest is what the model says, and a draft is trained on it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tinymoe.core.model_config import LayerConfig, ModelConfig, MoEConfig
from tinymoe.model.attention import CausalAttend
from tinymoe.model.decoder import Decoder
from tinymoe.train.corpus import Corpus, Sampler
from tinymoe.train.corpus.written import FREE, GIVEN, WRITTEN, beginnings, write, written

MOE = MoEConfig(num_experts=4, top_k=2, intermediate_size=16)
SHAPE = ModelConfig(
    model_type="qwen3_moe",
    vocab_size=64,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    layers=(LayerConfig(moe=MOE),) * 2,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    qk_norm="head",
)
END = 63


def model(**changes):
    return Decoder(replace(SHAPE, **changes)).init_weights(std=0.3, seed=1)


def corpus():
    """Even numbers in one domain; odd ones in the other, in runs of 7 that each begin with 1."""
    n = np.arange(5000)
    streams = {"english": 2 * (n % 30), "sums": 2 * (n % 7) + 1}
    return Corpus.build(
        {name: s.astype(np.uint16) for name, s in streams.items()}, {"sums": np.arange(0, 5000, 7)}
    )


def rows(sequences=12, length=150):
    return torch.from_numpy(
        beginnings(corpus(), {"english": 0.5, "sums": 0.5}, sequences, length, END, seed=3)
    )


@torch.no_grad()
def logits(it, ids_SL):
    """By whole sequences, without a cache."""
    S, L = ids_SL.shape
    positions_T = torch.arange(L).repeat(S)
    return it(ids_SL.reshape(-1), positions_T, CausalAttend(S, L, it.config)).view(S, L, -1)


@pytest.mark.parametrize("window", [None, 5])
def test_greedy_text_is_what_the_model_says_next(window):
    it = model(layers=(LayerConfig(moe=MOE), LayerConfig(moe=MOE, sliding_window=window)))
    given_SL = rows()
    done_SL = write(it, given_SL, torch.zeros(len(given_SL)), seed=0)
    free = given_SL < 0
    assert torch.equal(done_SL[~free], given_SL[~free])
    assert free.float().mean() > 0.3
    said_SL = logits(it, done_SL)[:, :-1].argmax(-1)
    assert torch.equal(done_SL[:, 1:][free[:, 1:]], said_SL[free[:, 1:]])


def test_drawn_text_has_the_models_distribution():
    it, S = model(), 20_000
    given_SL = torch.tensor([[4, 9, -1, 7]]).repeat(S, 1)
    done_SL = write(it, given_SL, torch.ones(S), seed=0)
    assert torch.equal(done_SL[:, [0, 1, 3]], given_SL[:, [0, 1, 3]])
    share_V = torch.bincount(done_SL[:, 2], minlength=64) / S
    wanted_V = logits(it, given_SL[:1].clamp(min=0))[0, 1].softmax(-1)
    assert (share_V - wanted_V).abs().max() < 5 * (0.25 / S) ** 0.5
    assert torch.equal(write(it, given_SL[:50], torch.ones(50), seed=7), write(it, given_SL[:50], torch.ones(50), seed=7))  # fmt: skip
    assert not torch.equal(done_SL[:50], write(it, given_SL[:50], torch.ones(50), seed=7))


def test_beginnings_come_from_the_domains_by_weight():
    given_SL = beginnings(corpus(), {"english": 0.75, "sums": 0.25}, 400, 600, END, seed=3)
    assert (given_SL[:, 0] >= 0).all()
    texts = []
    for row in given_SL:
        edges = np.flatnonzero(np.diff(np.r_[False, row >= 0, False].astype(int))).reshape(-1, 2)
        assert all(FREE[0] <= b - a < FREE[1] for a, b in zip(edges[:-1, 1], edges[1:, 0]))
        texts += [(first, row[first:last]) for first, last in edges]
    assert all(text[0] == END for first, text in texts if first)
    texts = [text[1:] if first else text for first, text in texts]
    whole = [len(text) for text in texts if len(text) >= GIVEN[0]]
    assert max(whole) < GIVEN[1]
    assert len(whole) > 0.98 * len(texts)  # the last of a row may be cut
    sums = [text for text in texts if len(text) and text[0] % 2]
    assert len(sums) / len(texts) == pytest.approx(0.25, abs=0.04)
    assert all(text[0] == 1 for text in sums)
    for text in texts:
        step = np.diff(text)
        assert set(step.tolist()) <= ({2, -12} if len(text) and text[0] % 2 else {2, -58})


def test_what_was_written_is_kept_and_dealt_row_by_row(tmp_path):
    it, weights = model(), {"english": 0.5, "sums": 0.5}
    options = {"sequences": 9, "length": 17, "end_of_text": END, "seed": 5, "cache": tmp_path}
    first = written(it, corpus(), weights, **options)
    assert (first.shape, first.dtype) == ((9, 17), np.uint16)
    (path,) = tmp_path.glob("written.*.npy")
    np.save(path, first[::-1])  # what is there is taken
    assert np.array_equal(written(it, corpus(), weights, **options), first[::-1])
    other = Decoder(SHAPE).init_weights(std=0.3, seed=2)
    assert not np.array_equal(written(other, corpus(), weights, **options), first[::-1])
    whole = corpus().extended(WRITTEN, first)
    sampler = Sampler(whole, {"english": 0.25, "sums": 0.25, WRITTEN: 0.5}, 4, 16, 0)
    dealt = [
        tuple(whole.tokens[s : s + 17].tolist())
        for _ in range(10)
        for s, d in zip(*sampler.next())
        if sampler.domains[d] == WRITTEN
    ]
    assert set(dealt) == set(map(tuple, first.tolist()))
    assert np.array_equal(whole.tokens[: len(corpus().tokens)], corpus().tokens)
