"""From the rows of the qkv projection to attention: q/k norm, rotation, and (on request) the store into the pages.

Idea: a program takes a few heads of one token as a tile [heads, H]. Rotation pairs component i with i + R (the
checkpoints' layout), so the tile is read twice, once as it lies and once with the halves of each pair exchanged (that
second read comes from the cache), and written once. Components from 2R on pass through. A norm over each head needs the
tile only; a norm over all heads (OLMoE) takes all heads of q, or of k, as one tile. With a cache given, keys and
values go straight to their slots, and the projection's row is read just once for the whole step.

Reference: tinymoe.ops.rotary.rotate (RoFormer, arXiv 2104.09864).
"""

# A launch takes num_warps and num_stages, too.
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl

from tinymoe.kernels.checks import INTEGERS, check, check_number


@triton.jit
def clamp(x, CLIP: tl.constexpr):
    """x in -CLIP..CLIP; NaN stays NaN."""
    return tl.where(x > CLIP, CLIP, tl.where(x < -CLIP, -CLIP, x))


@triton.jit
def turn(
    row, to, STRIDE_TO: tl.constexpr, first, weight, cos, sin, eps,
    COUNT: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
    CLIP: tl.constexpr,
):  # fmt: skip
    """Norm, clip and rotation of heads first..first+HEADS-1 out of COUNT at `row` [COUNT, H], to `to`."""
    head, h = (first + tl.arange(0, HEADS))[:, None], tl.arange(0, HP)[None, :]
    pair = tl.where(h < R, h + R, tl.where(h < 2 * R, h - R, h))
    real = (head < COUNT) & (h < H)
    raw = tl.load(row + head * H + h, mask=real, other=0.0)
    dtype = raw.dtype
    x = raw.to(tl.float32)
    other = tl.load(row + head * H + pair, mask=real, other=0.0).to(tl.float32)
    if NORM > 0:
        squares = tl.sum(x * x, 1)[:, None]
        if NORM == 2:
            scale = tl.rsqrt(tl.sum(squares, 0)[None, :] / (COUNT * H) + eps)
            weight += head * H
        else:
            scale = tl.rsqrt(squares / H + eps)
            weight += head * 0
        w, w_pair = tl.load(weight + h, mask=real, other=0.0), tl.load(weight + pair, mask=real, other=0.0)
        # Rounded before the weight and after it, as the reference rounds narrow types.
        x = ((x * scale).to(dtype).to(tl.float32) * w.to(tl.float32)).to(dtype).to(tl.float32)
        other = ((other * scale).to(dtype).to(tl.float32) * w_pair.to(tl.float32)).to(dtype).to(tl.float32)
    if CLIP is not None:
        x, other = clamp(x, CLIP).to(dtype).to(tl.float32), clamp(other, CLIP).to(dtype).to(tl.float32)
    turning = h < 2 * R
    angle = tl.where(h < R, h, h - R)
    c = tl.load(cos + angle, mask=turning, other=1.0).to(dtype).to(tl.float32)
    s = tl.load(sin + angle, mask=turning, other=0.0).to(dtype).to(tl.float32)
    s = tl.where(h < R, -s, s)
    tl.store(to + head * STRIDE_TO + h, (x * c + other * s).to(dtype), mask=real)


@triton.jit
def rope_kernel(
    qkv, q_weight, k_weight, cos, sin, q_out, k_out, v_out, slots, eps,
    STRIDE_T: tl.constexpr, COS_STRIDE: tl.constexpr, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr,
    HP: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr, STORE: tl.constexpr,
    PAGE: tl.constexpr, STRIDE_BLOCK: tl.constexpr, STRIDE_SLOT: tl.constexpr, STRIDE_G: tl.constexpr,
    CLIP: tl.constexpr,
):  # fmt: skip
    """Grid (T, tiles): tiles of HEADS heads of q, then of k, then (STORE) of v. NORM: 0 none, 1 each head, 2 all."""
    Q_TILES: tl.constexpr = (N + HEADS - 1) // HEADS
    K_TILES: tl.constexpr = (G + HEADS - 1) // HEADS
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = qkv + token * STRIDE_T
    cos += token * COS_STRIDE
    sin += token * COS_STRIDE
    if tile < Q_TILES:
        turn(
            row,
            q_out + token * (N * H),
            H,
            tile * HEADS,
            q_weight,
            cos,
            sin,
            eps,
            N,
            H,
            HP,
            R,
            HEADS,
            NORM,
            CLIP,
        )
        return
    slot, at = token, token * STRIDE_BLOCK  # without pages, a token is its own slot
    if STORE:
        slot = tl.load(slots + token).to(tl.int64)
        at = slot // PAGE * STRIDE_BLOCK + slot % PAGE * STRIDE_SLOT
    if slot < 0:
        return
    first = (tile - Q_TILES) * HEADS
    if tile < Q_TILES + K_TILES:
        turn(
            row + N * H, k_out + at, STRIDE_G, first, k_weight, cos, sin, eps, G, H, HP, R, HEADS, NORM, CLIP
        )
    else:
        head, h = (first - K_TILES * HEADS + tl.arange(0, HEADS))[:, None], tl.arange(0, HP)[None, :]
        real = (head < G) & (h < H)
        v = tl.load(row + (N + G) * H + head * H + h, mask=real, other=0.0)
        if CLIP is not None:
            v = clamp(v.to(tl.float32), CLIP).to(v.dtype)
        tl.store(v_out + at + head * STRIDE_G + h, v, mask=real)


