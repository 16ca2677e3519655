"""Put a step's keys and values at their slots in the pages. One program is one token.

Idea: slot = block * block_size + place in the block, so a token's G heads are a copy of G * H numbers each for keys and
values. A token with slot -1 (padding of a captured graph) is nobody's and is skipped. Offsets are 64 bit: a pool of a
few gigabytes has more than 2^31 numbers.

Reference: KVStorage.write in tinymoe.cache.storage.
"""

# A launch takes num_warps and num_stages, too.
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl

from tinymoe.kernels.checks import INTEGERS, check


@triton.jit
def store_kv_kernel(
    k, v, k_cache, v_cache, slots,
    K_STRIDE_T: tl.constexpr, K_STRIDE_G: tl.constexpr, V_STRIDE_T: tl.constexpr, V_STRIDE_G: tl.constexpr,
    PAGE: tl.constexpr, STRIDE_BLOCK: tl.constexpr, STRIDE_SLOT: tl.constexpr, STRIDE_G: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, H: tl.constexpr, HP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    g, h = tl.arange(0, GP)[:, None], tl.arange(0, HP)[None, :]
    real = (g < G) & (h < H)
    to = slot // PAGE * STRIDE_BLOCK + slot % PAGE * STRIDE_SLOT + g * STRIDE_G + h
    tl.store(
        k_cache + to, tl.load(k + token * K_STRIDE_T + g * K_STRIDE_G + h, mask=real, other=0.0), mask=real
    )
    tl.store(
        v_cache + to, tl.load(v + token * V_STRIDE_T + g * V_STRIDE_G + h, mask=real, other=0.0), mask=real
    )


def store_kv(
    k_TGH: torch.Tensor,
    v_TGH: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    """k, v [T, G, H] (views with strides, H contiguous) to slots [T] (int64 or int32) of caches [num_blocks, block_size,
    G, H].

    Slot -1 skips a token. Raises ValueError if shapes, dtypes or strides do not fit.
    """
    T, G, H = k_TGH.shape
    caches = k_cache.shape
    if v_TGH.shape != k_TGH.shape or caches[2:] != (G, H) or len(caches) != 4 or v_cache.shape != caches:
        raise ValueError(
            f"keys and values [T, G, H] must fit caches [num_blocks, block_size, G, H]; got {tuple(k_TGH.shape)}, "
            f"{tuple(v_TGH.shape)}, {tuple(k_cache.shape)}, {tuple(v_cache.shape)}"
        )
    if k_cache.stride() != v_cache.stride() or {t.stride(-1) for t in (k_TGH, v_TGH, k_cache)} != {1}:
        raise ValueError(
            "the caches must share their strides, and the head dim must be contiguous everywhere; got strides "
            f"{k_cache.stride()}, {v_cache.stride()}, keys {k_TGH.stride()} and values {v_TGH.stride()}"
        )
    dtypes = {t.dtype for t in (k_TGH, v_TGH, k_cache, v_cache)}
    if len(dtypes) > 1 or not k_TGH.dtype.is_floating_point:
        raise ValueError(f"keys, values and caches must share one floating dtype, got {dtypes}")
    check("slots", slots_T, (T,), INTEGERS)
    if T:
        GP, HP = triton.next_power_of_2(G), triton.next_power_of_2(H)
        store_kv_kernel[(T,)](
            k_TGH, v_TGH, k_cache, v_cache, slots_T,
            K_STRIDE_T=k_TGH.stride(0), K_STRIDE_G=k_TGH.stride(1), V_STRIDE_T=v_TGH.stride(0),
            V_STRIDE_G=v_TGH.stride(1), PAGE=k_cache.shape[1], STRIDE_BLOCK=k_cache.stride(0),
            STRIDE_SLOT=k_cache.stride(1), STRIDE_G=k_cache.stride(2), G=G, GP=GP, H=H, HP=HP,
            num_warps=1 if GP * HP <= 256 else 4,
        )  # fmt: skip
