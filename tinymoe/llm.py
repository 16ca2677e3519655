"""LLM: load a model, generate, chat, stream. The names are those of vLLM's offline interface."""

import os
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from tqdm import tqdm

from tinymoe.cache.devices import pick_device
from tinymoe.core.config import Dtype, EngineConfig
from tinymoe.core.interrupts import Section
from tinymoe.core.model_config import ConfigError, brief, require
from tinymoe.core.outputs import Delta, RequestOutput
from tinymoe.core.params import SamplingParams
from tinymoe.engine.engine import Engine
from tinymoe.engine.intake import split_prompts
from tinymoe.engine.sampling.recommended import recommended
from tinymoe.model.weights import load_model
from tinymoe.text import Tokenizer
from tinymoe.text.chat import conversations

Prompt = str | dict[str, Any] | list[int]
LoadFormat = Literal["auto", "safetensors", "dummy"]
_OPTIONS = tuple(f.name for f in fields(EngineConfig))
_ZOO = Path(str(files("tinymoe.zoo")))


def bundled_models() -> list[str]:
    """Names of the models that come with the package."""
    return sorted(p.parent.name for p in _ZOO.glob("*/config.json"))


def resolve_model(model: str | Path) -> Path:
    """A bundled model's folder, or a local folder in Hugging Face format. Raises ConfigError; nothing is downloaded."""
    require(
        isinstance(model, (str, Path)) and str(model) != "",
        f"model must be the name of a bundled model ({', '.join(bundled_models())}) or a path, got {brief(model)}",
    )
    if os.path.isdir(model):  # False, where Path.is_dir raises, for a name that no file can have
        return Path(model)
    if str(model) in bundled_models():
        return _ZOO / str(model)
    raise ConfigError(
        f"model {brief(str(model))} is neither a local folder nor a bundled model ({', '.join(bundled_models())}); "
        "nothing is downloaded: give the path of a folder with config.json and safetensors"
    )