def rope(
    qkv: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    heads: tuple[int, int, int],
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    clip: float | None = None,
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """qkv [T, (N + 2G) * H], cos and sin [T, R], heads (N, G, H) -> q [T, N, H] and k [T, G, H], normed and rotated.

    q_weight and k_weight: norm over each head ([H] both) or over all heads together ([N * H] and [G * H]).
    clip: after the norm, clamp to -clip..clip (OLMoE); values only where they are stored.
    cache: k_cache and v_cache [num_blocks, block_size, G, H] and slots [T] int64 or int32; then keys and values
    go to their slots (-1: nowhere), and k is None. Raises ValueError for shapes, dtypes and layouts that do not fit, and
    for a clip that is not above 0.
    """
    N, G, H = heads
    for name, count in zip(("N", "G", "H"), heads):
        check_number(f"heads' {name}", count)
    check("qkv", qkv, ("T", (N + 2 * G) * H), layout="rows")
    T = qkv.shape[0]
    check("cos", cos_TR, (T, "R"))
    R = cos_TR.shape[1]
    check("sin", sin_TR, (T, R))
    if not 2 <= 2 * R <= H:
        raise ValueError(f"cos and sin must be [{T}, R] with 2 <= 2 R <= {H}, got {tuple(cos_TR.shape)}")
    shapes = [None if w is None else tuple(w.shape) for w in (q_weight, k_weight)]
    norms = [[None, None], [(H,), (H,)], [(N * H,), (G * H,)]]
    if shapes not in norms:
        raise ValueError(
            f"norm weights must be [{H}] both, or [{N * H}] and [{G * H}], or None; got {shapes}"
        )
    for name, w in (("q_weight", q_weight), ("k_weight", k_weight)):
        if w is not None:
            check(name, w, tuple(w.shape))
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be above 0, or None, got {clip}")
    if cache is not None:
        k_cache, v_cache, slots = cache
        check("k_cache", k_cache, ("num_blocks", "block_size", G, H), layout="rows")
        check("v_cache", v_cache, tuple(k_cache.shape), (k_cache.dtype,), "rows")
        if v_cache.stride() != k_cache.stride():
            raise ValueError(
                f"caches must have the same strides, got {k_cache.stride()} and {v_cache.stride()}"
            )
        check("slots", slots, (T,), INTEGERS)
    q_TNH = torch.empty(T, N, H, dtype=qkv.dtype, device=qkv.device)
    k_TGH, k_to, v_to, slots, pages = None, q_TNH, q_TNH, q_TNH, (1, G * H, G * H, H)
    if cache is None:
        k_to = k_TGH = torch.empty(T, G, H, dtype=qkv.dtype, device=qkv.device)
    else:
        k_to, v_to, slots = cache
        pages = (k_to.shape[1], *k_to.stride()[:3])
    if T:
        norm = norms.index(shapes)
        all_heads = norm == 2 and shapes[0] != (H,)
        HEADS, HP = triton.next_power_of_2(N if all_heads else min(N, 8)), triton.next_power_of_2(H)
        tiles = triton.cdiv(N, HEADS) + triton.cdiv(G, HEADS) * (1 if cache is None else 2)
        rope_kernel[(T, tiles)](
            qkv, qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight, cos_TR, sin_TR,
            q_TNH, k_to, v_to, slots, float(eps), STRIDE_T=qkv.stride(0), COS_STRIDE=R, N=N, G=G, H=H, HP=HP, R=R,
            HEADS=HEADS, NORM=norm, STORE=cache is not None, PAGE=pages[0], STRIDE_BLOCK=pages[1],
            STRIDE_SLOT=pages[2], STRIDE_G=pages[3], CLIP=clip and float(clip), num_warps=min(max(HEADS * HP // 512, 1), 8),
        )  # fmt: skip
    return q_TNH, k_TGH
