"""Count a step's visits to each expert, in one launch. One program is one layer.

The ids of all layers lie side by side, so what a router's load counters need is one histogram a layer: kept on the device
and added up there, it costs the host nothing, and a CUDA graph can hold it. A program takes its layer's pairs chunk by
chunk and is the only one to write its row: no atomics in memory, the same sums every time. Ids outside 0..E-1 (-1: a
padded row) are nobody's.

Reference: tinymoe.ops.reference.count_routes.
"""

# A launch takes num_warps, too.
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl

from tinymoe.kernels.sort_tokens import load_ids

CHUNK = 1024  # pairs at a time


@triton.jit(do_not_specialize=["P", "stride_l"])
def count_routes_kernel(
    ids, load, distinct, step, P, stride_l, E: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr
):
    layer = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EP)
    counts = tl.zeros((EP,), tl.int32)
    for chunk in range(tl.cdiv(P, CHUNK)):
        counts += tl.histogram(load_ids(ids + layer * stride_l, P, chunk, E, CHUNK).to(tl.int32), EP)
    counts = tl.where(e < E, counts, 0)
    at = layer * E + e
    tl.store(load + at, tl.load(load + at, mask=e < E, other=0) + counts, mask=e < E)
    tl.store(distinct + layer, tl.load(distinct + layer) + tl.sum((counts > 0).to(tl.int32), 0))
    if step is not None:
        tl.store(step + at, counts, mask=e < E)


def count_routes(
    ids_LTK: torch.Tensor,
    load_LE: torch.Tensor,
    distinct_L: torch.Tensor,
    step_LE: torch.Tensor | None = None,
) -> None:
    """ids [L, T, K] int16, int32 or int64 (a layer's [T, K] contiguous), added in place: to load [L, E] int64 each expert's
    pairs, to distinct [L] int64 the number of experts with at least one. step [L, E] int32 gets the pairs of this call.

    Raises ValueError for shapes, dtypes and layouts that do not fit.
    """
    (L, T, K), E = ids_LTK.shape, load_LE.shape[-1]
    if ids_LTK.dtype not in (torch.int16, torch.int32, torch.int64) or not ids_LTK[:1].is_contiguous():
        raise ValueError(
            f"ids must be int16, int32 or int64 [L, T, K], contiguous in a layer, "
            f"got {ids_LTK.dtype} {list(ids_LTK.shape)} with strides {list(ids_LTK.stride())}"
        )
    wanted = {
        "load": (load_LE, (L, E), torch.int64),
        "distinct": (distinct_L, (L,), torch.int64),
        "step": (step_LE, (L, E), torch.int32),
    }
    for name, (t, shape, dtype) in wanted.items():
        if t is not None and (t.shape != shape or t.dtype is not dtype or not t.is_contiguous()):
            raise ValueError(
                f"{name} must be a contiguous {dtype} {list(shape)}, got {t.dtype} {list(t.shape)}"
            )
    if L:
        EP = max(16, triton.next_power_of_2(E + 1))  # one more: nobody
        count_routes_kernel[(L,)](
            ids_LTK, load_LE, distinct_L, step_LE, T * K, ids_LTK.stride(0), E=E, EP=EP, CHUNK=CHUNK, num_warps=4
        )  # fmt: skip
