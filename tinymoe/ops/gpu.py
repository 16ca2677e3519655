"""The door to kernels/: imported only where a CUDA device can run them, so a CPU, macOS and Windows never need Triton."""

from importlib.util import find_spec
from typing import Any

import torch

AVAILABLE = torch.cuda.is_available() and find_spec("triton") is not None
moe: Any = None
grouped_gemm: Any = None
sort_tokens: Any = None
if AVAILABLE:
    pass
