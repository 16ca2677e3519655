"""Training text as token streams, and the sampler that deals sequences of one domain each.

A corpus folder holds DOMAIN.train.txt.xz and DOMAIN.valid.txt.xz: UTF-8, documents separated by a line
<|endoftext|>. A stream is its documents' tokens, each document after one <|endoftext|>.
"""

import hashlib
import lzma
import multiprocessing
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from tinymoe.train import sums
from tinymoe.train.tokenizer import END_OF_TEXT

SEPARATOR = f"\n{END_OF_TEXT}\n"
SUMS = "sums"
TEXT_DOMAINS = ("english", "german", "python", "verse")
# A safe place to cut: what follows a line end and is no blank is a piece of its own (tokenizer.PATTERN).
_CUT = re.compile(r"\n(?=\S)")


def corpus_file(corpus: Path, domain: str, split: str) -> Path:
    """DOMAIN.SPLIT.txt.xz. Raises FileNotFoundError that names the file."""
    path = corpus / f"{domain}.{split}.txt.xz"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} not found; --corpus must hold {domain}.train.txt.xz and {domain}.valid.txt.xz"
        )
    return path


def read_documents(corpus: Path, domain: str, split: str) -> list[str]:
    """Documents of DOMAIN.SPLIT.txt.xz. Raises FileNotFoundError or ValueError that names the file."""
    path = corpus_file(corpus, domain, split)
    try:
        with lzma.open(path, "rt", encoding="utf-8", newline="") as file:
            return file.read().split(SEPARATOR)
    except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as xz-compressed UTF-8 text ({error})") from error


def cut(document: str, size: int = 500_000) -> list[str]:
    """Cut a document into pieces of about `size` characters that encode to the same tokens as the whole."""
    pieces, start = [], 0
    while len(document) - start > size:
        match = _CUT.search(document, start + size)
        if match is None:
            break
        pieces.append(document[start : match.end()])
        start = match.end()
    return [*pieces, document[start:]]


def _encode_documents(tokenizer_json: str, documents: list[str]) -> bytes:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    end = np.array([tokenizer.token_to_id(END_OF_TEXT)], np.uint16)
    parts = []
    for document in documents:
        parts.append(end)
        for piece in cut(document, 50_000):
            parts.append(np.array(tokenizer.encode(piece, add_special_tokens=False).ids, np.uint16))
    return np.concatenate(parts).tobytes()


def _batches(documents: list[str], size: int = 1_500_000) -> Iterator[list[str]]:
    """Documents in order, in lists of about `size` characters: one list is one process's job."""
    batch, filled = [], 0
    for document in documents:
        batch.append(document)
        filled += len(document)
        if filled >= size:
            yield batch
            batch, filled = [], 0
    if batch:
        yield batch


def encode_corpus(
    tokenizer: Tokenizer,
    corpus: Path,
    split: str,
    domains: Iterable[str],
    workers: int,
    cache: Path | None = None,
) -> dict[str, np.ndarray]:
    """Token stream of every domain, uint16. With `cache`, streams are kept there, keyed by tokenizer and file size."""
    blob, domains = tokenizer.to_str(), list(domains)
    streams: dict[str, np.ndarray] = {}
    kept: dict[str, Path] = {}
    for domain in domains:
        path = corpus / f"{domain}.{split}.txt.xz"
        if cache is not None and path.is_file():
            key = hashlib.sha256(f"{blob}|{path.stat().st_size}".encode()).hexdigest()[:16]
            kept[domain] = cache / f"{domain}.{split}.{key}.npy"
            if kept[domain].is_file():
                streams[domain] = np.load(kept[domain], allow_pickle=False)
    todo = [d for d in domains if d not in streams]
    if not todo:
        return streams
    # fork where there is one: the workers need only numpy and tokenizers, and must not import torch again.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with ExitStack() as stack:
        apply: Callable[..., Iterable] = map
        if workers > 1:
            context = multiprocessing.get_context(method)
            apply = stack.enter_context(ProcessPoolExecutor(workers, mp_context=context)).map
        texts = dict(zip(todo, apply(read_documents, [corpus] * len(todo), todo, [split] * len(todo))))
        jobs = [(domain, batch) for domain, documents in texts.items() for batch in _batches(documents)]
        encoded = apply(_encode_documents, [blob] * len(jobs), [batch for _, batch in jobs])
        done = list(tqdm(encoded, total=len(jobs), desc=f"tokenise {split}", mininterval=2))
    for domain in todo:
        parts = [part for (owner, _), part in zip(jobs, done) if owner == domain]
        streams[domain] = np.frombuffer(b"".join(parts), np.uint16)
        if domain in kept:
            kept[domain].parent.mkdir(parents=True, exist_ok=True)
            np.save(kept[domain], streams[domain], allow_pickle=False)
    return streams


