"""Rows of tokens brought into the order of experts, and back.

A token with k visits gives k rows; ``m`` rows in all, those of one expert behind each other, in the
order of tokens.  Both directions only gather, so sums come out the same on every device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.fusions import kernels
from megatron.core.tensor_parallel.mappings import through


@dataclass(frozen=True)
class Order:
    """``visit`` [m]: which of the n x k visits a row is.  ``row`` [n, k]: the row of a visit.

    Where some visits have no row, ``row`` is m or more for them.
    """

    visit: Tensor
    row: Tensor

    @property
    def token(self) -> Tensor:
        """Whose row it is: [m]."""
        k = self.row.shape[1]
        return self.visit if k == 1 else self.visit // k


def by_expert(experts: Tensor, num_rows: int | None = None, *, highest: int | None = None) -> Order:
    """The order of visits [n, k] by expert; with ``num_rows`` the highest numbers are left out.

    With ``highest``, the largest possible number, a kernel of the GPU counts instead of sorting.
    """
    flat = experts.flatten()
    if highest is not None and (fused := kernels.find("order", flat)):
        visit, row = fused.order_by_expert(flat, highest)
    else:
        visit = torch.argsort(flat, stable=True)
        row = torch.empty_like(visit)
        row[visit] = torch.arange(len(visit), device=visit.device)
    return Order(visit[:num_rows], row.view_as(experts))


def expand(x: Tensor, order: Order) -> Tensor:
    """[n, ...] -> [m, ...]: each token once for each of its visits."""
    return through(x, order, _rows_of_visits, _sum_of_rows)


def combine(rows: Tensor, order: Order) -> Tensor:
    """[m, ...] -> [n, ...]: the sum of each token's rows."""
    return through(rows, order, _sum_of_rows, _rows_of_visits)


def _rows_of_visits(x: Tensor, order: Order) -> Tensor:
    return x.index_select(0, order.token)


def _sum_of_rows(rows: Tensor, order: Order) -> Tensor:
    if rows.dim() == 2 and rows.is_contiguous() and (fused := kernels.find("rows", rows)):
        total: Tensor = fused.sum_of_rows(rows, order.row)
        return total
    if len(order.visit) < order.row.numel():
        rows = torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))])
    first, *others = order.row.clamp(max=len(rows) - 1).unbind(1)
    total = rows.index_select(0, first)
    for other in others:
        total += rows.index_select(0, other)
    return total
