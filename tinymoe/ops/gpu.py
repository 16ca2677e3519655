"""The door to kernels/: imported only where a CUDA device can run them, so a CPU, macOS and Windows never need Triton."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

AVAILABLE = torch.cuda.is_available() and find_spec("triton") is not None


def kernel(name: str) -> Any:
    """The module tinymoe.kernels.NAME, or None where it cannot run."""
    return import_module(f"tinymoe.kernels.{name}") if AVAILABLE else None


moe = kernel("fused_moe")
grouped_gemm = kernel("grouped_gemm")
sort_tokens = kernel("sort_tokens")
