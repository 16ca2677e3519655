"""Small tokenizers, trained on the spot, in the folder layout of real models."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog; it's not what you'd think, is it?",
    "Als Gregor Samsa eines Morgens aus unruhigen Träumen erwachte, fand er sich verwandelt.",
    "def add(a, b):\n    return a + b  # 12 + 30 == 42\n\n",
    "你好，世界。我们今天学习专家混合模型。日本語のテキストもあります。",
    "Привет, мир! Ça va très bien, naïve façade — “quoted”. 👍🏽 👨‍👩‍👧‍👦 🇩🇪 é ﷽ 🤷🏾‍♀️",
]
SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Text that breaks naive streaming: emoji of several code points, ZWJ, flags, CJK, combining marks, spaces.
TRICKY = "  👨‍👩‍👧‍👦 你好é 🇩🇪👍🏽  ﷽\n\n naïve…  x  \u00a0é\u0301 日本語 𝔘𝔫𝔦 �"


def byte_level(vocab_size: int = 420) -> Tokenizer:
    """GPT-2 style: byte-level BPE (Llama 3, Qwen, DeepSeek, OLMo)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    ))  # fmt: skip
    return tokenizer


def byte_fallback(vocab_size: int = 460) -> Tokenizer:
    """Llama 2, Mistral and Mixtral style: "▁" for spaces, <0xNN> for what the vocabulary lacks."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    # Trained within words, as sentencepiece does; in real files the merges alone keep words apart.
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    special = ["<unk>", *SPECIAL, *(f"<0x{b:02X}>" for b in range(256))]
    texts = ["".join(c for c in line if c.isascii()).replace(" ", "▁").replace("\n", "") for line in TEXT]
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    )
    # A trainer can only reserve the bytes as special tokens; in real files they are plain ones.
    body = json.loads(tokenizer.to_str()) | {"pre_tokenizer": None}
    body["added_tokens"] = [t for t in body["added_tokens"] if not t["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(body))


def unigram(vocab_size: int = 160) -> Tokenizer:
    """T5 style: a Unigram model with Metaspace."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(TEXT, trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False,
    ))  # fmt: skip
    return tokenizer


def words() -> Tokenizer:
    """No decoder at all: tokens joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        TEXT, trainers.WordLevelTrainer(special_tokens=["<unk>", *SPECIAL], show_progress=False)
    )
    return tokenizer


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "unigram": unigram, "words": words}


def add_bos(tokenizer: Tokenizer) -> Tokenizer:
    """encode() puts <|bos|> in front, as Llama's post-processor does."""
    bos = ("<|bos|>", tokenizer.token_to_id("<|bos|>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[bos])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, **config) -> Path:
    """A model folder: tokenizer.json and tokenizer_config.json (defaults overridden by config; None leaves one out)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "chat_template": TEMPLATE,
    }
    body = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **config}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({k: v for k, v in body.items() if v is not None})
    )
    return folder
