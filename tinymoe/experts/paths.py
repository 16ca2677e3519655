"""Ways to run the chosen experts: same result, different cost. Every path takes rows already sorted by expert.

rows [P, D]; counts [E] int64, rows of each expert; gate_up [E, 2F, D] (gate rows first); down [E, D, F]; -> [P, D].
An expert is a gated MLP: down(act(gate(x)) · up(x)) (Shazeer 2020, arXiv 2002.05202).
"""

from collections.abc import Callable

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
