"""The tokenizer of a model folder: text to token ids and back, chats, and words to ban."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from tinymoe.core.model_config import ConfigError, brief, require
from tinymoe.core.params import SamplingParams
from tinymoe.text.chat import ChatTemplates
from tinymoe.text.detokenize import Decoding, IncrementalDetokenizer
from tinymoe.text.stop import TextState

ADDED_TOKEN_OPTIONS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def _read(path: Path) -> dict:
    """A JSON object from a file, {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    require(isinstance(body, dict), f"{path} must hold a JSON object, got {type(body).__name__}")
    return body


def _content(token: Any) -> str | None:
    """A token in a config is a string or {"content": string, ...}."""
    return token.get("content") if isinstance(token, dict) else token if isinstance(token, str) else None


class Tokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json, tokenizer_config.json, chat template.

    Reads what transformers' fast tokenizer reads and gives the same ids and text (the tests compare), except that
    spaces before punctuation are never "cleaned up": that would change what the model wrote.
    special_tokens: name -> token, such as {"eos_token": "</s>"}. vocab_size counts added tokens too; a model's
    vocabulary may be padded beyond it.
    Raises ConfigError if a file is missing or unreadable.
    """

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        file, config = folder / "tokenizer.json", _read(folder / "tokenizer_config.json")
        require(
            file.is_file(),
            f"{folder} has no tokenizer.json, the only tokenizer format read here: save the tokenizer with transformers' "
            "save_pretrained, or use skip_tokenizer_init=True and give token ids",
        )
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(
                f"{file} is not a tokenizer the tokenizers library can read: {error}"
            ) from error
        self.backend.no_truncation()  # both may be saved in the file, and would cut or fill prompts
        self.backend.no_padding()
        self.backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
        if "added_tokens_decoder" not in config:
            config |= _read(folder / "special_tokens_map.json")
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or {}
        named = {k: v for k, v in config.items() if k.endswith("_token")} | (
            extra if isinstance(extra, dict) else {}
        )
        self.special_tokens = {name: text for name, v in named.items() if (text := _content(v)) is not None}
        self._add_tokens(config.get("added_tokens_decoder") or {}, [] if isinstance(extra, dict) else extra)
        self.vocab_size = self.backend.get_vocab_size(with_added_tokens=True)
        self.chat_templates = ChatTemplates.load(folder, config, self.special_tokens)
        self._decoding = Decoding(self.backend)

    def _add_tokens(self, listed: dict[str, dict], extra: list) -> None:
        """Tokens that only the config knows, or knows otherwise: transformers adds them in this order."""
        known = {repr(token) for token in self.backend.get_added_tokens_decoder().values()}
        for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
            added = tokenizers.AddedToken(
                token["content"], **{k: token[k] for k in ADDED_TOKEN_OPTIONS if k in token}
            )
            if repr(added) not in known:
                self.backend.add_tokens([added])
        known = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        for text in [*self.special_tokens.values(), *map(_content, extra)]:
            if text is not None and text not in known:
                self.backend.add_tokens([tokenizers.AddedToken(text, special=True)])

    def token_id(self, name: str) -> int | None:
        """Id of a named special token such as "eos_token", None if there is none."""
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    @property
    def bos_token_id(self) -> int | None:
        return self.token_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self.token_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self.token_id("pad_token")

    @property
    def all_special_ids(self) -> list[int]:
        """The ids that skip_special_tokens leaves out, sorted."""
        return sorted(self._decoding.special_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises ConfigError for what is not text, or holds half a surrogate pair."""
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise ConfigError(
                f"text to encode must be a string of valid Unicode, got {brief(text)}: decode bytes with errors='replace'"
            ) from error

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def decoded_token(self, token_id: int) -> str:
        """One token as it looks inside a text, leading space included (for logprobs)."""
        return self._decoding.alone(token_id)

    def detokenizer(
        self, *, skip_special_tokens: bool = True, prompt_token_ids: Iterable[int] = ()
    ) -> IncrementalDetokenizer:
        """For one sequence. Raises ConfigError if this tokenizer's decoder cannot work token by token."""
        return IncrementalDetokenizer(
            self._decoding, skip_special_tokens=skip_special_tokens, prompt_token_ids=prompt_token_ids
        )

    def text_state(self, params: SamplingParams, prompt_token_ids: Iterable[int] = ()) -> TextState:
        """The growing text of one sequence, with the stop strings of params."""
        return TextState(self._decoding, params, prompt_token_ids)

    def apply_chat_template(
        self,
        messages: list[dict],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text: see ChatTemplates.render. Use encode_chat for its ids."""
        return self.chat_templates.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            **kwargs,
        )

    def encode_chat(self, messages: list[dict], **kwargs: Any) -> list[int]:
        """Ids of a chat. The template writes its own special tokens: adding the tokenizer's would give two BOS."""
        return self.encode(self.apply_chat_template(messages, **kwargs), add_special_tokens=False)

    def bad_word_ids(self, words: Iterable[str]) -> list[list[int]]:
        """Token sequences to ban, so that no word is written as the tokenizer would write it.

        Each word is taken at the start of a text and after a space. vLLM drops the second where its length differs
        from the first; here it stays unless the first ends it, since it is how the word appears in most texts.
        """
        found: list[list[int]] = []
        for word in words:
            forms = [
                self.encode(text, add_special_tokens=False) for text in (word.lstrip(), f" {word.lstrip()}")
            ]
            require(any(forms), f"bad_words: {brief(word)} has no tokens in this tokenizer")
            for ids in forms:
                if ids and not any(ids[-len(known) :] == known for known in found):
                    found.append(ids)
        return found
