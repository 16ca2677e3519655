"""Attention over pages, any query length: decode, verification and prompt chunks in one flat batch.

Idea: one program takes a few query tokens of one sequence and all query heads that share one key/value head, as the
rows of one tile: keys and values are read once for all of them. It walks over the visible positions in tiles, looks up
each position's block, and keeps a running softmax: the largest score m, the sum l and the weighted values acc
(FlashAttention, arXiv 2205.14135). A decode has only a few rows but a long context, so its positions are cut into
splits of fixed size that run side by side; each leaves its (m, l, acc), and a second kernel merges them in order
(FlashDecoding; row packing as in arXiv 2511.11581). Long chunks have rows enough and do without splits.
Tiles and splits start at multiples of their size, never at a sequence's own length. What a row may not see counts as
-1e30, adds 0 and leaves its bits alone: a row does not depend on its neighbours. Slots that no row may see are not
even loaded, for 0 · NaN is NaN. With `invariant`, one tile serves every query length, and a chunk merges the same
splits in registers with the same arithmetic (explicit fma), so a row's bits do not depend on the query length either.

Reference: tinymoe.ops.paged_attention.
"""

# A launch takes num_warps and num_stages, too.
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl

from tinymoe.kernels.attention_tiles import (
    CHUNK_PROGRAMS,
    CHUNK_SPLITS,
    INVARIANT_SPLIT,
    SHORT_PROGRAMS,
    SHORT_SPLITS,
    SHORT_WINDOW,
    WHOLE,
    Tile,
    ceil_div,
    chunk_tile,
    invariant_tile,
    short_tile,
    split_for,
)  # fmt: skip
from tinymoe.kernels.checks import check, check_number

HEAD_DIMS = (32, 64, 128)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NOTHING = tl.constexpr(-1e30)  # a score that weighs nothing; finite, so that differences are never NaN
LOG2E = 1.4426950408889634