class Call:
    """The requests of one call of generate or stream, and their outputs. No request outlives it: `close` aborts what still
    runs, and so does the garbage collector for a call that never came to close it (the engine knows only the box)."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.outbox: deque[RequestOutput] = deque()

    def close(self) -> None:
        self.engine.drop_requests(self.outbox)

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self):
        if hasattr(self, "outbox"):  # a Ctrl-C may come into __init__ too
            self.close()


class Stream(Iterator[Delta]):
    """The deltas of one request, made as they are asked for. `close`, the end of a with block, or dropping the stream
    aborts the request, whether or not it has begun. A Ctrl-C while it waits does not end it: next() goes on."""

    def __init__(self, call: Call):
        self._call = call
        self._deltas: list[Delta] = []
        self._sent: dict[int, tuple[int, int]] = {}  # completion -> characters and ids that are out
        self._ended: set[int] = set()  # completions whose last delta is out
        self._over = False

    def __next__(self) -> Delta:
        while not self._deltas:
            if self._over:
                raise StopIteration
            if not self._call.outbox:
                self._call.engine.step(collect=False)
            with Section():
                if self._call.outbox:
                    self._take(self._call.outbox.popleft())
        delta = self._deltas[0]
        del self._deltas[0]  # not pop(): after a call a Ctrl-C may come, and the delta would be lost
        return delta

    def _take(self, output: RequestOutput) -> None:
        self._over = output.finished
        for c in output.outputs:
            text, tokens = self._sent.get(c.index, (0, 0))
            new = len(c.text) > text or len(c.token_ids) > tokens
            ends = c.finish_reason is not None and c.index not in self._ended
            if new or ends:
                self._deltas.append(Delta(c.index, c.text[text:], c.token_ids[tokens:], c.finish_reason))
            self._sent[c.index] = (len(c.text), len(c.token_ids))
            if c.finish_reason is not None:
                self._ended.add(c.index)

    def close(self) -> None:
        """Abort what still runs; the stream is at its end."""
        self._over = True
        self._deltas = []
        self._call.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LLM:
    """A model with its tokenizer and engine.

    model: name of a bundled model ("quintet-moe") or a local folder in Hugging Face format.
    dtype: "auto" is float32 on a CPU (faster there, and exact token for token) and the checkpoint's own on a GPU.
    device: "auto", "cpu", "cuda", "cuda:1", ...
    skip_tokenizer_init: token ids in, token ids out; no text.
    load_format: "auto" reads safetensors; "dummy" needs only config.json and makes random weights, for measuring speed.
    Everything else is an option of EngineConfig (max_model_len, max_num_seqs, max_num_batched_tokens, block_size, num_blocks
    or kv_cache_bytes, enable_prefix_caching, policy, return_routed_experts, seed,
    speculative_config, ...).

    Raises ConfigError or CheckpointError, naming the option, file or tensor; TypeError for an unknown option.
    """

    def __init__(
        self,
        model: str | Path = "quintet-moe",
        *,
        dtype: Dtype = "auto",
        device: str | torch.device = "auto",
        skip_tokenizer_init: bool = False,
        load_format: LoadFormat = "auto",
        **options: Any,
    ):
        unknown = sorted(options.keys() - set(_OPTIONS))
        if unknown:
            known = "dtype, device, skip_tokenizer_init, load_format, " + ", ".join(_OPTIONS)
            raise TypeError(f"LLM has no option {', '.join(map(brief, unknown))}; known: {known}")
        for name, value, choices in (
            ("dtype", dtype, get_args(Dtype)),
            ("skip_tokenizer_init", skip_tokenizer_init, (True, False)),
            ("load_format", load_format, get_args(LoadFormat)),
        ):
            ok = isinstance(value, (str, bool)) and value in choices
            require(ok, f"{name} must be {' or '.join(map(repr, choices))}, got {brief(value)}")
        config = EngineConfig(**options)
        folder = resolve_model(model)
        self.device = pick_device(device)
        decoder = load_model(folder, dtype, self.device, load_format, widen=True)
        self.model_config = decoder.config
        self._params, eos = recommended(folder, decoder.config.vocab_size)
        self._tokenizer = None if skip_tokenizer_init else Tokenizer(folder)
        if self._tokenizer is not None:
            self._tokenizer.detokenizer()  # refuses a decoder that cannot stream, before any request comes
            if eos is None and self._tokenizer.eos_token_id is not None:
                eos = (self._tokenizer.eos_token_id,)
        draft = None
        if config.speculation is not None and config.speculation.model is not None:
            its_folder = resolve_model(config.speculation.model)
            if self._tokenizer is not None:
                _same_vocabulary(self._tokenizer, folder, its_folder)
            draft = load_model(its_folder, dtype, self.device, load_format, widen=True)
        self.engine = Engine(decoder, config, text=self._tokenizer, eos_token_ids=eos or (), draft=draft)
        self._count = 0

    def get_tokenizer(self) -> Tokenizer:
        """Raises ConfigError if the LLM was made with skip_tokenizer_init."""
        if self._tokenizer is None:
            raise ConfigError("this LLM has no tokenizer: make it without skip_tokenizer_init=True")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with what the model's generation_config.json recommends."""
        return self._params

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams | None] | None = None,
        *,
        use_tqdm: bool = False,
        priority: int | Seq[int] = 0,
    ) -> list[RequestOutput]:
        """Complete one or many prompts, batched; one RequestOutput each, in the order of the prompts.

        prompts: text, token ids (a list or a 1-d array), {"prompt_token_ids": [...]}, or a list of these. sampling_params
        and priority: one for all or one each; None is what the model recommends. Raises RequestError if any prompt is refused; then none is run.
        """
        items = split_prompts(prompts)
        params = self._each_params(sampling_params, len(items))
        priorities = _each(priority, len(items), "priority")
        finals: dict[str, RequestOutput] = {}
        ids = [self._new_id() for _ in items]
        with Call(self.engine) as call:
            for request_id, item, param, prio in zip(ids, items, params, priorities):
                self.engine.add_request(
                    request_id, item, param, priority=prio, outbox=call.outbox, final_only=True
                )
            with tqdm(total=len(items), desc="requests", disable=not use_tqdm) as bar:
                while len(finals) < len(items):
                    self.engine.step(collect=False)
                    while call.outbox:
                        output = call.outbox.popleft()
                        if output.finished:
                            finals[output.request_id] = output
                            bar.update()
        return [finals[i] for i in ids]

    def chat(
        self,
        messages: list[dict[str, str]] | list[list[dict[str, str]]],
        sampling_params: SamplingParams | Seq[SamplingParams | None] | None = None,
        *,
        use_tqdm: bool = False,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answer one or many conversations ([{"role": ..., "content": ...}, ...]) through the chat template."""
        tokenizer = self.get_tokenizer()
        prompts: list[Prompt] = []
        for conversation in conversations(messages):
            text = tokenizer.apply_chat_template(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            # The template has written every special token itself: adding bos again would double it.
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Stream:
        """An iterator over what each step adds. The deltas of an index join to its final text; its last delta has the
        finish_reason. Streams may be interleaved.

        The request is queued at once, and aborted when the stream is closed or dropped before its end.
        """
        call = Call(self.engine)
        (params,) = self._each_params(sampling_params, 1)
        self.engine.add_request(self._new_id(), prompt, params, outbox=call.outbox)
        return Stream(call)

    def get_metrics(self) -> dict[str, Any]:
        """Counters of the engine since it started: steps, tokens, hits, preemptions, pages, expert load, ..."""
        return self.engine.get_metrics()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False (and nothing done) while requests run."""
        return self.engine.reset_prefix_cache()

    def _each_params(self, value: Any, count: int) -> list[Any]:
        given = _each(value, count, "sampling_params")
        return [self._params if one is None else one for one in given]

    def _new_id(self) -> str:
        self._count += 1
        return f"llm-{self._count - 1}"


def _same_vocabulary(tokenizer: Tokenizer, folder: Path, draft: Path) -> None:
    """Raise ConfigError unless a draft's token ids mean what the model's mean."""
    mine, its = (t.backend.get_vocab(with_added_tokens=True) for t in (tokenizer, Tokenizer(draft)))
    differs = sorted(mine.items() ^ its.items(), key=lambda item: item[1])
    if differs:
        number = differs[0][1]
        here, there = ([token for token, i in v.items() if i == number] or ["nothing"] for v in (mine, its))
        raise ConfigError(
            f"speculative_config: the draft {draft.name} has another vocabulary than {folder.name}: token id {number} is "
            f"{brief(there[0])} there and {brief(here[0])} here; take a draft with the model's own tokenizer"
        )


def _each(value: Any, count: int, what: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ConfigError(f"{what} must be one or as many as prompts: {count} prompts, {len(value)} {what}")
    return list(value)
