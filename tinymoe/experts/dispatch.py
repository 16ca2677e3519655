"""Dispatch and combine: bring each token's row to its experts, and the experts' answers back to the token."""

from typing import NamedTuple

import torch
from torch import Tensor


class Dispatched(NamedTuple):
    """T·K rows sorted by expert (stable, so by token inside an expert).

    rows_PD: the rows. order_P: pair index t·K + j of each row. counts_E: rows of each expert, int64.
    """

    rows_PD: Tensor
    order_P: Tensor
    counts_E: Tensor


class LocalDispatch:
    """All experts live here: dispatch is a gather, combine a scatter and a sum over the K slots in fixed order."""

    def __init__(self, num_experts: int):
        self.num_experts = num_experts

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor) -> Dispatched:
        """x [T, D], ids [T, K] int64 in 0..E-1 -> the rows grouped by expert."""
        flat_P = ids_TK.reshape(-1)
        order_P = torch.sort(flat_P, stable=True).indices
        # Unlike bincount, this never waits for a GPU.
        counts_E = flat_P.new_zeros(self.num_experts).scatter_add_(0, flat_P, torch.ones_like(flat_P))
        rows_PD = x_TD.index_select(0, order_P // ids_TK.shape[1])
        return Dispatched(rows_PD, order_P, counts_E)

    def combine(self, y_PD: Tensor, dispatched: Dispatched, weights_TK: Tensor) -> Tensor:
        """Weighted sum over each token's K experts: y [P, D], weights [T, K] float32 -> [T, D] in y's dtype.

        The sum runs over slots in the router's order, in float32, so it does not depend on who shared the batch.
        """
        T, K = weights_TK.shape
        y_TKD = torch.empty_like(y_PD).index_copy_(0, dispatched.order_P, y_PD).view(T, K, y_PD.shape[1])
        return (y_TKD.float() * weights_TK[..., None]).sum(dim=1).to(y_PD.dtype)
