"""How good a model is, for any model given as a function from token ids [S, L] to logits [S, L, V]."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tinymoe.experts.balance import BalanceConfig, BalanceSink
from tinymoe.model.attention import CausalAttend
from tinymoe.model.decoder import Decoder
from tinymoe.train.corpus import SUMS
from tinymoe.train.objective import acceptance
from tinymoe.train.sums import OPERATORS, Problems, held_out_problems
from tinymoe.train.tokenizer import token_lengths

Logits = Callable[[Tensor], Tensor]
WINDOW = 512


def windows(
    stream: np.ndarray, window: int = WINDOW, batch: int = 16, limit: int | None = None
) -> Iterator[Tensor]:
    """Non-overlapping windows of a stream as int64 [S, window + 1]: each predicts its last `window` tokens.

    Every token but the stream's first is predicted exactly once; the last window may be shorter (a batch of its own).
    limit: at most so many whole windows.
    """
    count = (len(stream) - 1) // window
    whole = count if limit is None else min(count, limit)
    tokens = torch.from_numpy(stream.astype(np.int64))
    for first in range(0, whole, batch):
        rows = range(first, min(first + batch, whole))
        yield torch.stack([tokens[i * window : (i + 1) * window + 1] for i in rows])
    if whole == count and count * window < len(stream) - 1:
        yield tokens[count * window :][None]


@torch.inference_mode()
def bits_per_byte(
    logits: Logits,
    stream: np.ndarray,
    lengths: list[int],
    *,
    window: int = WINDOW,
    batch: int = 16,
    limit: int | None = None,
) -> float:
    """Cross-entropy in bits over the bytes of the predicted tokens. `lengths`: bytes of each id (token_lengths)."""
    nats, size = 0.0, 0
    bytes_V = torch.tensor(lengths)
    for tokens in windows(stream, window, batch, limit):
        labels = tokens[:, 1:].reshape(-1)
        out = logits(tokens[:, :-1]).flatten(0, 1).float()
        nats += F.cross_entropy(out, labels.to(out.device), reduction="sum").double().item()
        size += int(bytes_V[labels].sum())
    return nats / math.log(2) / size


@torch.inference_mode()
def acceptance_rate(
    target: Logits,
    draft: Logits,
    stream: np.ndarray,
    *,
    window: int = WINDOW,
    batch: int = 16,
    limit: int | None = None,
) -> float:
    """Mean over the stream's positions of Σ min(p, q) at temperature 1, nothing truncated."""
    total, count = 0.0, 0
    for tokens in windows(stream, window, batch, limit):
        inputs = tokens[:, :-1]
        accepted = acceptance(target(inputs).flatten(0, 1), draft(inputs).flatten(0, 1))
        total += accepted.double().sum().item()
        count += accepted.numel()
    return total / count


@torch.inference_mode()
def agreement_rate(
    target: Logits, draft: Logits, stream: np.ndarray, *, texts: int = 16, given: int = 32, tokens: int = 48
) -> float:
    """Share of the target's own tokens, decoded greedily, that the draft names when it has seen all before them: what greedy
    speculation keeps of its first drafts. `texts` beginnings of `given` tokens, evenly spaced over the stream, are each
    continued for `tokens` tokens."""
    given = min(given, len(stream))
    starts = np.linspace(0, len(stream) - given, texts).astype(int)
    ids = torch.from_numpy(np.stack([stream[s : s + given] for s in starts]).astype(np.int64))
    for _ in range(tokens):
        ids = torch.cat((ids, target(ids)[:, -1:].argmax(-1).to(ids.device)), dim=1)
    named = draft(ids[:, :-1])[:, given - 1 :].argmax(-1).to(ids.device)
    return (named == ids[:, given:]).double().mean().item()


@torch.inference_mode()
def sums_exact(logits: Logits, tokenizer: Tokenizer, problems: Problems, *, batch: int = 256) -> np.ndarray:
    """Boolean [n]: greedy decoding from `a+b=` gives exactly the digits of the answer and a line end."""
    prompts = [tokenizer.encode(p, add_special_tokens=False).ids for p in problems.prompts()]
    wanted = [tokenizer.encode(f"{c}\n", add_special_tokens=False).ids for c in problems.answer.tolist()]
    right = np.zeros(len(prompts), bool)
    shapes = sorted({(len(p), len(w)) for p, w in zip(prompts, wanted)})
    for shape in shapes:
        members = [i for i, pair in enumerate(zip(prompts, wanted)) if (len(pair[0]), len(pair[1])) == shape]
        for first in range(0, len(members), batch):
            rows = members[first : first + batch]
            ids = torch.tensor([prompts[i] for i in rows])
            for _ in range(shape[1]):
                best = logits(ids)[:, -1].argmax(-1).to(ids.device)
                ids = torch.cat((ids, best[:, None]), dim=1)
            answer = torch.tensor([wanted[i] for i in rows])
            right[rows] = (ids[:, shape[0] :] == answer).all(1).numpy()
    return right


