"""What a model folder recommends in generation_config.json: how to sample, and which ids end a text."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from tinymoe.core.model_config import ConfigError, brief, require
from tinymoe.core.params import SamplingParams

KNOWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Recommended(NamedTuple):
    """eos_token_ids is None if the file does not say."""

    params: SamplingParams
    eos_token_ids: tuple[int, ...] | None


def recommended(folder: Path, vocab_size: int) -> Recommended:
    """Read and check; a folder without the file recommends nothing. Raises ConfigError naming file, value and range."""
    path = folder / "generation_config.json"
    said = _read(path) if path.is_file() else {}
    options = {name: said[name] for name in KNOWN if said.get(name) is not None}
    sample = said.get("do_sample")
    require(
        sample is None or isinstance(sample, bool),
        f"{path}: do_sample must be true, false or null, got {brief(sample)}",
    )
    if sample is False:
        options["temperature"] = 0.0
    try:
        params = SamplingParams(**options)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; correct it there, or leave it out") from error
    eos = said.get("eos_token_id")
    ids = None if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    for token in ids or ():
        ok = isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size
        require(
            ok,
            f"{path}: eos_token_id must be a token id of the model (0..{vocab_size - 1}), a list of them, or null, "
            f"got {brief(eos)}; correct it there",
        )
    return Recommended(params, ids)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as JSON ({error}): copy it from the source again"
        ) from error
    require(isinstance(value, dict), f"{path} must hold a JSON object, got {brief(value)}")
    return value
