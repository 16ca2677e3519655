"""LLM: load a model, generate, chat, stream. The names are those of vLLM's offline interface."""

import json
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from tinymoe.core.config import Dtype, EngineConfig
from tinymoe.core.interrupts import Section
from tinymoe.core.model_config import ConfigError
from tinymoe.core.outputs import Delta, RequestOutput
from tinymoe.core.params import SamplingParams
from tinymoe.engine.engine import Engine
from tinymoe.model.weights import load_model
from tinymoe.text import Tokenizer

Prompt = str | dict[str, Any] | list[int]
_OPTIONS = tuple(f.name for f in fields(EngineConfig))
_ZOO = Path(str(files("tinymoe.zoo")))


def bundled_models() -> list[str]:
    """Names of the models that come with the package."""
    return sorted(p.parent.name for p in _ZOO.glob("*/config.json"))


def resolve_model(model: str | Path) -> Path:
    """A bundled model's folder, or a local folder in Hugging Face format. Raises ConfigError; nothing is downloaded."""
    if Path(model).is_dir():
        return Path(model)
    if str(model) in bundled_models():
        return _ZOO / str(model)
    raise ConfigError(
        f"model {str(model)!r} is neither a local folder nor a bundled model ({', '.join(bundled_models())}); "
        "nothing is downloaded: give the path of a folder with config.json and safetensors"
    )


def pick_device(device: str | torch.device) -> torch.device:
    """ "auto": the GPU if there is one. Raises ConfigError for a device that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is not known: use 'auto', 'cpu' or 'cuda'") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no GPU: use device='cpu' or 'auto'")
    return found


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
    Everything else is an option of EngineConfig (max_model_len, max_num_seqs, max_num_batched_tokens, block_size, num_blocks
    or kv_cache_bytes, enable_prefix_caching, policy, return_routed_experts, seed, ...).

    Raises ConfigError or CheckpointError, naming the option, file or tensor; TypeError for an unknown option.
    """

    def __init__(
        self,
        model: str | Path = "quintet-moe",
        *,
        dtype: Dtype = "auto",
        device: str | torch.device = "auto",
        skip_tokenizer_init: bool = False,
        **options: Any,
    ):
        unknown = sorted(options.keys() - set(_OPTIONS))
        if unknown:
            known = "dtype, device, skip_tokenizer_init, " + ", ".join(_OPTIONS)
            raise TypeError(f"LLM has no option {', '.join(map(repr, unknown))}; known: {known}")
        config = EngineConfig(**options)
        folder = resolve_model(model)
        self.device = pick_device(device)
        if dtype == "auto" and self.device.type == "cpu":
            dtype = "float32"
        decoder = load_model(folder, dtype=dtype, device=self.device)
        self.model_config = decoder.config
        self._generation = _read_generation_config(folder)
        self._tokenizer = None if skip_tokenizer_init else Tokenizer(folder)
        eos = self._generation.get("eos_token_id")
        if eos is None and self._tokenizer is not None:
            eos = self._tokenizer.eos_token_id
        eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
        self.engine = Engine(decoder, config, text=self._tokenizer, eos_token_ids=eos_ids)
        self._count = 0

    def get_tokenizer(self) -> Tokenizer:
        """Raises ConfigError if the LLM was made with skip_tokenizer_init."""
        if self._tokenizer is None:
            raise ConfigError("this LLM has no tokenizer: make it without skip_tokenizer_init=True")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with what the model's generation_config.json recommends."""
        known = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        said = {k: self._generation[k] for k in known if self._generation.get(k) is not None}
        if self._generation.get("do_sample") is False:
            said["temperature"] = 0.0
        return SamplingParams(**said)

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: int | Seq[int] = 0,
    ) -> list[RequestOutput]:
        """Complete one or many prompts, batched; one RequestOutput each, in the order of the prompts.

        prompts: text, a list of token ids, {"prompt_token_ids": [...]}, or a list of these. sampling_params and priority:
        one for all or one each. Raises RequestError if any prompt is refused; then none is run.
        """
        single = isinstance(prompts, (str, dict)) or (bool(prompts) and isinstance(prompts[0], int))
        items: list[Any] = [prompts] if single else list(prompts)
        params = self._each(sampling_params, len(items), "sampling_params")
        priorities = self._each(priority, len(items), "priority")
        finals: dict[str, RequestOutput] = {}
        ids = [self._new_id() for _ in items]
        with Call(self.engine) as call:
            for request_id, item, param, prio in zip(ids, items, params, priorities):
                self.engine.add_request(request_id, item, param, priority=prio, outbox=call.outbox)
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
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answer one or many conversations ([{"role": ..., "content": ...}, ...]) through the chat template."""
        many: list[Any] = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        tokenizer = self.get_tokenizer()
        prompts: list[Prompt] = []
        for conversation in many:
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
        (params,) = self._each(sampling_params, 1, "sampling_params")
        self.engine.add_request(self._new_id(), prompt, params, outbox=call.outbox)
        return Stream(call)

    def get_metrics(self) -> dict[str, Any]:
        """Counters of the engine since it started: steps, tokens, hits, preemptions, pages, expert load, ..."""
        return self.engine.get_metrics()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False (and nothing done) while requests run."""
        return self.engine.reset_prefix_cache()

    def _each(self, value: Any, count: int, what: str) -> list[Any]:
        if value is None:
            value = self.get_default_sampling_params()
        if not isinstance(value, (list, tuple)):
            return [value] * count
        if len(value) != count:
            raise ConfigError(
                f"{what} must be one or as many as prompts: {count} prompts, {len(value)} {what}"
            )
        return list(value)

    def _new_id(self) -> str:
        self._count += 1
        return f"llm-{self._count - 1}"


def _read_generation_config(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as JSON ({error}): copy it from the source again"
        ) from error
    return value if isinstance(value, dict) else {}
