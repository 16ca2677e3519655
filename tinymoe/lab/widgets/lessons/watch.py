"""What a Triton kernel really loads and stores, seen while Triton's interpreter runs it on a CPU.

The interpreter performs every access through a few methods of one object, its builder; `watched` puts itself in front
of them. It looks at the addresses before anything is read or written, so a kernel without a mask is stopped with a
message where it would otherwise spoil memory. What a load's masked lanes hold without `other` is undefined on a GPU; the
interpreter's zeros would hide that, so floats are NaN there. The builder comes from the caller, as
triton.runtime.interpreter.interpreter_builder: it is internal to Triton, and only kernels/ imports that.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

FIRST_ARGUMENT = {
    "create_masked_load": 0,
    "create_masked_store": 0,
    "create_atomic_rmw": 1,
    "create_atomic_cas": 0,
}
MASK = {"create_masked_load": 1, "create_masked_store": 2, "create_atomic_rmw": 3}
KIND = {"create_masked_load": "load", "create_masked_store": "store"}
NEAR = 1024  # bytes beside a tensor that are still named after it


class Touch(NamedTuple):
    """One access of one program to one tensor.

    program: its number on each axis of the grid. kind: "load", "store" or "atomic". elements: which, counted row by row.
    off: where the lanes that a mask held back point to, in elements after the tensor's first. launch: 1, 2, ...
    """

    launch: int
    program: tuple[int, ...]
    kind: str
    name: str
    elements: tuple[int, ...]
    off: tuple[int, ...]


class Stray(IndexError):
    """A program reached for an element that is not there."""


class _Known:
    """A tensor by name, and which of its elements lies where."""

    def __init__(self, name: str, tensor: torch.Tensor):
        self.name, self.start, self.width = name, tensor.data_ptr(), tensor.element_size()
        self.shape, self.strides = list(tensor.shape), list(tensor.stride())
        places = np.zeros((), np.int64)
        for size, stride in zip(tensor.shape, tensor.stride()):
            places = places[..., None] + np.arange(size) * stride
        self.element_at = {place: n for n, place in enumerate(places.ravel().tolist())}
        self.last = max(self.element_at, default=-1)

    def far(self, address: int) -> int:
        """Bytes between the address and the tensor; 0 inside."""
        return max(self.start - address, address - (self.start + self.last * self.width), 0)

    def places(self, addresses: np.ndarray) -> list[int]:
        return ((addresses - self.start) // self.width).tolist()

    def why_not(self, place: int) -> str:
        if 0 <= place <= self.last:
            return f"between two rows of {self.name} ({self.shape}, a row every {self.strides[0]} elements)"
        return f"outside {self.name} ({self.shape}, the last element is {self.name} + {self.last})"


@contextmanager
def watched(builder: Any, **tensors: torch.Tensor) -> Iterator[list[Touch]]:
    """A list that grows with every access of the kernels that run inside the block; builder: the interpreter's.

    Name every tensor that they may touch. Where a lane that no mask holds back points elsewhere, the kernel stops with
    Triton's InterpreterError, whose cause is a Stray.
    """
    seen: list[Touch] = []
    known = [_Known(name, tensor) for name, tensor in tensors.items()]
    plain = {method: getattr(builder, method) for method in (*FIRST_ARGUMENT, "set_grid_dim")}
    grid = [1, 1, 1]
    launches = 0

    def note(method: str, arguments: Sequence[Any]) -> None:
        pointers = arguments[FIRST_ARGUMENT[method]].data
        mask = arguments[MASK[method]].data if method in MASK else True
        addresses = pointers.astype(np.int64).ravel()
        lanes = np.broadcast_to(mask, pointers.shape).astype(bool).ravel()
        numbers = tuple(builder.grid_idx)[: max((n + 1 for n in range(3) if grid[n] > 1), default=1)]
        kind = KIND.get(method, "atomic")
        aim = int(addresses[lanes][0] if lanes.any() else addresses[0])
        tensor = min(known, key=lambda k: k.far(aim))
        verb = {"load": "loads", "store": "stores to", "atomic": "changes"}[kind]
        if lanes.any() and tensor.far(aim) > NEAR:
            raise Stray(f"program {program_name(numbers)} {verb} an address in no tensor that you were given")
        elements = []
        for place in tensor.places(addresses[lanes]):
            if place not in tensor.element_at:
                raise Stray(
                    f"program {program_name(numbers)} {verb} {tensor.name} + {place}, {tensor.why_not(place)}"
                )
            elements.append(tensor.element_at[place])
        off = tuple(tensor.places(addresses[~lanes]))
        seen.append(
            Touch(launches, numbers, kind, tensor.name, tuple(elements), off)
        )  # shown by "why?": #note

    def wrapped(method: str):
        def access(*arguments: Any) -> Any:
            note(method, arguments)
            result = plain[method](*arguments)
            if method == "create_masked_load" and arguments[2] is None and result.data.dtype.kind == "f":
                result.data[~np.broadcast_to(arguments[1].data, result.data.shape).astype(bool)] = np.nan
            return result

        return access

    def launch(*sizes: int) -> None:
        nonlocal launches
        launches += 1
        grid[:] = sizes
        plain["set_grid_dim"](*sizes)

    before = {method: vars(builder).get(method) for method in plain}
    vars(builder).update({method: wrapped(method) for method in FIRST_ARGUMENT} | {"set_grid_dim": launch})
    try:
        yield seen
    finally:
        for method, old in before.items():
            if old is None:
                vars(builder).pop(method)
            else:
                setattr(builder, method, old)


def program_name(numbers: Sequence[int]) -> str:
    """(2,) -> "2", (1, 0) -> "(1, 0)"."""
    return str(numbers[0]) if len(numbers) == 1 else f"({', '.join(map(str, numbers))})"


def element_name(name: str, element: int, shape: Sequence[int]) -> str:
    """("out", 7, [2, 5]) -> "out[1, 2]"."""
    return f"{name}[{', '.join(str(int(n)) for n in np.unravel_index(element, shape))}]"
