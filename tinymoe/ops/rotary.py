"""From the rows of the qkv projection to attention on any device, in torch. The kernel rope takes this place on a GPU.

Norms and clip are OLMoE's (arXiv 2409.02060) and Qwen3's (arXiv 2505.09388), the rotation RoFormer's (arXiv 2104.09864).
"""

from typing import Any

import torch
from torch import Tensor

from tinymoe.ops.reference import rms_norm


def rope(x_TNH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate the first 2R of H components: pairs (i, i + R), as Hugging Face checkpoints expect."""
    cos_T1P, sin_T1P = (torch.cat(pair, dim=-1)[:, None] for pair in ((cos_TR, cos_TR), (-sin_TR, sin_TR)))
    return rope_pairs(x_TNH, cos_T1P, sin_T1P)


def rope_pairs(x_TNH: Tensor, cos_T1P: Tensor, sin_T1P: Tensor) -> Tensor:
    """rope with cos and sin for both components of each pair, P = 2R, the first half of sin negated: in few calls."""
    P, H = cos_T1P.shape[-1], x_TNH.shape[-1]
    x_TNP = x_TNH if P == H else x_TNH[..., :P]
    y_TNP = x_TNP * cos_T1P.type_as(x_TNH)
    y_TNP = torch.addcmul(y_TNP, x_TNP.roll(P // 2, -1), sin_T1P.type_as(x_TNH))
    return y_TNP if P == H else torch.cat((y_TNP, x_TNH[..., P:]), dim=-1)


def rotate(
    qkv: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    heads: tuple[int, int, int],
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    clip: float | None = None,
    cache: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Any]:
    """The rows of the qkv projection [T, (N + 2G) * H], heads (N, G, H) -> q [T, N, H] and k [T, G, H]: normed (over each
    head, if both weights are [H], or over all heads of q and of k, [N * H] and [G * H]), clamped to -clip..clip, and
    rotated by cos and sin [T, R], or [T, 1, 2R] as rope_pairs takes them.

    cache: k_cache and v_cache [num_blocks, block_size, G, H] and slots [T]; then keys and values (clamped, too) go to
    their slots, -1 to none, and k is None. Without it, values are the caller's to clamp.
    """
    (N, G, H), T = heads, qkv.shape[0]
    qk_TMH = qkv.view(T, N + 2 * G, H).narrow(
        1, 0, N + G
    )  # one norm and one rotation for both: half the launches
    if q_weight is not None and k_weight is not None:
        if q_weight.shape == k_weight.shape == (H,):
            qk_TMH = rms_norm(qk_TMH, None, eps)
            qk_TMH.narrow(1, 0, N).mul_(q_weight)
            qk_TMH.narrow(1, N, G).mul_(k_weight)
        else:
            q, k = qkv[:, : (N + G) * H].split((N * H, G * H), dim=1)
            qk_TMH = torch.cat((rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)), 1).view(T, N + G, H)
    if clip is not None:
        qk_TMH = qk_TMH.clamp(-clip, clip)
    turned_TMH = (rope if cos_TR.dim() == 2 else rope_pairs)(qk_TMH, cos_TR, sin_TR)
    q_TNH, k_TGH = turned_TMH.split_with_sizes((N, G), dim=1)
    if cache is None:
        return q_TNH, k_TGH
    v_TGH = qkv.view(T, N + 2 * G, H)[:, N + G :]
    *pages, slots_T = cache
    kept = (slots_T >= 0).nonzero()[:, 0]
    for page, rows in zip(pages, (k_TGH, v_TGH if clip is None else v_TGH.clamp(-clip, clip))):
        page.view(-1, G, H).index_copy_(0, slots_T[kept].long(), rows[kept])
    return q_TNH, None
