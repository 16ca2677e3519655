"""Start the next kernel while this one ends. Every kernel of a decode step begins with `await_previous()`.

Idea: a decode step is hundreds of launches of a few microseconds each, and between two of them the GPU drains and fills
again. With programmatic dependent launch (Hopper and later) the next kernel's programs are already on their processors,
waiting, when the last ones of this kernel finish. It waits until everything before has finished and is visible,
and only then lets the next kernel come; so nothing may be read or written, and no program may leave, before it.

Source: CUDA C++ programming guide, programmatic dependent launch and synchronization.
"""

from types import MappingProxyType

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

HERE = tl.constexpr(
    torch.cuda.is_available()
    and torch.cuda.get_device_capability() >= (9, 0)
    and not triton.knobs.runtime.interpret
)
# What a launch takes, too: kernel[grid](..., **OVERLAPPED)
OVERLAPPED = MappingProxyType({"launch_pdl": True} if HERE.value else {})


@triton.jit
def await_previous():
    if HERE:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