@dataclass
class Corpus:
    """All streams end to end. tokens [n] uint16; spans: domain -> (first, end); openings: where sums may start."""

    tokens: np.ndarray
    spans: dict[str, tuple[int, int]]
    openings: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def build(cls, streams: dict[str, np.ndarray], openings: dict[str, np.ndarray] | None = None) -> "Corpus":
        ends = np.cumsum([len(s) for s in streams.values()]).tolist()
        spans = {d: (end - len(s), end) for (d, s), end in zip(streams.items(), ends)}
        return cls(np.concatenate(list(streams.values())), spans, dict(openings or {}))

    @classmethod
    def read(
        cls,
        tokenizer: Tokenizer,
        corpus: Path,
        domains: Iterable[str],
        *,
        seed: int,
        problems: int,
        workers: int,
        cache: Path | None = None,
    ) -> "Corpus":
        """The training split of `domains`; "sums" is generated, `problems` of them."""
        domains = list(domains)
        streams = encode_corpus(tokenizer, corpus, "train", [d for d in domains if d != SUMS], workers, cache)
        openings = {}
        if SUMS in domains:
            rng = np.random.default_rng((seed, 0xADD))
            streams[SUMS], openings[SUMS] = sums.encode_text(tokenizer, sums.training_text(rng, problems))
        return cls.build({d: streams[d] for d in domains}, openings)

    def extended(self, domain: str, rows_SL: np.ndarray) -> "Corpus":
        """One more domain, of sequences [S, length + 1] that are dealt as they are: one opening each."""
        stream = np.ascontiguousarray(rows_SL, np.uint16).reshape(-1)
        first = len(self.tokens)
        return Corpus(
            np.concatenate((self.tokens, stream)),
            {**self.spans, domain: (first, first + len(stream))},
            {**self.openings, domain: np.arange(0, len(stream), rows_SL.shape[1])},
        )


class Sampler:
    """Deals batches of sequence starts; every sequence lies inside one domain.

    Domains are drawn in proportion to their weights, stratified over the batch. Inside a domain, each epoch visits
    every window once, in an order and at a phase of its own. State: how many sequences each domain has given.
    """

    def __init__(self, corpus: Corpus, weights: dict[str, float], batch: int, length: int, seed: int):
        if set(weights) != set(corpus.spans):
            raise ValueError(f"weights are for {sorted(weights)}, the corpus has {sorted(corpus.spans)}")
        for domain, (first, end) in corpus.spans.items():
            if end - first < length + 1:
                raise ValueError(
                    f"domain {domain} has {end - first} tokens, fewer than one sequence of {length + 1}"
                )
        self.corpus, self.batch, self.length, self.seed = corpus, batch, length, seed
        self.domains = list(corpus.spans)
        shares = np.array([weights[d] for d in self.domains], float)
        self.edges = np.cumsum(shares / shares.sum())
        self.step = 0
        self.taken = dict.fromkeys(self.domains, 0)
        self._orders: dict[str, tuple[int, np.ndarray]] = {}
        self._fixed = {d: self._openings(d) for d in corpus.openings}
        self.windows = {
            d: len(self._fixed[d]) if d in self._fixed else max(1, (end - first - 1) // length - 1)
            for d, (first, end) in corpus.spans.items()
        }

    def _openings(self, domain: str) -> np.ndarray:
        """One window after the other, each moved to the next opening."""
        first, end = self.corpus.spans[domain]
        openings = self.corpus.openings[domain]
        openings = openings[openings + self.length + 1 <= end - first]
        if not len(openings):
            raise ValueError(
                f"domain {domain} has no opening with {self.length + 1} tokens after it; generate more"
            )
        wanted = np.arange(0, openings[-1] + 1, self.length)
        return first + np.unique(openings[np.searchsorted(openings, wanted)])

    def next(self) -> tuple[np.ndarray, np.ndarray]:
        """Starts [B] int64 into corpus.tokens, each with `length` + 1 tokens, and domain indices [B]."""
        rng = np.random.default_rng((self.seed, 0xDEA1, self.step))
        place = (np.arange(self.batch) + rng.random(self.batch)) / self.batch
        domain_B = np.minimum(np.searchsorted(self.edges, place, side="right"), len(self.domains) - 1)
        starts = np.array([self._take(self.domains[i]) for i in domain_B], np.int64)
        self.step += 1
        return starts, domain_B

    def _take(self, domain: str) -> int:
        epoch, position = divmod(self.taken[domain], self.windows[domain])
        self.taken[domain] += 1
        known, order = self._orders.get(domain, (-1, np.empty(0, np.int64)))
        if known != epoch:
            order = self._order(domain, epoch)
            self._orders[domain] = (epoch, order)
        return int(order[position])

    def _order(self, domain: str, epoch: int) -> np.ndarray:
        """Starts of one epoch of one domain, shuffled."""
        rng = np.random.default_rng((self.seed, 0x0EDE, self.domains.index(domain), epoch))
        if domain in self._fixed:
            return rng.permutation(self._fixed[domain])
        first, end = self.corpus.spans[domain]
        count = self.windows[domain]
        phase = rng.integers(0, end - first - count * self.length)
        return first + phase + self.length * rng.permutation(count)

    def epochs(self) -> dict[str, float]:
        """How often each domain's text has been seen."""
        return {
            d: self.taken[d] * self.length / (end - first) for d, (first, end) in self.corpus.spans.items()
        }

    def state(self) -> dict:
        return {"step": self.step, "taken": dict(self.taken)}

    def restore(self, state: dict) -> None:
        self.step, self.taken = state["step"], dict(state["taken"])
