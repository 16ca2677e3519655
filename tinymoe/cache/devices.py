"""Where a model runs, and how much memory there is."""

import os

import torch

from tinymoe.core.model_config import ConfigError, brief

KNOWN = "use 'auto', 'cpu' or 'cuda'"


def pick_device(device: str | torch.device) -> torch.device:
    """ "auto": the GPU if there is one. Raises ConfigError for a device that is not there or cannot hold a model."""
    if isinstance(device, str) and device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(device, (str, torch.device)):
        raise ConfigError(f"device must be a string or a torch.device, got {brief(device)}: {KNOWN}")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {brief(device)} is not known: {KNOWN}") from error
    if found.type == "meta":
        raise ConfigError(f"device 'meta' holds no numbers, so nothing can be generated there: {KNOWN}")
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device {str(found)!r} was asked for, but torch sees no GPU: use device='cpu' or 'auto'"
            )
        count = torch.cuda.device_count()
        if (found.index or 0) >= count:
            raise ConfigError(
                f"device {str(found)!r} does not exist: there are {count} GPUs, 'cuda:0' to 'cuda:{count - 1}'"
            )
        return found
    if found.type == "cpu":
        if found.index:
            raise ConfigError(f"device {str(found)!r} does not exist: the processor is 'cpu'")
        return found
    try:
        torch.zeros(1, device=found).cpu()
    except Exception as error:  # each backend has its own
        raise ConfigError(f"device {str(found)!r} does not work here: {KNOWN}") from error
    return found


def memory_bytes(device: torch.device) -> int | None:
    """All memory of the GPU, or of the machine; None if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def free_bytes(device: torch.device) -> int | None:
    """Memory of the GPU that nobody has taken; None for other devices, whose systems lend more than is free."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