@triton.jit
def visit(
    q, m, l, acc, start, lo, hi, position, window, k_cache, v_cache, table,
    PAGE: tl.constexpr, STRIDE_BLOCK: tl.constexpr, STRIDE_SLOT: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr,
    SCALE: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take positions start..start+TILE-1 into the running softmax. Without MASKED, every row sees all of them."""
    n = start + tl.arange(0, TILE)
    h = tl.arange(0, H)
    if MASKED:
        inside = (n >= lo) & (n < hi)
        block = tl.load(table + n // PAGE, mask=inside, other=0).to(tl.int64)
    else:
        block = tl.load(table + n // PAGE).to(tl.int64)
    at = (block * STRIDE_BLOCK + (n % PAGE) * STRIDE_SLOT)[:, None] + h[None, :]
    if MASKED:
        k = tl.load(k_cache + at, mask=inside[:, None], other=0.0)
    else:
        k = tl.load(k_cache + at)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        visible = inside[None, :] & (n[None, :] <= position[:, None])
        if WINDOWED:
            visible = visible & (n[None, :] > position[:, None] - window)
        s = tl.where(visible, s, NOTHING)
    top = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(tl.fma(s, SCALE, (top * -SCALE)[:, None]))
    if MASKED:
        p = tl.where(visible, p, 0.0)  # a row that sees nothing yet has top = NOTHING, and p is anything
    shrink = tl.exp2((m - top) * SCALE)
    l = tl.fma(l, shrink, tl.sum(p, 1))
    if MASKED:
        v = tl.load(v_cache + at, mask=inside[:, None], other=0.0)
    else:
        v = tl.load(v_cache + at)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return top, l, acc


@triton.jit
def add_split(top_all, l_all, acc_all, m, l, acc, SCALE: tl.constexpr):
    """Take one split into the result so far. Written once, with explicit fma: wherever it runs, the bits are the same."""
    top = tl.maximum(top_all, m)
    a, b = tl.exp2((top_all - top) * SCALE), tl.exp2((m - top) * SCALE)
    return top, tl.fma(l_all, a, l * b), tl.fma(acc_all, a[:, None], acc * b[:, None])


@triton.jit(
    do_not_specialize=[
        "block_tables", "query_start", "context_lens", "table_stride", "split_size", "num_splits", "num_tiles",
        "min_query", "max_query", "window",
    ]
)  # fmt: skip
def attention_kernel(
    q, k_cache, v_cache, block_tables, query_start, context_lens, out, part_acc, part_ml,
    table_stride, split_size, num_splits, num_tiles, min_query, max_query, window,
    Q_STRIDE_T: tl.constexpr, Q_STRIDE_N: tl.constexpr, OUT_STRIDE_T: tl.constexpr, OUT_STRIDE_N: tl.constexpr,
    PAGE: tl.constexpr, STRIDE_BLOCK: tl.constexpr, STRIDE_SLOT: tl.constexpr, STRIDE_G: tl.constexpr,
    GROUP: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, SCALE: tl.constexpr,
    TWO_PHASES: tl.constexpr, WINDOWED: tl.constexpr, SPLIT: tl.constexpr, IN_ORDER: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (G, num_tiles * num_splits, S): one key/value head, one tile of query tokens and one split of a sequence.

    SPLIT: leave (m, l, acc) for merge_kernel; otherwise write `out`. IN_ORDER: walk over all splits, one by one.
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    g, sequence = tl.program_id(0), tl.program_id(2)
    tile = num_tiles - 1 - tl.program_id(1) // num_splits  # the last tokens see most: start with them
    split = tl.program_id(1) % num_splits
    first_row = tl.load(query_start + sequence)
    queries = tl.load(query_start + sequence + 1) - first_row
    context = tl.load(context_lens + sequence)
    if (queries < min_query) | (queries > max_query) | (tile * TOKENS >= queries) | (context <= 0):
        return
    first = context - queries + tile * TOKENS  # the position of this tile's first token
    hi = tl.minimum(first + TOKENS, context)
    lo = 0
    if WINDOWED:
        lo = tl.maximum(first + 1 - window, 0)
    if SPLIT:
        number = lo // split_size + split  # counted from the first split that this tile sees
        lo = tl.maximum(lo, number * split_size)
        hi = tl.minimum(hi, (number + 1) * split_size)
        if lo >= hi:
            return

    r = tl.arange(0, ROWS)
    h = tl.arange(0, H)
    token, head = r // GROUP, g * GROUP + r % GROUP
    position = first + token
    live = (r < TOKENS * GROUP) & (tile * TOKENS + token < queries)
    row = (first_row + tile * TOKENS + token).to(tl.int64)
    q_at = row * Q_STRIDE_T + head * Q_STRIDE_N
    q_RH = tl.load(q + q_at[:, None] + h[None, :], mask=live[:, None], other=0.0)
    table = block_tables + sequence.to(tl.int64) * table_stride
    k_cache += g.to(tl.int64) * STRIDE_G
    v_cache += g.to(tl.int64) * STRIDE_G

    top_all = tl.full((ROWS,), NOTHING, tl.float32)
    l_all = tl.zeros((ROWS,), tl.float32)
    acc_all = tl.zeros((ROWS, H), tl.float32)
    if IN_ORDER:
        for number in range(lo // split_size, tl.cdiv(hi, split_size)):
            m, l, acc = walk(
                q_RH, tl.maximum(lo, number * split_size), tl.minimum(hi, (number + 1) * split_size), first, position,
                window, k_cache, v_cache, table, PAGE, STRIDE_BLOCK, STRIDE_SLOT, H, ROWS, TILE, SCALE, TWO_PHASES,
                WINDOWED, PRECISION,
            )  # fmt: skip
            top_all, l_all, acc_all = add_split(top_all, l_all, acc_all, m, l, acc, SCALE)
    else:
        top_all, l_all, acc_all = walk(
            q_RH, lo, hi, first, position, window, k_cache, v_cache, table, PAGE, STRIDE_BLOCK, STRIDE_SLOT, H, ROWS,
            TILE, SCALE, TWO_PHASES, WINDOWED, PRECISION,
        )  # fmt: skip

    if SPLIT:
        part = ((sequence.to(tl.int64) * num_tiles + tile) * tl.num_programs(0) + g) * num_splits + split
        tl.store(part_acc + ((part * ROWS + r) * H)[:, None] + h[None, :], acc_all, mask=live[:, None])
        tl.store(part_ml + part * 2 * ROWS + r, top_all, mask=live)
        tl.store(part_ml + (part * 2 + 1) * ROWS + r, l_all, mask=live)
    else:
        o = acc_all / tl.where(l_all > 0.0, l_all, 1.0)[:, None]
        out_at = row * OUT_STRIDE_T + head * OUT_STRIDE_N
        tl.store(out + out_at[:, None] + h[None, :], o.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def walk(
    q, lo, hi, first, position, window, k_cache, v_cache, table,
    PAGE: tl.constexpr, STRIDE_BLOCK: tl.constexpr, STRIDE_SLOT: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, SCALE: tl.constexpr, TWO_PHASES: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(m, l, acc) over positions lo..hi-1, tile by tile; lo's tile is taken from its start."""
    m = tl.full((ROWS,), NOTHING, tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, H), tl.float32)
    start = lo // TILE * TILE
    if TWO_PHASES:  # what every row sees needs no mask
        end = tl.maximum(tl.minimum(hi, first + 1) // TILE * TILE, start)
        for at in range(start, end, TILE):
            m, l, acc = visit(
                q, m, l, acc, at, lo, hi, position, window, k_cache, v_cache, table, PAGE, STRIDE_BLOCK, STRIDE_SLOT,
                H, TILE, SCALE, False, WINDOWED, PRECISION,
            )  # fmt: skip
        start = end
    for at in range(start, hi, TILE):
        m, l, acc = visit(
            q, m, l, acc, at, lo, hi, position, window, k_cache, v_cache, table, PAGE, STRIDE_BLOCK, STRIDE_SLOT,
            H, TILE, SCALE, True, WINDOWED, PRECISION,
        )  # fmt: skip
    return m, l, acc


@triton.jit(
    do_not_specialize=[
        "query_start", "context_lens", "split_size", "num_splits", "num_tiles", "min_query", "max_query", "window",
    ]
)  # fmt: skip
def merge_kernel(
    part_acc, part_ml, query_start, context_lens, out,
    split_size, num_splits, num_tiles, min_query, max_query, window,
    OUT_STRIDE_T: tl.constexpr, OUT_STRIDE_N: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr,
    SCALE: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Grid (N, query tokens, S): one row of out from its splits, first to last."""
    TOKENS: tl.constexpr = ROWS // GROUP
    head, token, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = tl.load(query_start + sequence)
    queries = tl.load(query_start + sequence + 1) - first_row
    context = tl.load(context_lens + sequence)
    if (queries < min_query) | (queries > max_query) | (token >= queries) | (context <= 0):
        return
    position = context - queries + token
    lo, tile_lo = 0, 0
    if WINDOWED:
        lo = tl.maximum(position + 1 - window, 0)
        tile_lo = tl.maximum(position - token % TOKENS + 1 - window, 0)
    h = tl.arange(0, H)[None, :]
    r = token % TOKENS * GROUP + head % GROUP + tl.arange(0, 1)
    groups = tl.num_programs(0) // GROUP
    part = ((sequence.to(tl.int64) * num_tiles + token // TOKENS) * groups + head // GROUP) * num_splits
    part -= tile_lo // split_size
    top, l = tl.full((1,), NOTHING, tl.float32), tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, H), tl.float32)
    for split in tl.range(lo // split_size, position // split_size + 1, loop_unroll_factor=8):
        m_split = tl.load(part_ml + (part + split) * 2 * ROWS + r)
        l_split = tl.load(part_ml + ((part + split) * 2 + 1) * ROWS + r)
        acc_split = tl.load(part_acc + (((part + split) * ROWS + r) * H)[:, None] + h)
        top, l, acc = add_split(top, l, acc, m_split, l_split, acc_split, SCALE)
    at = (first_row + token).to(tl.int64) * OUT_STRIDE_T + head * OUT_STRIDE_N
    tl.store(out + at + h, (acc / tl.where(l > 0.0, l, 1.0)[:, None]).to(out.dtype.element_ty))


def launch_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    tile: Tile,
    queries: tuple[int, int],
    max_context: int,
    split: int,
    window: int | None,
    in_order: bool = False,
    two_phases: bool = False,
) -> None:
    """Attend for the sequences whose number of query tokens lies in `queries`, in splits of `split` positions."""
    (_, N, H), (_, page, G, _), S = q.shape, k_cache.shape, len(context_lens)
    group = N // G
    num_tiles = ceil_div(queries[1], tile.rows // group)
    num_splits = ceil_div(max_context, split)
    if window is not None:
        num_splits = min(num_splits, ceil_div(window + tile.rows // group - 1, split) + 1)
    if in_order:
        num_splits = 1
    parts = num_splits > 1
    part_acc = part_ml = out
    if parts:
        programs = S * num_tiles * G * num_splits
        part_acc = torch.empty(programs, tile.rows, H, dtype=torch.float32, device=q.device)
        part_ml = torch.empty(programs, 2, tile.rows, dtype=torch.float32, device=q.device)
    numbers = (split, num_splits, num_tiles, *queries, window or 0)
    shared = {
        "OUT_STRIDE_T": out.stride(0), "OUT_STRIDE_N": out.stride(1), "GROUP": group, "H": H, "ROWS": tile.rows,
        "SCALE": H**-0.5 * LOG2E, "WINDOWED": window is not None,
    }  # fmt: skip
    attention_kernel[(G, num_tiles * num_splits, S)](
        q, k_cache, v_cache, block_tables, query_start, context_lens, out, part_acc, part_ml, block_tables.stride(0),
        *numbers, Q_STRIDE_T=q.stride(0), Q_STRIDE_N=q.stride(1), PAGE=page, STRIDE_BLOCK=k_cache.stride(0),
        STRIDE_SLOT=k_cache.stride(1), STRIDE_G=k_cache.stride(2), TILE=tile.positions,
        TWO_PHASES=two_phases and window is None, SPLIT=parts, IN_ORDER=in_order,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=tile.warps, num_stages=tile.stages, **shared,
    )  # fmt: skip
    if parts:
        merge_kernel[(N, queries[1], S)](
            part_acc, part_ml, query_start, context_lens, out, *numbers, **shared, num_warps=1
        )


def paged_attention(
    q_TNH: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables_SB: torch.Tensor,
    query_start: torch.Tensor,
    context_lens_S: torch.Tensor,
    *,
    max_query_len: int,
    max_context: int,
    min_query_len: int = 1,
    window: int | None = None,
    invariant: bool = False,
    split: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of sequence s's last query_start[s+1] - query_start[s] positions over all context_lens[s] of them.

    q [T, N, H], caches [num_blocks, block_size, G, H] alike in strides, float16, bfloat16 or float32; block_tables
    [S, B], query_start [S + 1] and context_lens [S] int32. The step's own keys and values are in the cache already.
    No sequence may have more than max_query_len queries or max_context positions; the grid is made from these bounds,
    so a captured graph serves every batch within them. min_query_len > 1 may spare a launch. Rows of a sequence
    with context 0, and rows of no sequence, stay as they are. Returns out [T, N, H].
    split: positions of one split (a multiple of 128), if not the one chosen from the bounds.
    Raises ValueError for a head dim, dtype or layout that is not supported.
    """
    if q_TNH.dim() != 3:
        raise ValueError(f"queries must be [T, N, H], got {list(q_TNH.shape)}")
    T, N, H = q_TNH.shape
    if k_cache.dim() != 4 or v_cache.shape != k_cache.shape or not k_cache.shape[2]:
        raise ValueError(
            f"caches must be alike [num_blocks, block_size, G, H], got {list(k_cache.shape)}, {list(v_cache.shape)}"
        )
    G, group = k_cache.shape[2], N // k_cache.shape[2]
    if H not in HEAD_DIMS or k_cache.shape[3] != H:
        raise ValueError(
            f"paged attention supports head dims {HEAD_DIMS}, the same in queries and cache; got {H} and {k_cache.shape[3]}"
        )
    if q_TNH.dtype not in DTYPES or k_cache.dtype != q_TNH.dtype or v_cache.dtype != q_TNH.dtype:
        raise ValueError(
            f"queries and both caches must share float16, bfloat16 or float32; got {q_TNH.dtype}, {k_cache.dtype}, {v_cache.dtype}"
        )
    if N % G:
        raise ValueError(f"the number of query heads must be a multiple of key/value heads, got {N} and {G}")
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1 or q_TNH.stride(2) != 1:
        raise ValueError(
            "the caches must share their strides, and the head dim must be contiguous everywhere; got strides "
            f"{k_cache.stride()}, {v_cache.stride()}, and queries {q_TNH.stride()}"
        )
    if split is not None and (split < 128 or split % 128):
        raise ValueError(f"split must be a multiple of 128 positions, got {split}")
    if window is not None:
        check_number("window", window)
    check("context_lens", context_lens_S, ("S",), (torch.int32,))
    S = len(context_lens_S)
    check("query_start", query_start, (S + 1,), (torch.int32,))
    check("block_tables", block_tables_SB, (S, "B"), (torch.int32,), "rows")
    if out is None:
        out = torch.empty(T, N, H, dtype=q_TNH.dtype, device=q_TNH.device)
    check("out", out, (T, N, H), (q_TNH.dtype,), "rows")
    if T == 0 or S == 0 or max_query_len == 0:
        return out
    wide = q_TNH.dtype == torch.float32
    tensors = (q_TNH, k_cache, v_cache, block_tables_SB, query_start, context_lens_S, out)
    if invariant:
        tile = invariant_tile(H, group, wide)
    else:
        rows = max_query_len * group
        tile = short_tile(H, group, rows if rows <= 64 else 16, wide)
    short = min(tile.rows // group, max_query_len)  # longer sequences are chunks
    if min_query_len <= short:
        size = split or INVARIANT_SPLIT
        if not invariant and split is None:
            seen = max_context if window is None else min(max_context, window)
            size = split_for(S * G, seen, SHORT_SPLITS, SHORT_PROGRAMS, SHORT_SPLITS[-1])
            if window is not None and seen <= SHORT_WINDOW:
                size = WHOLE
        launch_attention(
            *tensors, tile=tile, queries=(1, short), max_context=max_context, split=size, window=window
        )
    if max_query_len > short:
        if invariant:
            size = split or INVARIANT_SPLIT
        else:
            tile = chunk_tile(H, group, wide)
            programs = S * G * ceil_div(max_query_len, tile.rows // group)
            size = split or split_for(programs, max_context, CHUNK_SPLITS, CHUNK_PROGRAMS, WHOLE)
        launch_attention(
            *tensors, tile=tile, queries=(short + 1, max_query_len), max_context=max_context, split=size,
            window=window, in_order=invariant, two_phases=not invariant,
        )  # fmt: skip
    return out
