"""Ways to run the chosen experts: same result, different cost. Every path takes rows already sorted by expert.

rows [P, D]; counts [E] int64, rows of each expert; gate_up [E, 2F, D] (gate rows first); down [E, D, F]; -> [P, D].
An expert is a gated MLP: down(act(gate(x)) · up(x)) (Shazeer 2020, arXiv 2002.05202).
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def expert_mlp(x_TD: Tensor, gate_up_2FD: Tensor, down_DF: Tensor, act: Activation) -> Tensor:
    """One expert on its rows."""
    gate_TF, up_TF = F.linear(x_TD, gate_up_2FD).chunk(2, dim=-1)
    return F.linear(act(gate_TF) * up_TF, down_DF)


def loop(
    rows_PD: Tensor, counts_E: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, act: Activation
) -> Tensor:
    """One small matmul pair per activated expert. Experts without rows are never read."""
    parts, start = [], 0
    for expert, count in enumerate(counts_E.tolist()):
        if count:
            parts.append(
                expert_mlp(rows_PD[start : start + count], gate_up_E2FD[expert], down_EDF[expert], act)
            )
            start += count
    return torch.cat(parts) if parts else rows_PD.clone()


def padded(
    rows_PD: Tensor, counts_E: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, act: Activation
) -> Tensor:
    """Every activated expert gets as many rows as the busiest, the rest zeros: one batched matmul pair for all.

    The shape of GShard's dispatch (Lepikhin et al. 2020, arXiv 2006.16668), with room for every row. Experts without
    rows are never read: each unbroken run of activated experts is a batch of its own.
    """
    sizes_E = np.array(counts_E.tolist())
    active_A = np.flatnonzero(sizes_E)
    if not len(active_A):
        return rows_PD.clone()
    sizes_A = sizes_E[active_A]
    most, A = sizes_A.max(), len(active_A)
    first_A = np.arange(A) * most - (sizes_A.cumsum() - sizes_A)
    slot_P = torch.from_numpy(np.arange(rows_PD.shape[0]) + first_A.repeat(sizes_A)).to(rows_PD.device)
    x_ACD = rows_PD.new_zeros(A * most, rows_PD.shape[1]).index_copy(0, slot_P, rows_PD).view(A, most, -1)
    parts = []
    for run in np.split(np.arange(A), np.flatnonzero(np.diff(active_A) > 1) + 1):
        low, high = active_A[run[0]], active_A[run[-1]] + 1
        x_RCD = x_ACD[run[0] : run[-1] + 1]
        gate_RCF, up_RCF = torch.bmm(x_RCD, gate_up_E2FD[low:high].transpose(1, 2)).chunk(2, dim=-1)
        parts.append(torch.bmm(act(gate_RCF) * up_RCF, down_EDF[low:high].transpose(1, 2)))
    y_ACD = parts[0] if len(parts) == 1 else torch.cat(parts)
    return y_ACD.flatten(0, 1).index_select(0, slot_P)


def choose(sizes: Sequence[int]) -> str:
    """The faster of "loop" and "padded" on a CPU, for experts with so many rows.

    Few rows are bound by reading weights, so padding costs little there; many rows are bound by arithmetic.
    """
    rows, most = sum(sizes), max(sizes)
    room = most * sum(size > 0 for size in sizes)
    return "padded" if rows >= 16 and most <= 128 and room <= rows * (4 if most <= 16 else 1.5) else "loop"


def adaptive(
    rows_PD: Tensor, counts_E: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, act: Activation
) -> Tensor:
    """The path that `choose` names."""
    return run(choose(counts_E.tolist()), rows_PD, counts_E, gate_up_E2FD, down_EDF, act)


def lone(
    x_1D: Tensor,
    ids_1K: Tensor,
    weights_1K: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    act: Activation,
) -> Tensor:
    """One token needs no sorting: its K experts one after another, summed in float32 in the router's order -> [1, D]."""
    y_1D = None
    for expert, weight in zip(ids_1K[0].tolist(), weights_1K[0].unbind()):
        part_1D = expert_mlp(x_1D, gate_up_E2FD[expert], down_EDF[expert], act).float() * weight
        y_1D = part_1D if y_1D is None else y_1D.add_(part_1D)
    assert y_1D is not None  # K >= 1
    return y_1D.to(x_1D.dtype)


FEW = 16  # pairs of token and expert; from there on `choose` may want "padded"


