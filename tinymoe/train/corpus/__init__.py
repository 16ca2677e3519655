"""What is trained on: text as token streams, dealt in sequences, and text that a model writes itself (`written`)."""

from tinymoe.train.corpus.streams import (
    SUMS,
    TEXT_DOMAINS,
    Corpus,
    Sampler,
    corpus_file,
    cut,
    encode_corpus,
    read_documents,
)

__all__ = [
    "SUMS",
    "TEXT_DOMAINS",
    "Corpus",
    "Sampler",
    "corpus_file",
    "cut",
    "encode_corpus",
    "read_documents",
]
