"""Compiling kernels for sm_90 where no GPU is, from what their launchers pass: a recorder takes the kernel's place, the
launcher runs on meta tensors, and what it would have launched is compiled."""

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

NVIDIA = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


class Build(NamedTuple):
    ptx: str
    shared: int
    registers: int
    spilled: int


class Recorder:
    """Takes a kernel's place and keeps what it is launched with."""

    def __init__(self, kernel):
        self.kernel, self.calls = kernel, []

    def __getitem__(self, grid):
        assert all(size > 0 for size in grid)
        assert all(size < 65536 for size in grid[1:])
        return lambda *args, **options: self.calls.append((self.kernel, args, options))


def record(module, kernels, launch):
    recorders = [Recorder(getattr(module, name)) for name in kernels]
    with pytest.MonkeyPatch.context() as patch:
        for name, recorder in zip(kernels, recorders):
            patch.setattr(module, name, recorder)
        launch()
    return [recorder.calls for recorder in recorders]


def build(call, folder) -> Build:
    """Compile one launch: pointers as aligned as torch allocates them, but for those that are not specialized."""
    kernel, args, options = call
    names = kernel.arg_names
    given = dict(zip(names, args)) | {name: value for name, value in options.items() if name in names}
    flags = {name: value for name, value in options.items() if name not in names}
    signature, constants, attributes = {}, {}, {}
    for i, (name, parameter) in enumerate(zip(names, kernel.params)):
        value = given[name]
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            if not parameter.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            # A stride belongs to the model: it may be specialized. What changes from step to step may not.
            stride = name.startswith("stride")
            assert stride or parameter.do_not_specialize or isinstance(value, float), (
                f"{name} would be compiled for each value"
            )
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if stride and not parameter.do_not_specialize and value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=flags)
    path = folder / "kernel.ptx"
    path.write_text(compiled.asm["ptx"])
    log = subprocess.run(
        [NVIDIA / "ptxas", "-v", "--gpu-name=sm_90a", path, "-o", os.devnull],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))
    return Build(compiled.asm["ptx"], compiled.metadata.shared, registers, spilled)


def wgmma(ptx: str) -> set[str]:
    return set(re.findall(r"wgmma\.mma_async\S*?(m64n\d+k\d+)", ptx))


def vectors(ptx: str) -> int:
    """Asynchronous copies of 16 bytes: keys and values come in no smaller pieces."""
    return len(re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", ptx))
