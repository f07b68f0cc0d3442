"""Grouped GEMM over all experts of a rank: one in forward, two in backward.

``m`` rows sorted by expert; ``e`` experts with weights [o, i].  The kernel is
`torch.nn.functional.grouped_mm`, which uses a GPU better than a loop of small GEMMs; on a CPU a
loop is as fast.  `can_group` checks the kernel's limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import device
from megatron.core.autograd import Context, Function
from megatron.core.tensor_parallel.weight_gradient import WeightGrad, adds_to_main_grad, is_deferred
from megatron.core.transformer.moe.lazy_token_counts import LazyTokenCounts

_ALIGNMENT = 16  # bytes, of every stride of the kernel
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def can_group(weights: Sequence[Tensor]) -> bool:
    """Return whether the kernel supports these weights.

    It needs at least two, no fp64, and both widths a multiple of 16 bytes.
    """
    size = weights[0].dtype.itemsize
    is_aligned = all(n * size % _ALIGNMENT == 0 for n in weights[0].shape)
    return len(weights) > 1 and weights[0].dtype in _DTYPES and is_aligned


@dataclass(frozen=True)
class RowGroups:
    """Rows per expert: ``counts``, and their cumulative sum ``ends`` [e] int32 on the device."""

    counts: Sequence[int]
    ends: Tensor

    @classmethod
    def on(cls, where: torch.device, counts: Sequence[int]) -> RowGroups:
        """Create the groups on device ``where``, without blocking the host."""
        if isinstance(counts, LazyTokenCounts):
            return cls(counts, counts.counts.cumsum(0, dtype=torch.int32))
        here = device.host_array(torch.tensor(counts, dtype=torch.int32).cumsum(0), where)
        ends = here.to(where, torch.int32, non_blocking=True)
        return cls(tuple(counts), ends)


def grouped_linear(rows: Tensor, groups: RowGroups, weights: Sequence[Tensor]) -> Tensor:
    """Multiply each row by its expert's weight: [m, i] -> [m, o].

    As in a linear layer, backward puts the weight gradients into a queue or adds them to the main
    gradients, if either exists, with one GEMM per expert; otherwise it runs one grouped GEMM.
    """
    return _GroupedLinear.apply(rows, groups, *weights)


# The parameter objects, since queue and main_grad need more than the saved values.
_Values = tuple[tuple[Tensor, ...], RowGroups]


class _GroupedLinear(Function[Tensor]):
    """Grouped GEMMs of outputs, input gradients and, unless deferred, weight gradients."""

    @staticmethod
    def forward(ctx: Context[_Values], rows: Tensor, groups: RowGroups, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, *weights)
        ctx.values = weights, groups
        wide = stacked(weights).transpose(1, 2)
        return F.grouped_mm(rows.contiguous(), wide, offs=groups.ends)

    @staticmethod
    def backward(ctx: Context[_Values], grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        params, groups = ctx.values
        counts, ends = list(groups.counts), groups.ends
        # The kernel checks strides even without rows: allocate a tensor with valid ones.
        grad = grad.contiguous() if len(grad) else grad.new_zeros(grad.shape)
        needs_rows, _, *needs = ctx.needs_input_grad
        grad_rows = F.grouped_mm(grad, stacked(weights), offs=ends) if needs_rows else None
        items = [
            WeightGrad(weight if needed else None, None, one, x, group=None, is_own=True)
            for weight, needed, one, x in zip(
                params, needs, grad.split(counts), rows.split(counts), strict=True
            )
        ]
        are_later = [is_deferred(item) for item in items]
        if all(needs) and not any(are_later) and not any(map(adds_to_main_grad, params)):
            return grad_rows, None, *F.grouped_mm(grad.t(), rows, offs=ends)
        computed = [
            None if is_later else item.compute()[0]
            for item, is_later in zip(items, are_later, strict=True)
        ]
        return grad_rows, None, *computed


def stacked(weights: Sequence[Tensor]) -> Tensor:
    """Stack the weights: [e, o, i], a view if they are equally spaced in one storage, else a copy.

    A parameter buffer stores consecutive experts so.
    """
    first, second = weights[0], weights[1]
    step = second.data_ptr() - first.data_ptr()
    begin, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    is_even = (
        step > 0
        and step % _ALIGNMENT == 0
        and all(
            weight.is_contiguous()
            and weight.data_ptr() == begin + k * step
            and weight.untyped_storage().data_ptr() == storage
            for k, weight in enumerate(weights)
        )
    )
    if not is_even:
        return torch.stack([weight.detach() for weight in weights])
    strides = (step // first.element_size(), *first.stride())
    return first.detach().as_strided((len(weights), *first.shape), strides)
