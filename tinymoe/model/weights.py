"""Checkpoints: safetensors folders in Hugging Face format, read into a decoder with proof that every row was filled.

Files are memory-mapped and each tensor is copied straight into its rows of the fused parameter, so loading needs the
memory of the model once. Pickle files are never opened: unpickling can run code.
"""

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tinymoe.core.config import Dtype
from tinymoe.core.model_config import ConfigError, ModelConfig
from tinymoe.model.decoder import Decoder
from tinymoe.model.families import model_config_from_hf
from tinymoe.model.hf_config import hf_config
from tinymoe.model.moe import MoE
from tinymoe.model.tensor_names import Slot, num_rows, tensor_slots, to_hf

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_CHOICES = " or ".join(map(repr, DTYPES))
_STORED = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Buffers that old exporters wrote although they follow from config.json.
_HARMLESS = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded; the message names the file, tensor or option and what to do."""


def _need(ok: bool, message: str) -> None:
    if not ok:
        raise CheckpointError(message)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON ({error}): copy it from the source again"
        ) from error
    _need(isinstance(value, dict), f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


class Checkpoint:
    """A folder's config.json and its safetensors files, open and memory-mapped. Use as a context manager.

    config: the content of config.json. model_config: what it means. names: every tensor in the files.
    Raises CheckpointError.
    """

    def __init__(self, folder: str | Path, read_weights: bool = True):
        self.folder = Path(folder)
        _need(
            self.folder.is_dir(),
            f"{self.folder} is not a folder: give a local folder in Hugging Face format (nothing is downloaded)",
        )
        path = self.folder / "config.json"
        _need(
            path.is_file(),
            f"{self.folder} has no config.json: give the folder that holds config.json and weights",
        )
        self.config = _read_json(path)
        try:
            self.model_config: ModelConfig = model_config_from_hf(self.config)
        except ConfigError as error:
            raise CheckpointError(f"{path}: {error}") from error
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        with ExitStack() as undo:
            undo.push(self._stack)
            if read_weights:
                self._open_all()
            undo.pop_all()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def _open_all(self) -> None:
        single, index = self.folder / "model.safetensors", self.folder / "model.safetensors.index.json"
        if single.is_file():
            self._open(single)
        elif index.is_file():
            self._open_shards(index)
        else:
            pickles = sorted(path.name for pattern in _PICKLES for path in self.folder.glob(pattern))
            _need(
                not pickles,
                f"{self.folder} has only pickle weights ({_some(pickles)}), which are refused because unpickling can "
                "run code: convert them in an environment you trust, with transformers: "
                "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)",
            )
            others = sorted(path.name for path in self.folder.glob("*.safetensors"))
            hint = f" (found {_some(others)}, but no index to say what is in them)" if others else ""
            raise CheckpointError(
                f"{self.folder} has neither model.safetensors nor {index.name}{hint}: add one"
            )

    def _open_shards(self, index: Path) -> None:
        weight_map: dict[str, str] = _read_json(index).get("weight_map") or {}
        _need(bool(weight_map), f"{index} has no weight_map: copy it from the source again")
        for shard in sorted(set(weight_map.values())):
            wanted = [name for name, file in weight_map.items() if file == shard]
            path = self.folder / shard
            _need(
                path.is_file() and path.parent == self.folder,
                f"shard {shard} is missing from {self.folder}; {index.name} expects {len(wanted)} tensors in it, "
                f"first {wanted[0]}: copy the file from the source",
            )
            held = self._open(path)
            absent = [name for name in wanted if name not in held]
            _need(
                not absent,
                f"{index.name} promises {_some(absent)} in {shard}, which lacks them: copy both again",
            )

    def _open(self, path: Path) -> set[str]:
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is truncated or not a safetensors file ({error}): copy it from the source again"
            ) from error
        names = set(file.keys())
        twice = sorted(names & set(self._file_of))
        _need(
            not twice,
            f"{_some(twice)} in {path.name} is in another shard as well: remove one of the two files",
        )
        self._file_of.update(dict.fromkeys(names, file))
        return names

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """ "float32", "bfloat16", "float16" or "float64"; anything else is a quantised tensor and an error."""
        stored = self._file_of[name].get_slice(name).get_dtype()
        _need(
            stored in _STORED,
            f"tensor {name} is stored as {stored}: quantised checkpoint not supported, "
            "use one in bfloat16, float16 or float32",
        )
        return _STORED[stored]

    def tensor(self, name: str) -> Tensor:
        """The tensor as it is stored; on the CPU, backed by the memory-mapped file."""
        return self._file_of[name].get_tensor(name)

    def model_dtype(self, dtype: Dtype) -> torch.dtype:
        """`dtype`; for "auto" what config.json says (dtype, formerly torch_dtype), or else the final norm's."""
        if dtype == "auto":
            said = self.config.get("dtype") or self.config.get("torch_dtype")
            if said is None:
                norm = "model.norm.weight"  # where it is missing, `slots` says so
                said = self.dtype(norm) if norm in self.names else "float32"
            said = str(said).removeprefix("torch.")
            _need(
                said in DTYPES, f"the checkpoint's dtype {said!r} is not supported: choose dtype={_CHOICES}"
            )
            return DTYPES[said]
        _need(dtype in DTYPES, f"dtype must be 'auto', {_CHOICES}, got {dtype!r}")
        return DTYPES[dtype]

    def _need_tied(self) -> None:
        embed, head = (self.tensor(name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
        _need(
            embed.dtype == head.dtype and torch.equal(embed, head),
            "tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight: "
            "set tie_word_embeddings to false in config.json",
        )

    def slots(self) -> dict[str, Slot]:
        """Where every tensor goes. Raises CheckpointError for missing, extra, misshapen and quantised tensors."""
        names, tied = self.names, self.model_config.tie_word_embeddings
        slots = tensor_slots(self.model_config, names)
        if tied and "lm_head.weight" in names and "model.embed_tokens.weight" not in names:
            # Shared tensors are stored once, and some exporters keep the other name.
            slots["lm_head.weight"] = slots.pop("model.embed_tokens.weight")
        missing = [name for name in slots if name not in names]
        _need(
            not missing,
            f"{len(missing)} of {len(slots)} tensors are missing from {self.folder}: {_some(missing)}. "
            "config.json and the weights must come from the same model, and all shards must be there",
        )
        extra = sorted(name for name in names - set(slots) if not _HARMLESS.search(name))
        if tied and "lm_head.weight" in extra:
            self._need_tied()
            extra.remove("lm_head.weight")
        _need(
            not extra,
            f"{len(extra)} tensors of {self.folder} have no place in a {self.model_config.model_type} model with this "
            f"config.json: {_some(extra)}. Remove them, or correct the options that they belong to",
        )
        for name, slot in slots.items():
            shape = self.shape(name)
            _need(
                shape == slot.shape,
                f"tensor {name} has shape {list(shape)}, but config.json asks for {list(slot.shape)}: "
                "config.json and the weights must come from the same model",
            )
            self.dtype(name)
        return slots


@torch.no_grad()
def _fill(checkpoint: Checkpoint, slots: Mapping[str, Slot], model: Decoder) -> None:
    parameters = dict(model.named_parameters())
    filled = {name: bytearray(num_rows(parameter)) for name, parameter in parameters.items()}
    for name, slot in slots.items():
        rows = slice(slot.first_row, slot.first_row + slot.num_rows)
        marks = filled[slot.parameter]
        _need(not any(marks[rows]), f"tensor {name} would fill rows of {slot.parameter} a second time")
        slot.view(parameters[slot.parameter]).copy_(checkpoint.tensor(name))
        marks[rows] = b"\x01" * slot.num_rows
    for name, marks in filled.items():
        _need(all(marks), f"{marks.count(0)} of {len(marks)} rows of parameter {name} were not filled")


def load_model(
    folder: str | Path,
    dtype: Dtype = "auto",
    device: str | torch.device = "cpu",
    load_format: str = "safetensors",
    widen: bool = False,
) -> Decoder:
    """Load a checkpoint folder: config.json, and model.safetensors or shards with model.safetensors.index.json.

    dtype: of all parameters but the selection bias (float32); "auto" takes the checkpoint's. The decoder is in eval
    mode. A tied model may bring lm_head.weight as well if it equals the embedding, and rotary buffers are passed over.
    load_format: "dummy" needs config.json only and makes random weights (seed 0), for measuring speed.
    widen: on a CPU "auto" is float32, if the checkpoint's own dtype is one of DTYPES.
    Raises CheckpointError, naming file, tensor or option and what to do, and ConfigError if the weights do not fit.
    """
    device = torch.device(device)
    with Checkpoint(folder, read_weights=load_format != "dummy") as checkpoint:
        kept = checkpoint.model_dtype(dtype)
        if widen and dtype == "auto" and device.type == "cpu":
            kept = torch.float32
        if load_format == "dummy":
            model = Decoder.empty(checkpoint.model_config, kept, device).init_weights()
        else:
            slots = checkpoint.slots()
            model = Decoder.empty(checkpoint.model_config, kept, device)
            _fill(checkpoint, slots, model)
    for module in model.modules():
        if isinstance(module, MoE):
            module.prepare(device)
    return model.eval()


def save_checkpoint(
    folder: str | Path, model: Decoder, dtype: Dtype = "auto", extra: Mapping[str, Any] | None = None
) -> None:
    """Write config.json and model.safetensors of a qwen3 or qwen3_moe decoder, as transformers and vLLM load them.

    dtype: of the stored tensors, "auto" keeps the embedding's. extra: more options for config.json (bos_token_id, …).
    The folder is made if it is missing; files of these names are overwritten. Raises ConfigError (see hf_config).
    """
    wanted = model.embed.weight.dtype if dtype == "auto" else DTYPES[dtype]
    config = {**hf_config(model.config), "torch_dtype": str(wanted).removeprefix("torch."), **(extra or {})}
    # Copies: a file holds whole tensors, and these are views into fused parameters.
    tensors = {
        name: view.detach().to("cpu", wanted, copy=True).contiguous()
        for name, view in to_hf(model.config, dict(model.named_parameters())).items()
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
