"""A whole Mixture-of-Experts layer: router logits in, tokens out, in two to seven launches.

Which weights must be read decides everything. One token visits K experts: nothing is shared, sorting would only cost
time. A batch of tokens visits nearly all experts, a few rows each: every weight should be read once. Thousands of tokens
keep the tensor cores busy. So there are three regimes, chosen by the number of tokens alone (which a CUDA graph knows):

    few     `decode_up`, `decode_down`           no sort: a program routes its own token, then reads one expert's rows
    some    route, sort, `up`, `down`, combine   tiles of 16 rows, operands swapped: bound by reading weights
    many    the same five                        tiles of 64 or 128 rows: bound by arithmetic

Nothing here waits for the host or uses atomics, so all of it can be captured in a CUDA graph, and the same input gives
the same bits. With `invariant=True` one regime and one tile serve every number of tokens: then a token's answer is the
same bits whoever shares its batch.

Sources: the launch without a sort for few tokens and block-aligned tiles are vLLM's (fused_moe.py), the shape of the
layer is Shazeer's (2017, arXiv 1701.06538; 2020, arXiv 2002.05202). Reference: tinymoe.ops.reference.fused_moe.

`python -m tinymoe.kernels.fused_moe` checks this file against a loop and times it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tinymoe.kernels.checks import check_layer
from tinymoe.kernels.combine import combine
from tinymoe.kernels.grouped_gemm import Tile, down, silu, up
from tinymoe.kernels.sort_tokens import sort_tokens
from tinymoe.kernels.topk_softmax import check_routing, route, route_constants, topk_softmax

# Few tokens: no sort


@triton.jit
def pick(values, j, KP: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, KP) == j, values, 0), 0)


@triton.jit
def decode_up_kernel(
    x, logits, bias, w, h, ids_out, weights_out, num_valid, stride_x, stride_l, stride_w,
    H: tl.constexpr, I: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    SIGMOID: tl.constexpr, BIASED: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, TOP_G: tl.constexpr,
    RENORMALIZE: tl.constexpr, SCALE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program is one pair (token, slot) and BLOCK_N features: h = silu(gate) * up."""
    pair = tl.program_id(0)
    token = (pair // K).to(tl.int64)
    if num_valid is not None:  # noqa: SIM102 (decided when compiling)
        if token >= tl.load(num_valid):
            if tl.program_id(1) == 0:
                tl.store(ids_out + pair, -1)
                tl.store(weights_out + pair, 0.0)
            return
    ids, weights = route(
        logits, bias, token, stride_l, E, EP, K, KP, SIGMOID, BIASED, G, GP, TOP_G, RENORMALIZE, SCALE
    )
    expert = pick(ids, pair % K, KP)
    if tl.program_id(1) == 0:
        tl.store(ids_out + pair, expert)
        tl.store(weights_out + pair, pick(weights, pair % K, KP))
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w_at = w + expert.to(tl.int64) * stride_w + n[:, None] * H + k[None, :]
    gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.range(0, H, BLOCK_K, num_stages=STAGES):
        left = k < H - start
        x_K = tl.load(x + token * stride_x + start + k, mask=left, other=0.0).to(tl.float32)
        mask = (n[:, None] < I) & left[None, :]
        gate += tl.load(w_at + start, mask=mask, other=0.0).to(tl.float32) * x_K[None, :]
        up += tl.load(w_at + I * H + start, mask=mask, other=0.0).to(tl.float32) * x_K[None, :]
    out = silu(tl.sum(gate, 1)) * tl.sum(up, 1)
    tl.store(h + pair.to(tl.int64) * I + n, out.to(h.dtype.element_ty), mask=n < I)


@triton.jit
def decode_down_kernel(
    h, w, ids, weights, residual, shared, out, num_valid, stride_w, stride_r, stride_s,
    H: tl.constexpr, I: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, RESIDUAL: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """One program is one token and BLOCK_N outputs; it visits the K experts in slot order, so combine is inside."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N,), tl.float32)
    STEPS: tl.constexpr = (I + BLOCK_K - 1) // BLOCK_K
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    steps = K * STEPS
    if num_valid is not None:
        steps = tl.where(token < tl.load(num_valid), steps, 0)
    for step in tl.range(0, steps, num_stages=STAGES):  # over slots and blocks: loads run ahead of slots
        j = step // STEPS
        start = (step % STEPS) * BLOCK_K
        pair = token * K + j
        expert = tl.load(ids + pair).to(tl.int64)
        left = k < I - start
        h_K = tl.load(h + pair * I + start + k, mask=left, other=0.0).to(tl.float32)
        w_at = w + expert * stride_w + n[:, None] * I + start + k[None, :]
        mask = (n[:, None] < H) & left[None, :]
        acc += tl.load(w_at, mask=mask, other=0.0).to(tl.float32) * (h_K * tl.load(weights + pair))[None, :]
    total += tl.sum(acc, 1)
    inside = n < H
    if SHARED:
        total += tl.load(shared + token * stride_s + n, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual + token * stride_r + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * H + n, total.to(out.dtype.element_ty), mask=inside)


# Which regime, which tiles


class DecodeTile(NamedTuple):
    """block_n outputs of one pair (up) or one token (down), block_k inputs at a time."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


class Plan(NamedTuple):
    """How one layer runs at a number of tokens. block_m 0: without a sort, and up and down are DecodeTiles."""

    block_m: int
    up: Tile | DecodeTile
    down: Tile | DecodeTile


INVARIANT = Plan(64, Tile(64, 64, 4, 4, group=4), Tile(128, 64, 4, 3, group=4))


WIDE = Plan(64, Tile(32, 32, 4, 2, group=4), Tile(64, 32, 4, 2, group=4))


def plan(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    width: int,
    invariant: bool = False,
    wide: bool = False,
) -> Plan:
    """The regime and its tiles, as `tinymoe bench tiles` ranked them on an H200. All depends on the bucket of num_tokens
    (a power of two), so a model compiles few kernels. wide: float32, whose tiles need twice the room."""
    if invariant:
        return WIDE if wide else INVARIANT
    bucket = triton.next_power_of_2(max(1, num_tokens))
    pairs = bucket * top_k
    rows = pairs / num_experts  # of an expert, on average
    if pairs <= 8 or (pairs <= 32 and rows <= 1):
        if hidden >= 4096:
            return Plan(0, DecodeTile(8, 512, 4, 3), DecodeTile(8, 512, 4, 3))
        return Plan(0, DecodeTile(16, 256, 4, 3), DecodeTile(*((8, 512) if bucket == 1 else (16, 256)), 4, 3))
    if wide:
        return WIDE
    if rows <= 8:
        return Plan(16, Tile(64, 128, 4, 3, swap=True), Tile(64, 128, 4, 4, swap=True))
    if rows <= 32:
        return INVARIANT
    # Copying rows into sorted order costs top_k * hidden a token, what it speeds up costs top_k * 3 * hidden * width.
    copy = top_k * hidden < 12 * width
    group = 16 if rows >= 2048 else 4
    up_tile = Tile(128, 64, 8, 4, group=group, tma=copy)
    return Plan(128, up_tile, Tile(256, 64, 8, 4 if rows < 768 else 3, group=4, tma=width >= 1024))


# The layer


def fused_moe(
    x_TH: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up_E2IH: torch.Tensor,
    down_EHI: torch.Tensor,
    top_k: int,
    *,
    residual_TH: torch.Tensor | None = None,
    shared_TH: torch.Tensor | None = None,
    selection_bias_E: torch.Tensor | None = None,
    num_valid: torch.Tensor | None = None,
    invariant: bool = False,
    use: Plan | None = None,
    **routing,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, H], logits [T, E], gate_up [E, 2I, H] (gate rows first), down [E, H, I] -> out [T, H], ids [T, K] int32,
    weights [T, K] float32. All but the routes and the logits share one dtype (float32, bfloat16 or float16); products are
    summed in float32. out = sum over the router's slots, + shared [T, H], + residual [T, H]. num_valid: one int32 on the device;
    rows from there on (the padding of a CUDA graph) visit no expert, whatever they hold: ids -1, weights 0, and out is
    shared + residual, or 0. routing: as for topk_softmax. use: another plan than `plan` chooses. Raises ValueError for
    shapes, dtypes and layouts that do not fit.
    """
    check_layer(x_TH, gate_up_E2IH, down_EHI, residual_TH, shared_TH, logits_TE)
    check_routing(logits_TE, top_k, selection_bias_E, num_valid)
    T, H = x_TH.shape
    E, I = gate_up_E2IH.shape[0], gate_up_E2IH.shape[1] // 2
    chosen = use or plan(T, E, top_k, H, I, invariant, x_TH.dtype is torch.float32)
    out_TH = torch.empty(T, H, dtype=x_TH.dtype, device=x_TH.device)
    h_PI = torch.empty(T * top_k, I, dtype=x_TH.dtype, device=x_TH.device)
    if not isinstance(chosen.up, DecodeTile):
        ids_TK, weights_TK = topk_softmax(
            logits_TE, top_k, selection_bias_E=selection_bias_E, num_valid=num_valid, **routing
        )
        grouped(
            x_TH, ids_TK, weights_TK, gate_up_E2IH, down_EHI, h_PI, out_TH, residual_TH, shared_TH, chosen
        )
        return out_TH, ids_TK, weights_TK
    ids_TK = torch.empty(T, top_k, dtype=torch.int32, device=x_TH.device)
    weights_TK = torch.empty(T, top_k, dtype=torch.float32, device=x_TH.device)
    if T:
        decode_up(
            x_TH, logits_TE, selection_bias_E, gate_up_E2IH, h_PI, ids_TK, weights_TK, num_valid, chosen.up,
            **routing,
        )  # fmt: skip
        decode_down(
            h_PI, ids_TK, weights_TK, down_EHI, out_TH, residual_TH, shared_TH, num_valid, chosen.down
        )
    else:
        route_constants(E, top_k, **routing)  # refuses what it would refuse for more tokens
    return out_TH, ids_TK, weights_TK


def decode_up(
    x_TH, logits_TE, selection_bias_E, gate_up_E2IH, h_PI, ids_TK, weights_TK, num_valid, tile: DecodeTile, **routing
) -> None:  # fmt: skip
    """Writes ids and weights [T, K], and h [T*K, I] in pair order; rows of h beyond num_valid stay as they are."""
    P, I = h_PI.shape
    E, K = gate_up_E2IH.shape[0], ids_TK.shape[1]
    bias = logits_TE if selection_bias_E is None else selection_bias_E
    decode_up_kernel[(P, triton.cdiv(I, tile.block_n))](
        x_TH, logits_TE, bias, gate_up_E2IH, h_PI, ids_TK, weights_TK, num_valid,
        x_TH.stride(0), logits_TE.stride(0), gate_up_E2IH.stride(0), H=x_TH.shape[1], I=I,
        **route_constants(E, K, biased=selection_bias_E is not None, **routing),
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, STAGES=tile.num_stages, num_warps=tile.num_warps,
    )  # fmt: skip


def decode_down(
    h_PI, ids_TK, weights_TK, down_EHI, out_TH, residual_TH, shared_TH, num_valid, tile: DecodeTile
) -> None:
    """Writes out [T, H] from h [T*K, I] in pair order."""
    T, H = out_TH.shape
    residual, shared = (out_TH if t is None else t for t in (residual_TH, shared_TH))
    decode_down_kernel[(T, triton.cdiv(H, tile.block_n))](
        h_PI, down_EHI, ids_TK, weights_TK, residual, shared, out_TH, num_valid,
        down_EHI.stride(0), residual.stride(0), shared.stride(0), H=H, I=h_PI.shape[1], K=ids_TK.shape[1],
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, STAGES=tile.num_stages,
        RESIDUAL=residual_TH is not None, SHARED=shared_TH is not None, num_warps=tile.num_warps,
    )  # fmt: skip


def grouped(
    x_TH, ids_TK, weights_TK, gate_up_E2IH, down_EHI, h_PI, out_TH, residual_TH, shared_TH, chosen: Plan
) -> None:
    """Sort, up, down, combine, for routes that are already known; ids outside 0..E-1 are served by nobody."""
    assert isinstance(chosen.up, Tile)
    assert isinstance(chosen.down, Tile)
    E = down_EHI.shape[0]
    s = sort_tokens(ids_TK, E, chosen.block_m)
    y_PH = torch.empty(h_PI.shape[0], out_TH.shape[1], dtype=out_TH.dtype, device=out_TH.device)
    up(x_TH, gate_up_E2IH, s, h_PI, ids_TK.shape[1], chosen.up)
    down(h_PI, down_EHI, weights_TK, s, y_PH, chosen.down)
    combine(y_PH, ids_TK, E, out_TH, residual_TH, shared_TH)


# python -m tinymoe.kernels.fused_moe


def loop(x_TH, ids_TK, weights_TK, gate_up_E2IH, down_EHI) -> torch.Tensor:
    """The layer token by token, expert by expert, in float64."""
    out_TH = torch.zeros(x_TH.shape, dtype=torch.float64, device=x_TH.device)
    for t, (ids, weights) in enumerate(zip(ids_TK.tolist(), weights_TK.double())):
        for expert, weight in zip(ids, weights):
            gate, up = (gate_up_E2IH[expert].double() @ x_TH[t].double()).chunk(2)
            out_TH[t] += weight * (down_EHI[expert].double() @ (gate * gate.sigmoid() * up))
    return out_TH


def main() -> None:
    """Check every regime against the loop, and time it where there is a GPU."""
    gpu = torch.cuda.is_available()
    if not gpu and not triton.knobs.runtime.interpret:
        raise SystemExit("no CUDA device here: set TRITON_INTERPRET=1 to check the kernels on the CPU")
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    E, K, H, I = (64, 8, 2048, 1024) if gpu else (5, 2, 32, 24)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    gate_up, down = draw(E, 2 * I, H, scale=H**-0.5), draw(E, H, I, scale=I**-0.5)
    small = {
        2: Plan(0, DecodeTile(4, 16, 4, 2), DecodeTile(4, 16, 4, 2)),
        5: Plan(16, Tile(16, 16, 4, 2, swap=True), Tile(16, 16, 4, 2, swap=True)),
        9: Plan(16, Tile(16, 16, 4, 2), Tile(16, 16, 4, 2)),
    }
    for tokens in (1, 16, 64, 256, 4096) if gpu else small:
        x, logits = draw(tokens, H), draw(tokens, E)
        use = None if gpu else small[tokens]
        out, ids, weights = fused_moe(x, logits, gate_up, down, K, use=use)
        few = slice(0, 8)
        wanted = loop(x[few], ids[few], weights[few], gate_up, down)
        error = ((out[few].double() - wanted).norm() / wanted.norm()).item()
        time = ""
        if gpu:
            ms = triton.testing.do_bench(lambda: fused_moe(x, logits, gate_up, down, K))  # noqa: B023
            time = f", {1e3 * ms:8.1f} us with launches from Python"
        shown = use or plan(tokens, E, K, H, I)
        print(
            f"{tokens:5} tokens, rows a tile {shown.block_m or 'none':>4}: relative error {error:.1e}{time}"
        )
        if not error < (1e-2 if gpu else 1e-5):
            raise SystemExit("the kernels are wrong")


if __name__ == "__main__":
    main()
