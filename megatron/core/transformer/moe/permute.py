"""Permutation of tokens into rows sorted by expert, and back.

A visit is a pair (token, chosen expert).  A token with k visits becomes k rows; the ``m`` rows are
sorted by expert, then by token.  Forward and backward only gather rows, never scatter-add them, so
the order of summation is fixed and results are deterministic on every device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.fusions import kernels
from megatron.core.tensor_parallel.mappings import through


@dataclass(frozen=True)
class Order:
    """The permutation between visits and rows.

    ``visit`` [m]: index of each row's visit among the n x k visits.  ``row`` [n, k]: row of each
    visit; m or more for visits without a row (dropped tokens, experts of other ranks), which there
    may be if ``is_partial``.
    """

    visit: Tensor
    row: Tensor
    is_partial: bool = False

    @property
    def token(self) -> Tensor:
        """Token of each row: [m]."""
        k = self.row.shape[1]
        return self.visit if k == 1 else self.visit // k


def by_expert(
    experts: Tensor,
    num_rows: int | None = None,
    *,
    highest: int | None = None,
    dropped: int | None = None,
) -> Order:
    """Sort the visits by expert number ``experts`` [n, k].

    ``num_rows`` keeps the first rows only: visits of the highest numbers get no row.  ``highest``
    (largest possible number) allows a GPU kernel that counts instead of sorting.  ``dropped``:
    visits with this number, the highest, belong to no row, even if ``num_rows`` leaves one.
    """
    flat = experts.flatten()
    if highest is not None and (fused := kernels.find("permute", flat)):
        visit, row = fused.order_by_expert(flat, highest)
    else:
        visit = torch.argsort(flat, stable=True)
        row = torch.empty_like(visit)
        row[visit] = torch.arange(len(visit), device=visit.device)
    visit = visit[:num_rows]
    if dropped is not None:
        row = row.masked_fill(flat == dropped, len(flat))
    return Order(visit, row.view_as(experts), dropped is not None or len(visit) < len(flat))


def expand(x: Tensor, order: Order) -> Tensor:
    """Copy each token to the rows of its visits: [n, ...] -> [m, ...]."""
    return through(x, order, _rows_of_visits, _sum_of_rows)


def combine(rows: Tensor, order: Order) -> Tensor:
    """Sum the rows of each token: [m, ...] -> [n, ...]."""
    return through(rows, order, _sum_of_rows, _rows_of_visits)


def _rows_of_visits(x: Tensor, order: Order) -> Tensor:
    return x.index_select(0, order.token)


def _sum_of_rows(rows: Tensor, order: Order) -> Tensor:
    if rows.dim() == 2 and rows.is_contiguous() and (fused := kernels.find("permute", rows)):
        total: Tensor = fused.sum_of_rows(rows, order.row)
        return total
    if order.is_partial:
        rows = torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))])
    first, *others = order.row.clamp(max=len(rows) - 1).unbind(1)
    total = rows.index_select(0, first)
    for other in others:
        total += rows.index_select(0, other)
    return total
