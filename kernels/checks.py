"""What a launcher asks of its arguments. A kernel reads wherever its pointers, shapes and strides lead it, so what does
not fit has to be refused before the launch. All of it is known on the host: nothing waits for the device, and what a
tensor holds (slots, ids, temperatures) is not looked at.
"""

from collections.abc import Sequence

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32)
WANTED = {
    "contiguous": "a contiguous {}",
    "rows": "{} with contiguous rows",
    "experts": "{} with contiguous experts",
}


def check(
    name: str, t: object, shape: tuple, dtypes: Sequence[torch.dtype] = FLOATS, layout: str = "contiguous"
) -> None:
    """shape: sizes, or a letter where any size will do. layout: all "contiguous", each of its "rows" (along the last
    dimension), or each of its "experts" (along the first). Raises ValueError that says what was wanted and what came."""
    if not isinstance(t, torch.Tensor):
        raise ValueError(f"{name} must be a tensor {listed(shape)}, got {type(t).__name__}")
    if t.dtype not in dtypes or not fits(t.shape, shape) or not lies(t, layout):
        raise ValueError(
            f"{name} must be {WANTED[layout].format(listed(shape))} of {', '.join(map(short, dtypes))}; got "
            f"{short(t.dtype)} {listed(t.shape)} with strides {listed(t.stride())}"
        )


def fits(got: torch.Size, shape: tuple) -> bool:
    if len(got) != len(shape):
        return False
    for size, wanted in zip(got, shape):  # noqa: SIM110 (a generator costs time at every launch)
        if size != wanted and type(wanted) is not str:
            return False
    return True


def lies(t: torch.Tensor, layout: str) -> bool:
    if t.is_contiguous():  # strides along a dimension of size 1 are never used
        return True
    if layout == "rows":
        return t.stride(-1) == 1 or t.shape[-1] == 1
    return layout == "experts" and t[:1].is_contiguous()


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def listed(sizes: Sequence) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def check_number(name: str, value: object, least: int = 1) -> None:
    """An int (no bool, no tensor) of at least `least`."""
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")


def check_layer(
    x_TH: torch.Tensor,
    gate_up_E2IH: torch.Tensor,
    down_EHI: torch.Tensor,
    residual_TH: torch.Tensor | None = None,
    shared_TH: torch.Tensor | None = None,
    logits_TE: torch.Tensor | None = None,
) -> None:
    """An expert layer's arguments: x [T, H], gate_up [E, 2I, H] and down [E, H, I] with contiguous experts, residual and
    shared [T, H], of one dtype; logits [T, E] of any of FLOATS."""
    tensors = isinstance(x_TH, torch.Tensor) and isinstance(gate_up_E2IH, torch.Tensor)
    if not tensors or x_TH.dim() != 2 or x_TH.dtype not in FLOATS or gate_up_E2IH.dim() != 3:
        check("x", x_TH, ("T", "H"), FLOATS, "rows")
        check("gate_up", gate_up_E2IH, ("E", "2I", "H"), FLOATS, "experts")
    T, (E, two_I, H), dtype = x_TH.shape[0], gate_up_E2IH.shape, x_TH.dtype
    if two_I % 2 or not (E and two_I and H):
        raise ValueError(f"gate_up must be [E, 2I, H], none of them 0, got {[E, two_I, H]}")
    for name, t, shape, layout in (
        ("x", x_TH, (T, H), "rows"),
        ("gate_up", gate_up_E2IH, (E, two_I, H), "experts"),
        ("down", down_EHI, (E, H, two_I // 2), "experts"),
        ("residual", residual_TH, (T, H), "rows"),
        ("shared", shared_TH, (T, H), "rows"),
        ("logits", logits_TE, (T, E), "rows"),
    ):
        if t is None and name != "down":
            continue
        if not isinstance(t, torch.Tensor):
            raise ValueError(f"{name} must be a tensor {listed(shape)}, got {type(t).__name__}")
        if t.shape != shape:
            raise ValueError(
                f"{name} has shape {listed(t.shape)}, but gate_up {[E, two_I, H]} asks for {listed(shape)}"
            )
        if t.dtype is not dtype and (name != "logits" or t.dtype not in FLOATS):
            raise ValueError(f"{name} is {t.dtype} and x is {dtype}: convert one of them")
        if not lies(t, layout):
            whose = "an expert's" if layout == "experts" else "rows of"
            raise ValueError(
                f"{whose} {name} must be contiguous, got strides {listed(t.stride())}: call .contiguous()"
            )


def check_routes(ids_TK: torch.Tensor, weights_TK: torch.Tensor, num_tokens: int) -> None:
    """Known routes: ids int32 and weights float32, both [T, K] with K of at least 1."""
    check("ids", ids_TK, (num_tokens, "K"), (torch.int32,))
    if not ids_TK.shape[1]:
        raise ValueError(f"ids must name at least one expert a token, got {listed(ids_TK.shape)}")
    check("weights", weights_TK, tuple(ids_TK.shape), (torch.float32,))
