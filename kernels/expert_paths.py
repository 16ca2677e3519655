"""The fixed set of ways through a Mixture-of-Experts layer, by name: all compute the same, each is fastest somewhere.

    few          no sort: a program routes its own token (at most MOST_PAIRS visits)
    groupedN     sorted, tiles of N rows of one expert
    denseN       every expert on every tile of N tokens, no sort
    blockedN     activations as a block-sparse matrix of N x N blocks

Digits are the rows of a tile. Which is fastest depends on how many tokens there are and how they spread over the experts;
tinymoe.experts.selection decides by what was measured. A name stands for one tile of each kernel (`plan_of`), whatever the
number of tokens, so that a model compiles few kernels and a CUDA graph can be kept for each (bucket of tokens, name).
"""

import torch
import triton

from tinymoe.kernels.blocked_sparse import block_tiles, blocked_sparse
from tinymoe.kernels.checks import FLOATS, check
from tinymoe.kernels.dense_masked import DENSE16, DENSE64, DENSE_WIDE, dense_masked
from tinymoe.kernels.fused_moe import INVARIANT, WIDE, DecodeTile, Plan, fused_moe
from tinymoe.kernels.grouped_gemm import Tile
from tinymoe.kernels.topk_softmax import topk_softmax

PATHS = ("few", "grouped16", "grouped64", "grouped128", "dense16", "dense64", "blocked64", "blocked128")
INVARIANT_PATH = "grouped64"  # what every number of tokens takes with invariant=True
MOST_PAIRS = 128  # visits: each reads an expert's weights anew, so more of them never pay


def serves(path: str, num_tokens: int, num_experts: int, top_k: int) -> bool:
    """Whether the path is worth measuring in the bucket (a power of two) of this number of tokens. The bounds are wide: a
    path beyond them would read every expert many times, or multiply what nobody asked for."""
    bucket = triton.next_power_of_2(max(1, num_tokens))
    pairs = bucket * top_k
    if path == "few":
        return pairs <= MOST_PAIRS
    if path.startswith("dense"):
        return bucket <= 1024 and num_experts <= 16 * top_k
    if path == "grouped16":
        return pairs <= 256 * num_experts
    if path in ("grouped128", "blocked128"):
        return pairs >= 4 * num_experts
    return True


def plan_of(
    path: str, num_tokens: int, top_k: int, hidden: int, width: int, dtype: torch.dtype = torch.bfloat16
) -> Plan | tuple[int, Tile, Tile]:
    """The tiles of a path. Raises ValueError for a name that is none of PATHS."""
    wide = dtype is torch.float32
    if path not in PATHS:
        raise ValueError(f"unknown expert path {path!r}; known: {', '.join(PATHS)}")
    if path == "few":
        if hidden >= 4096:
            return Plan(0, DecodeTile(8, 512, 4, 3), DecodeTile(8, 512, 4, 3))
        down = DecodeTile(8, 512, 4, 3) if num_tokens <= 1 else DecodeTile(16, 256, 4, 3)
        return Plan(0, DecodeTile(16, 256, 4, 3), down)
    if path.startswith("dense"):
        return DENSE_WIDE if wide else DENSE16 if path == "dense16" else DENSE64
    if path.startswith("blocked"):
        return block_tiles(64 if wide else int(path.removeprefix("blocked")), dtype)
    if wide:
        return WIDE
    if path == "grouped16":
        return Plan(16, Tile(64, 128, 4, 3, swap=True), Tile(64, 128, 4, 4, swap=True))
    if path == "grouped64":
        return INVARIANT
    # Copying rows into sorted order costs top_k * hidden a token, what it speeds up costs top_k * 3 * hidden * width.
    copy = top_k * hidden < 12 * width
    return Plan(128, Tile(128, 64, 8, 4, group=4, tma=copy), Tile(256, 64, 8, 4, group=4, tma=width >= 1024))


def run(
    path: str,
    x_TH: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up_E2IH: torch.Tensor,
    down_EHI: torch.Tensor,
    top_k: int,
    *,
    residual_TH: torch.Tensor | None = None,
    shared_TH: torch.Tensor | None = None,
    **routing,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The layer by the named path: arguments and results are those of fused_moe, num_valid included. Raises
    ValueError for a name that is none of PATHS, and for what fused_moe refuses."""
    if x_TH.dim() != 2 or down_EHI.dim() != 3:
        raise ValueError(
            f"x must be [T, H] and down [E, H, I], got {list(x_TH.shape)} and {list(down_EHI.shape)}"
        )
    (T, H), (E, _, I) = x_TH.shape, down_EHI.shape
    plan = plan_of(path, T, top_k, H, I, x_TH.dtype)
    if isinstance(plan, Plan):
        return fused_moe(
            x_TH, logits_TE, gate_up_E2IH, down_EHI, top_k, residual_TH=residual_TH, shared_TH=shared_TH, use=plan,
            **routing,
        )  # fmt: skip
    check("logits", logits_TE, (T, E), FLOATS, "rows")  # before ids are made from them
    ids_TK, weights_TK = topk_softmax(logits_TE, top_k, **routing)
    layer = dense_masked if path.startswith("dense") else blocked_sparse
    out_TH = layer(x_TH, ids_TK, weights_TK, gate_up_E2IH, down_EHI, residual_TH, shared_TH, tiles=plan)
    return out_TH, ids_TK, weights_TK
