"""The fifth domain: arithmetic, generated. `a+b=c`, `a-b=c` (a >= b) and `a*b=c` (one factor of one digit).

A problem is held out by a hash of (operator, a, b), with a and b sorted where the operator commutes: otherwise 3+4
in training would give 4+3 away. Held-out problems never appear in training text.
"""

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from tinymoe.train.tokenizer import END_OF_TEXT, TURN_END, TURN_START

OPERATORS = "+-*"
OPERATOR_SHARE = (0.4, 0.35, 0.25)
DIGITS_SHARE = (0.15, 0.3, 0.55)  # operands of one, two, three digits
HELD_OUT = 16  # one problem in so many
CHAT_SHARE = 0.125  # of training problems, posed as a turn of chat, so that the chat tokens are trained too


@dataclass(frozen=True)
class Problems:
    """Columns: operator index [n] (into OPERATORS), a [n], b [n], answer [n]; all int64."""

    operator: np.ndarray
    a: np.ndarray
    b: np.ndarray

    def __len__(self) -> int:
        return len(self.a)

    @property
    def answer(self) -> np.ndarray:
        return np.choose(self.operator, (self.a + self.b, self.a - self.b, self.a * self.b))

    @property
    def held_out(self) -> np.ndarray:
        """Boolean [n]. splitmix64 of the canonical problem (Steele et al. 2014)."""
        commutes = self.operator != 1
        low, high = np.minimum(self.a, self.b), np.maximum(self.a, self.b)
        first, second = np.where(commutes, low, self.a), np.where(commutes, high, self.b)
        x = (self.operator * 1_000_000 + first * 1000 + second).astype(np.uint64)
        with np.errstate(over="ignore"):
            x = x + np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = x ^ (x >> np.uint64(31))
        return x % np.uint64(HELD_OUT) == 0

    @property
    def three_digits(self) -> np.ndarray:
        """Boolean [n]: both operands have three digits."""
        return (self.a >= 100) & (self.b >= 100)

    def where(self, mask: np.ndarray) -> "Problems":
        return Problems(self.operator[mask], self.a[mask], self.b[mask])

    def prompts(self) -> list[str]:
        signs = [OPERATORS[i] for i in self.operator.tolist()]
        return [f"{a}{sign}{b}=" for a, sign, b in zip(self.a.tolist(), signs, self.b.tolist())]


def draw(rng: np.random.Generator, count: int) -> Problems:
    """`count` problems of any kind, held out or not."""
    operator = rng.choice(3, count, p=OPERATOR_SHARE)
    low, high = np.array([0, 10, 100]), np.array([10, 100, 1000])

    def operand(digits: np.ndarray) -> np.ndarray:
        return rng.integers(low[digits], high[digits])

    a = operand(rng.choice(3, count, p=DIGITS_SHARE))
    b = operand(rng.choice(3, count, p=DIGITS_SHARE))
    one_digit = rng.integers(0, 10, count)
    swap = rng.random(count) < 0.5
    product = operator == 2
    a, b = np.where(product & swap, one_digit, a), np.where(product & ~swap, one_digit, b)
    minus = operator == 1
    a, b = np.where(minus, np.maximum(a, b), a), np.where(minus, np.minimum(a, b), b)
    return Problems(operator, a, b)


def held_out_problems(count: int, seed: int = 0) -> Problems:
    """`count` distinct held-out problems in the mixture of `draw`."""
    rng = np.random.default_rng((seed, 0x5E1D))
    found: dict[tuple[int, int, int], None] = {}
    while len(found) < count:
        batch = draw(rng, 32 * HELD_OUT + 2 * count)
        batch = batch.where(batch.held_out)
        found.update(dict.fromkeys(zip(batch.operator.tolist(), batch.a.tolist(), batch.b.tolist())))
    columns = np.array(list(found)[:count], dtype=np.int64).T
    return Problems(*columns)


def training_text(rng: np.random.Generator, count: int) -> list[str]:
    """About `count` problems, none held out, in documents of 1 to 16 of one kind: bare lines, or turns of chat."""
    problems = draw(rng, count + count // HELD_OUT + 16)
    problems = problems.where(~problems.held_out)
    questions, answers = problems.prompts(), problems.answer.tolist()
    documents, start = [], 0
    sizes, chats = (
        rng.integers(1, 17, len(problems)).tolist(),
        (rng.random(len(problems)) < CHAT_SHARE).tolist(),
    )
    for size, chat in zip(sizes, chats):
        if start >= len(problems):
            break
        pairs = zip(questions[start : start + size], answers[start : start + size])
        if chat:
            turn = f"{TURN_START}user\n{{}}{TURN_END}\n{TURN_START}assistant\n{{}}{TURN_END}\n"
            documents.append("".join(turn.format(q, a) for q, a in pairs))
        else:
            documents.append("".join(f"{q}{a}\n" for q, a in pairs))
        start += size
    return documents


def encode_text(tokenizer: Tokenizer, documents: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the documents, each after <|endoftext|>: ids [n] uint16 and where the documents' text starts [m] int64.

    Same ids as the tokenizer gives, several times faster: in this text every character is a token, except for the
    special tokens and the names of the roles.
    """
    pieces = {
        "\x00": END_OF_TEXT,
        "\x01": TURN_START,
        "\x02": TURN_END,
        "\x03": "user\n",
        "\x04": "assistant\n",
    }
    text = "\x00" + "\x00".join(documents)
    for mark, piece in pieces.items():
        text = text.replace(piece, mark)
    spelled = [pieces.get(chr(i), chr(i)) for i in range(128)]
    table = [np.array(tokenizer.encode(s, add_special_tokens=False).ids, np.uint16) for s in spelled]
    lengths = np.array([len(ids) for ids in table])
    codes = np.frombuffer(text.encode("ascii"), np.uint8)
    first = np.concatenate(([0], np.cumsum(lengths)))[:-1]
    counts = lengths[codes]
    ends = np.cumsum(counts)
    index = np.arange(ends[-1]) - np.repeat(ends - counts, counts) + np.repeat(first[codes], counts)
    return np.concatenate(table)[index], ends[codes == 0]
