"""Token streams and the sampler: cutting changes nothing, sequences keep to one domain, epochs cover, seeds repeat."""

import itertools
import lzma

import numpy as np
import pytest

from tinymoe.train.corpus import Corpus, Sampler, cut, encode_corpus, read_documents
from tinymoe.train.tokenizer import (
    END_OF_TEXT,
    PATTERN,
    load_tokenizer,
    save_tokenizer,
    token_lengths,
    train_tokenizer,
)

TEXT = "Ein Satz, and 1984 words.\n\n    if x == 42:\n        return 'äöü😀'\n" * 40


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT], 300)


@pytest.fixture
def folder(tmp_path):
    for domain, documents in {"english": [TEXT, TEXT[:500] + "\n", "short"], "verse": [TEXT * 3]}.items():
        for split in ("train", "valid"):
            with lzma.open(tmp_path / f"{domain}.{split}.txt.xz", "wt", encoding="utf-8", newline="") as file:
                file.write(f"\n{END_OF_TEXT}\n".join(documents))
    return tmp_path


def test_tokenizer_round_trip_and_digits(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path, 64)
    again = load_tokenizer(tmp_path)
    for text in (TEXT, "日本語 \t\r\n x\x00", "", "  1234,5"):
        ids = again.encode(text).ids
        assert again.decode(ids) == text
        assert sum(token_lengths(again)[i] for i in ids) == len(text.encode())
    assert again.encode("a1234b").tokens == ["a", "1", "2", "3", "4", "b"]
    assert again.encode(END_OF_TEXT).ids == [0]
    assert "\\p{N}" in PATTERN


def test_tokenizer_needs_room_for_bytes():
    with pytest.raises(ValueError, match="vocab_size must be at least 259"):
        train_tokenizer([TEXT], 200)


def test_missing_file_and_missing_tokenizer_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"german\.train\.txt\.xz not found; --corpus must hold"):
        read_documents(tmp_path, "german", "train")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json in .* make one with"):
        load_tokenizer(tmp_path)


def test_cut_pieces_encode_to_the_same_tokens(tokenizer):
    pieces = cut(TEXT, 100)
    assert len(pieces) > 5
    assert "".join(pieces) == TEXT
    assert [i for p in pieces for i in tokenizer.encode(p).ids] == tokenizer.encode(TEXT).ids


@pytest.mark.parametrize("workers", [1, 2])
def test_streams_are_the_documents_each_after_a_mark(tokenizer, folder, workers):
    streams = encode_corpus(tokenizer, folder, "train", ["english", "verse"], workers, folder / "cache")
    documents = read_documents(folder, "english", "train")
    assert len(documents) == 3
    want = [i for d in documents for i in tokenizer.encode(END_OF_TEXT + d).ids]
    assert streams["english"].tolist() == want
    kept = encode_corpus(tokenizer, folder, "train", ["verse", "english"], workers, folder / "cache")
    assert kept["english"].tolist() == want
    assert len(list((folder / "cache").iterdir())) == 2


def numbered(**sizes):
    """Streams in which each token tells its domain."""
    streams = {d: np.full(n, i, np.uint16) for i, (d, n) in enumerate(sizes.items())}
    return Corpus.build(streams)


def test_sequences_are_of_one_domain_and_drawn_by_weight():
    corpus = numbered(english=1000, verse=300, sums=500)
    sampler = Sampler(corpus, {"english": 0.5, "verse": 0.1, "sums": 0.4}, batch=10, length=16, seed=1)
    taken = np.zeros(3, int)
    for _ in range(100):
        starts, domains = sampler.next()
        for start, domain in zip(starts, domains):
            assert set(corpus.tokens[start : start + 17].tolist()) == {domain}
            taken[domain] += 1
    assert np.abs(taken - [500, 100, 400]).max() <= 12
    assert sampler.taken == dict(zip(corpus.spans, taken.tolist()))


def test_an_epoch_visits_every_window_once():
    corpus = numbered(english=500)
    sampler = Sampler(corpus, {"english": 1.0}, batch=1, length=16, seed=0)
    count = sampler.windows["english"]
    first = sorted(int(sampler.next()[0][0]) for _ in range(count))
    assert [b - a for a, b in itertools.pairwise(first)] == [16] * (count - 1)
    second = sorted(int(sampler.next()[0][0]) for _ in range(count))
    assert [b - a for a, b in itertools.pairwise(second)] == [16] * (count - 1)
    assert second[-1] + 17 <= 500


def test_openings_are_where_sequences_start():
    tokens = np.zeros(400, np.uint16)
    openings = np.arange(3, 400, 7)
    corpus = Corpus.build({"sums": tokens}, {"sums": openings})
    sampler = Sampler(corpus, {"sums": 1.0}, batch=4, length=16, seed=0)
    for _ in range(30):
        starts, _ = sampler.next()
        assert np.isin(starts, openings).all()
        assert (starts + 17 <= 400).all()


def test_same_seed_same_batches_and_resume():
    corpus = numbered(english=1000, verse=300)
    weights = {"english": 0.7, "verse": 0.3}
    one, two, other = (Sampler(corpus, weights, 8, 16, seed) for seed in (5, 5, 6))
    batches = [one.next()[0].tolist() for _ in range(30)]
    assert [two.next()[0].tolist() for _ in range(11)] == batches[:11]
    resumed = Sampler(corpus, weights, 8, 16, 5)
    resumed.restore(two.state())
    assert [resumed.next()[0].tolist() for _ in range(19)] == batches[11:]
    assert [other.next()[0].tolist() for _ in range(30)] != batches


def test_sampler_errors():
    with pytest.raises(ValueError, match="weights are for"):
        Sampler(numbered(english=100), {"german": 1.0}, 1, 16, 0)
    with pytest.raises(ValueError, match="domain english has 10 tokens, fewer than one sequence of 17"):
        Sampler(numbered(english=10), {"english": 1.0}, 1, 16, 0)
