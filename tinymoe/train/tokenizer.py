"""The bundled models' tokenizer: byte-level BPE that splits digits, with a minimal chat template.

Bytes are the base alphabet (Radford et al. 2019), so every text has an encoding and nothing is ever unknown. Each
digit is a token of its own, which makes numbers readable to a small model. Merges never cross the pieces of PATTERN.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

# A word with at most one leading character, one digit, punctuation, line ends with the indentation after them, blanks.
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+(?:[ \t]+(?=[ \t]))?|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """Learn a byte-level BPE of `vocab_size` tokens; the special tokens are the first ids."""
    if vocab_size < 256 + len(SPECIAL_TOKENS):
        raise ValueError(
            f"vocab_size must be at least {256 + len(SPECIAL_TOKENS)} (bytes and specials), got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def sample_texts(streams: dict[str, list[str]], budget: dict[str, int], piece: int = 20_000) -> Iterator[str]:
    """Evenly spaced pieces of each domain's documents, about budget[domain] characters of each."""
    for domain, documents in streams.items():
        share = min(1.0, budget[domain] / max(1, sum(map(len, documents))))
        taken = seen = 0
        for document in documents:
            for start in range(0, len(document), piece):
                text = document[start : start + piece]
                seen += len(text)
                if taken < share * seen:
                    taken += len(text)
                    yield text


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, as transformers and vLLM read them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Raises FileNotFoundError that says how to make one."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"no tokenizer.json in {folder}; make one with `tinymoe train --model tokenizer`"
        )
    return Tokenizer.from_file(str(path))


def token_lengths(tokenizer: Tokenizer) -> list[int]:
    """UTF-8 bytes that each id stands for; 0 for special tokens. Sums to the bytes of the encoded text."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    lengths = [0] * tokenizer.get_vocab_size()
    for token, index in vocab.items():
        lengths[index] = (
            0 if token in SPECIAL_TOKENS else len(token)
        )  # one character of the alphabet is one byte
    return lengths