def load_report(counts: dict[str, Tensor], weights: dict[str, float]) -> dict:
    """Balance and specialisation from each domain's loads [L, E].

    max_violation: MaxVio per layer over the domains mixed in proportion to `weights` (each domain's loads as shares).
    per_domain: the same for each domain alone. dead: (layer, expert) pairs that no domain visits.
    signature_correlation: Pearson correlation of two domains' shares over all layers and experts, about the uniform.
    """
    shares = {d: c.double() / c.sum(-1, keepdim=True) for d, c in counts.items()}
    total = sum(weights[d] for d in shares)
    mixed = torch.stack([share * (weights[d] / total) for d, share in shares.items()]).sum(0)
    experts = mixed.shape[-1]
    flat = torch.stack([(share - 1 / experts).flatten() for share in shares.values()])
    unit = flat / flat.norm(dim=1, keepdim=True).clamp(min=1e-12)
    correlation = (unit @ unit.T).tolist()
    names = list(shares)
    return {
        "max_violation": [round(v, 4) for v in (mixed.amax(-1) * experts - 1).tolist()],
        "max_violation_equal_weights": [
            round(v, 4) for v in (torch.stack(list(shares.values())).mean(0).amax(-1) * experts - 1).tolist()
        ],
        "per_domain": {
            d: [round(v, 4) for v in (s.amax(-1) * experts - 1).tolist()] for d, s in shares.items()
        },
        "dead": [list(pair) for pair in (sum(counts.values()) == 0).nonzero().tolist()],  # type: ignore[union-attr]
        "signature_correlation": {
            a: {b: round(correlation[i][j], 4) for j, b in enumerate(names)} for i, a in enumerate(names)
        },
    }


def sums_report(logits: Logits, tokenizer: Tokenizer, count: int = 2000) -> dict:
    """Share of exact answers to held-out problems: all, those with two three-digit operands, and by operator."""
    problems = held_out_problems(count)
    right = sums_exact(logits, tokenizer, problems)
    return {
        "problems": count,
        "problems_three_digits": int(problems.three_digits.sum()),
        "exact": float(right.mean()),
        "exact_three_digits": float(right[problems.three_digits].mean()),
        "exact_by_operator": {
            sign: float(right[problems.operator == i].mean()) for i, sign in enumerate(OPERATORS)
        },
    }


def sums_stream(tokenizer: Tokenizer, count: int = 2000) -> np.ndarray:
    """Held-out problems with their answers as one stream, to count loads on."""
    problems = held_out_problems(count)
    lines = "".join(f"{q}{a}\n" for q, a in zip(problems.prompts(), problems.answer.tolist()))
    return np.array(tokenizer.encode(lines, add_special_tokens=False).ids, np.uint16)


def decoder_logits(model: Decoder, device: torch.device) -> Logits:
    """A Decoder as the function that the figures above want."""

    def logits(ids_SL: Tensor) -> Tensor:
        S, L = ids_SL.shape
        positions_T = torch.arange(L, device=device).repeat(S)
        return model(ids_SL.reshape(-1).to(device), positions_T, CausalAttend(S, L)).view(S, L, -1)

    return logits


@torch.inference_mode()
def decoder_loads(model: Decoder, stream: np.ndarray, batch: int, device: torch.device) -> Tensor:
    """How often each expert of each layer is chosen over a stream: [L, E] int64."""
    totals: list[Tensor] = []
    for tokens in windows(stream, batch=batch):
        S, L = tokens.shape[0], tokens.shape[1] - 1
        sink = BalanceSink(BalanceConfig(mode="none"))
        positions_T = torch.arange(L, device=device).repeat(S)
        model(tokens[:, :-1].reshape(-1).to(device), positions_T, CausalAttend(S, L), sink)
        totals.append(torch.stack(sink.counts).cpu())
    return torch.stack(totals).sum(0)


def training_report(
    model: Decoder,
    teacher: Decoder | None,
    tokenizer: Tokenizer,
    valid: dict[str, np.ndarray],
    weights: dict[str, float],
    device: torch.device,
) -> dict:
    """Figures in the training dtype, to steer by. Those on the card come from the saved folder through transformers."""
    batch = 64 if device.type == "cuda" else 8
    logits, lengths = decoder_logits(model, device), token_lengths(tokenizer)
    result: dict = {
        "bits_per_byte": {d: bits_per_byte(logits, s, lengths, batch=batch) for d, s in valid.items()},
        "sums": sums_report(logits, tokenizer),
    }
    if teacher is not None:
        target = decoder_logits(teacher, device)
        result["acceptance"] = {d: acceptance_rate(target, logits, s, batch=batch) for d, s in valid.items()}
    if model.config.is_moe:
        streams = {**valid, SUMS: sums_stream(tokenizer)}
        counts = {d: decoder_loads(model, s, batch, device) for d, s in streams.items()}
        result["load"] = load_report(counts, {d: weights.get(d, 0.1) for d in counts})
    return result
