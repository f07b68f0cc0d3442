"""Embedding lookup in a weight that the output layer uses too (tied embeddings).

Autograd alone would create a gradient of the complete weight for the lookup, mostly zeros, and add
it to the output layer's.  Here backward adds the rows of the lookup's gradient directly to the
output layer's gradient.  ``t`` tokens, ``h`` hidden size, ``p`` rows of the weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.autograd import Context, Function

Lookups = list[tuple[Tensor, Tensor]]  # (ids [t], gradients [t, h]) of one backward pass


class _Table(Function[Tensor]):
    """Return the weight.  Autograd runs its backward after those of the lookup and output layer."""

    @staticmethod
    def forward(ctx: Context[tuple[Tensor, Lookups]], weight: Tensor, lookups: Lookups) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.values = weight, lookups
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Context[tuple[Tensor, Lookups]], grad: Tensor | None) -> tuple[Tensor, None]:
        weight, lookups = ctx.values
        if grad is None:  # the output layer was not used
            grad = torch.zeros_like(weight)
        grad = grad.contiguous()  # an expanded gradient shares memory between rows: copy it
        while lookups:
            _add_rows(grad, *lookups.pop())
        return grad, None


class _LookUp(Function[Tensor]):
    """Embedding lookup whose backward puts its gradient into ``lookups`` for `_Table`."""

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
    """Return whether to use `look_up`: not on a GPU, which adds rows in nondeterministic order."""
    is_used = torch.is_grad_enabled() and weight.requires_grad
    return is_used and weight.is_cpu and not torch.compiler.is_compiling()


def look_up(ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows ``ids`` of ``weight`` [p, h], and the weight to use in the output layer."""
    lookups: Lookups = []
    table = _Table.apply(weight, lookups)
    return _LookUp.apply(ids, table, lookups), table


def _add_rows(total: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Add ``rows`` [t, h] to the rows ``ids`` of ``total``.

    Rows of the same id are first summed in float32, at the id's first place in sorted order.
    """
    places = ids.sort().values
    dtype = torch.promote_types(rows.dtype, torch.float32)
    sums = torch.zeros(rows.shape, dtype=dtype, device=rows.device)
    sums.index_add_(0, torch.searchsorted(places, ids), rows.to(dtype))
    total.index_add_(0, places, sums.to(total.dtype))
