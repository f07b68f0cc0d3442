"""Rows of a table that an output layer multiplies with too: one gradient of both uses.

Alone the gradient of a lookup is as large as the table, and mostly zeros to be written and added.
Here its rows go straight into the gradient of the product.  ``t`` tokens, ``h`` width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.autograd import Context, Function

Lookups = list[tuple[Tensor, Tensor]]  # ids and gradients of what was read, of one backward pass


class _Table(Function[Tensor]):
    """The weight itself.  Its backward pass comes after those of all who use it."""

    @staticmethod
    def forward(ctx: Context[tuple[Tensor, Lookups]], weight: Tensor, lookups: Lookups) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.values = weight, lookups
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Context[tuple[Tensor, Lookups]], grad: Tensor | None) -> tuple[Tensor, None]:
        weight, lookups = ctx.values
        if grad is None:  # nothing was multiplied
            grad = torch.zeros_like(weight)
        grad = grad.contiguous()  # of its own memory: an expanded one is copied
        while lookups:
            _add_rows(grad, *lookups.pop())
        return grad, None


class _LookUp(Function[Tensor]):
    @staticmethod
    def forward(ctx: Context[Lookups], ids: Tensor, table: Tensor, lookups: Lookups) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.values = lookups
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Context[Lookups], grad: Tensor) -> tuple[None, None, None]:
        ctx.values.append((ctx.saved_tensors[0].flatten(), grad.flatten(0, -2)))
        return None, None, None


def takes_table(weight: Tensor) -> bool:
    """Whether `look_up` is of use: not on a GPU, which would add rows in any order."""
    is_used = torch.is_grad_enabled() and weight.requires_grad
    return is_used and weight.is_cpu and not torch.compiler.is_compiling()


def look_up(ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of ``weight`` [p, h], and the weight to multiply with."""
    lookups: Lookups = []
    table = _Table.apply(weight, lookups)
    return _LookUp.apply(ids, table, lookups), table


def _add_rows(total: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Add ``rows`` [t, h], those of an id summed up in float32 at its first place in order."""
    places = ids.sort().values
    dtype = torch.promote_types(rows.dtype, torch.float32)
    sums = torch.zeros(rows.shape, dtype=dtype, device=rows.device)
    sums.index_add_(0, torch.searchsorted(places, ids), rows.to(dtype))
    total.index_add_(0, places, sums.to(total.dtype))
