"""One matrix product for all experts of a rank, forward and twice backward.

``m`` rows, those of an expert behind each other; ``e`` experts of weight [o, i].  It is
`torch.nn.functional.grouped_mm`, which on a GPU fills the device where a loop of small products
would not; on a CPU a loop is as fast.  The kernel's limits are told by `can_group`, and gradients
are made contiguous for it.
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
from megatron.core.transformer.moe.lazy_token_counts import LateCounts

_ALIGNMENT = 16  # bytes, of every stride of the kernel
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def can_group(weights: Sequence[Tensor]) -> bool:
    """Whether the kernel takes rows times these weights: no fp64, widths of whole 16 bytes."""
    size = weights[0].dtype.itemsize
    is_aligned = all(n * size % _ALIGNMENT == 0 for n in weights[0].shape)
    return len(weights) > 1 and weights[0].dtype in _DTYPES and is_aligned


@dataclass(frozen=True)
class RowGroups:
    """How many rows each expert has, and where those end: [e] int32 beside the rows."""

    counts: Sequence[int]
    ends: Tensor

    @classmethod
    def on(cls, where: torch.device, counts: Sequence[int]) -> RowGroups:
        """The copy to a GPU does not wait for what the GPU has to do before."""
        if isinstance(counts, LateCounts):
            return cls(counts, counts.counts.cumsum(0, dtype=torch.int32))
        here = device.host_array(torch.tensor(counts, dtype=torch.int32).cumsum(0), where)
        ends = here.to(where, torch.int32, non_blocking=True)
        return cls(tuple(counts), ends)


def grouped_linear(rows: Tensor, groups: RowGroups, weights: Sequence[Tensor]) -> Tensor:
    """[m, i] -> [m, o]: each row times its expert's weight.

    The weight gradients go where those of a linear layer go: to a queue or into the main gradient
    if there is one, one product each, else out of one product.
    """
    return _GroupedLinear.apply(rows, groups, *weights)


# The weights themselves, for a queue and for main_grad.
_Values = tuple[tuple[Tensor, ...], RowGroups]


class _GroupedLinear(Function[Tensor]):
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
        # Without rows no stride counts, but the kernel looks at them.
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
    """[e, o, i]: a view where the weights lie at equal distances in one storage, else a copy."""
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
