"""The arithmetic domain: right answers, held-out problems stay out, fast encoding equals the tokenizer's."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import tinymoe.zoo
from tinymoe.train import evaluate, sums
from tinymoe.train.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(Path(tinymoe.zoo.__file__).parent / "quintet-moe")
LINE = re.compile(r"(\d+)([-+*])(\d+)=(?:<\|im_end\|>\n<\|im_start\|>assistant\n)?(\d+)")
MEANING = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


@pytest.fixture(scope="module")
def documents():
    return sums.training_text(np.random.default_rng(3), 20_000)


def problems_in(documents):
    return [(int(a), sign, int(b), int(c)) for d in documents for a, sign, b, c in LINE.findall(d)]


def test_answers_are_right(documents):
    found = problems_in(documents)
    assert len(found) > 15_000
    assert all(MEANING[sign](a, b) == c and c >= 0 for a, sign, b, c in found)
    assert {sign for _, sign, _, _ in found} == set("+-*")
    assert all(min(a, b) < 10 for a, sign, b, _ in found if sign == "*")


def test_held_out_problems_never_appear_in_training(documents):
    # Neither as they are nor, where the operator commutes, with operands exchanged.
    held = sums.held_out_problems(3000)
    keys = {
        (a, sums.OPERATORS[o], b) for o, a, b in zip(held.operator.tolist(), held.a.tolist(), held.b.tolist())
    }
    keys |= {(b, sign, a) for a, sign, b in keys if sign != "-"}
    assert not keys & {(a, sign, b) for a, sign, b, _ in problems_in(documents)}


def test_held_out_share_and_symmetry():
    drawn = sums.draw(np.random.default_rng(0), 50_000)
    assert drawn.held_out.mean() == pytest.approx(1 / sums.HELD_OUT, abs=0.01)
    mirrored = sums.Problems(drawn.operator, drawn.b, drawn.a)
    commutes = drawn.operator != 1
    assert (drawn.held_out == mirrored.held_out)[commutes].all()


def test_held_out_problems_are_distinct_and_reproducible():
    one, two = sums.held_out_problems(500), sums.held_out_problems(500)
    assert np.array_equal(one.a, two.a)
    assert len({*zip(one.operator.tolist(), one.a.tolist(), one.b.tolist())}) == 500
    assert one.held_out.all()
    assert 50 < one.three_digits.sum() < 450


def test_fast_encoding_is_the_tokenizers(documents):
    ids, opens = sums.encode_text(TOKENIZER, documents[:300])
    text = "".join("<|endoftext|>" + d for d in documents[:300])
    assert ids.tolist() == TOKENIZER.encode(text).ids
    assert len(opens) == 300
    end = TOKENIZER.token_to_id("<|endoftext|>")
    assert all(ids[o - 1] == end for o in opens)


def test_exact_match_counts_only_whole_answers():
    problems = sums.held_out_problems(60)
    answers = dict(zip(problems.prompts(), problems.answer.tolist()))

    def oracle(wrong):
        def logits(ids):
            out = torch.zeros(*ids.shape, TOKENIZER.get_vocab_size())
            for row, tokens in enumerate(ids.tolist()):
                prompt, said = TOKENIZER.decode(tokens).split("=")
                answer = f"{answers[prompt + '='] + (prompt + '=' in wrong)}\n"
                out[row, -1, TOKENIZER.encode(answer).ids[len(said)]] = 1
            return out

        return logits

    wrong = set(problems.prompts()[::3])
    right = evaluate.sums_exact(oracle(wrong), TOKENIZER, problems, batch=7)
    assert right.tolist() == [p not in wrong for p in problems.prompts()]