def few(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    act: Activation,
) -> Tensor:
    """Dispatch, "loop" and combine for a few tokens -> [T, D], with as few calls as that takes: on a CPU these calls, not
    the products, are what a verification of some drafts costs. Not differentiable.

    Per expert two products, into their places; everything else once for all pairs. Sums are those of the dispatcher:
    float32, over the router's slots in their order.
    """
    (T, K), F2 = ids_TK.shape, gate_up_E2FD.shape[1]
    chosen_P = ids_TK.reshape(-1).tolist()
    order_P = sorted(range(T * K), key=chosen_P.__getitem__)  # stable
    experts = sorted(set(chosen_P))
    sizes = [chosen_P.count(expert) for expert in experts]
    order, token = torch.tensor([order_P, [p // K for p in order_P]], device=x_TD.device).unbind()
    rows_PD = x_TD.index_select(0, token)
    h_P2F, y_PD = rows_PD.new_empty(T * K, F2), torch.empty_like(rows_PD)
    gate_up_ED2F, down_EFD = gate_up_E2FD.transpose(1, 2), down_EDF.transpose(1, 2)
    for expert, x_D, h_2F in zip(experts, rows_PD.split_with_sizes(sizes), h_P2F.split_with_sizes(sizes)):
        torch.mm(x_D, gate_up_ED2F[expert], out=h_2F)
    gate_PF, up_PF = h_P2F.chunk(2, dim=1)
    h_PF = act(gate_PF) * up_PF
    for expert, h_F, y_D in zip(experts, h_PF.split_with_sizes(sizes), y_PD.split_with_sizes(sizes)):
        torch.mm(h_F, down_EFD[expert], out=y_D)
    y_TKD = torch.empty_like(y_PD).index_copy_(0, order, y_PD).view(T, K, -1)
    return (y_TKD.float() * weights_TK[..., None]).sum(1).to(x_TD.dtype)


def gather(
    rows_PD: Tensor, counts_E: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, act: Activation
) -> Tensor:
    """One batched matmul over a copy of each row's expert: reads an expert once per row, so only for few rows."""
    expert_P = torch.repeat_interleave(counts_E, output_size=rows_PD.shape[0])
    gate_PF, up_PF = torch.bmm(gate_up_E2FD[expert_P], rows_PD[..., None]).squeeze(-1).chunk(2, dim=-1)
    return torch.bmm(down_EDF[expert_P], (act(gate_PF) * up_PF)[..., None]).squeeze(-1)


def masked(
    rows_PD: Tensor, counts_E: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, act: Activation
) -> Tensor:
    """Every expert on every row, the right answer picked: E times the work. Reads all experts, even unused ones."""
    expert_P = torch.repeat_interleave(counts_E, output_size=rows_PD.shape[0])
    gate_EPF, up_EPF = torch.einsum("efd,pd->epf", gate_up_E2FD, rows_PD).chunk(2, dim=-1)
    y_EPD = torch.einsum("edf,epf->epd", down_EDF, act(gate_EPF) * up_EPF)
    return y_EPD[expert_P, torch.arange(rows_PD.shape[0], device=rows_PD.device)]


def grouped(
    rows_PD: Tensor, counts_E: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, act: Activation
) -> Tensor:
    """One grouped matmul pair over all experts. Counts stay on the device, so it never waits for a GPU; differentiable.

    In bfloat16, D and F must be multiples of 8 (rows of 16 bytes).
    """
    ends_E = counts_E.cumsum(0).to(torch.int32)
    gate_PF, up_PF = F.grouped_mm(rows_PD, gate_up_E2FD.transpose(1, 2), offs=ends_E).chunk(2, dim=-1)
    return F.grouped_mm(act(gate_PF) * up_PF, down_EDF.transpose(1, 2), offs=ends_E)


PATHS: dict[str, Callable[..., Tensor]] = {
    "loop": loop,
    "padded": padded,
    "adaptive": adaptive,
    "gather": gather,
    "masked": masked,
    "grouped": grouped,
}


def run(
    path: str, rows_PD: Tensor, counts_E: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, act: Activation
) -> Tensor:
    """Run the rows through their experts by the named path. Raises ValueError for an unknown path."""
    if path not in PATHS:
        raise ValueError(f"unknown expert path {path!r}; known: {sorted(PATHS)}")
    return PATHS[path](rows_PD, counts_E, gate_up_E2FD, down_EDF, act)
