"""LLM: load a model, generate, chat, stream. The names are those of vLLM's offline interface."""

import json
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from tinymoe.core.config import Dtype, EngineConfig
from tinymoe.core.model_config import ConfigError
from tinymoe.core.outputs import RequestOutput
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


@dataclass(slots=True)
class Delta:
    """What a stream adds: new text and token ids of completion `index`; finish_reason on its last delta."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None


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
        self._boxes: dict[str, deque[RequestOutput]] = {}
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
        ids = self._submit(items, self._each(sampling_params, len(items), "sampling_params"), priority)
        finals: dict[str, RequestOutput] = {}
        try:
            with tqdm(total=len(ids), desc="requests", disable=not use_tqdm) as bar:
                while len(finals) < len(ids):
                    self._pump()
                    for request_id in ids:
                        for output in self._drain(request_id):
                            if output.finished:
                                finals[request_id] = output
                                bar.update()
        finally:
            self._discard(ids)
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

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Delta]:
        """Yield what each step adds. The deltas of an index join to its final text. Streams may be interleaved.

        The request is queued at once and aborted if the iterator is closed before its end.
        """
        ids = self._submit([prompt], self._each(sampling_params, 1, "sampling_params"), 0)
        return self._deltas(ids[0])

    def get_metrics(self) -> dict[str, Any]:
        """Counters of the engine since it started: steps, tokens, hits, preemptions, pages, expert load, ..."""
        return self.engine.get_metrics()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False (and nothing done) while requests run."""
        return self.engine.reset_prefix_cache()

    def _deltas(self, request_id: str) -> Iterator[Delta]:
        sent: dict[int, tuple[int, int]] = {}
        finished = False
        try:
            while not finished:
                if not self._boxes[request_id]:
                    self._pump()
                for output in self._drain(request_id):
                    finished = output.finished
                    for c in output.outputs:
                        text, tokens = sent.get(c.index, (0, 0))
                        new = len(c.text) > text or len(c.token_ids) > tokens
                        if new or (finished and c.finish_reason and c.index not in sent):
                            yield Delta(c.index, c.text[text:], c.token_ids[tokens:], c.finish_reason)
                        sent[c.index] = (len(c.text), len(c.token_ids))
        finally:
            self._discard([request_id])

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

    def _submit(
        self, prompts: list[Any], params: list[SamplingParams], priority: int | Seq[int]
    ) -> list[str]:
        """Queue all or none."""
        priorities = self._each(priority, len(prompts), "priority")
        ids: list[str] = []
        try:
            for prompt, param, prio in zip(prompts, params, priorities):
                request_id = f"llm-{self._count}"
                self._count += 1
                self.engine.add_request(request_id, prompt, param, priority=prio)
                self._boxes[request_id] = deque()
                ids.append(request_id)
        except BaseException:
            self._discard(ids)
            raise
        return ids

    def _pump(self) -> None:
        """One engine step; every output goes to the box of its request."""
        for output in self.engine.step():
            if output.request_id in self._boxes:
                self._boxes[output.request_id].append(output)

    def _drain(self, request_id: str) -> Iterator[RequestOutput]:
        box = self._boxes[request_id]
        while box:
            yield box.popleft()

    def _discard(self, ids: list[str]) -> None:
        for request_id in ids:
            self.engine.abort_request(request_id)
            self._boxes.pop(request_id, None)


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
