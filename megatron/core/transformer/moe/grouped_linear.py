"""Grouped GEMM over all experts of a rank: one in forward, two in backward.

``m`` rows sorted by expert; ``e`` experts with weights [o, i].  `GroupedGemms` stores the weights
and multiplies, in 16 bits here, in fp8 in `grouped_quantized_linear`.  The kernel here is
`torch.nn.functional.grouped_mm`, which uses a GPU better than a loop of small GEMMs; on a CPU a
loop is as fast.  `unsupported_reason` checks the kernel's limits.  Rows after those of the last
expert belong to none, and the kernel leaves their results undefined.  The host needs no row counts,
unless the weight gradients are added to main gradients without a Triton kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core import device
from megatron.core.autograd import Context, Function
from megatron.core.device.async_host_copy import AsyncHostCopy
from megatron.core.fusions import kernels
from megatron.core.tensor_parallel.weight_gradient import (
    WeightGrad,
    adds_to_main_grad,
    has_been_added,
    is_deferred,
)


class LazyTokenCounts(Sequence[int]):
    """Sequence of the counts [e] on the device; the first read by the host waits for the copy."""

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts
        self._late = AsyncHostCopy(counts)

    @cached_property
    def _numbers(self) -> list[int]:
        return self._late.get_list()

    def __getitem__(self, place: Any) -> Any:
        return self._numbers[place]

    def __len__(self) -> int:
        return len(self.counts)


_ALIGNMENT = 16  # bytes, of every stride of the kernel
# For other dtypes torch runs a loop of GEMMs, and copies the ends of the groups to the host for it.
_DTYPES = (torch.bfloat16,)


def unsupported_reason(weights: Sequence[Tensor]) -> str | None:
    """Return why the kernel does not support these weights; None if it does."""
    first = weights[0]
    if len(weights) == 1:
        return "a rank has one expert only"
    if first.dtype not in _DTYPES:
        return f"weights are {first.dtype}, not {_DTYPES[0]}"
    if any(n * first.itemsize % _ALIGNMENT for n in first.shape):
        multiple = _ALIGNMENT // first.itemsize
        return f"a weight of {tuple(first.shape)} has a width that is no multiple of {multiple}"
    return None


@torch.no_grad()
def share_storage(weights: Sequence[nn.Parameter]) -> None:
    """Move the weights, of equal shapes, into one storage, so that `stacked` need not copy them."""
    whole = weights[0].new_empty((len(weights), *weights[0].shape))
    for weight, place in zip(weights, whole, strict=True):
        place.copy_(weight)
        weight.data = place


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
        return cls(tuple(counts), here.to(where, torch.int32, non_blocking=True))

    def expert_of(self, row: Tensor) -> Tensor:
        """Return the expert of each row number (int32); e for rows after the last expert's."""
        return torch.searchsorted(self.ends, row, right=True)


def grouped_linear(
    rows: Tensor,
    groups: RowGroups,
    weights: Sequence[Tensor],
    gemms: GroupedGemms | None = None,
) -> Tensor:
    """Multiply each row by its expert's weight: [m, i] -> [m, o].

    As in a linear layer, backward puts the weight gradients into a queue or adds them to the main
    gradients, if either exists.  ``gemms``: default is that of weights in 16 bits.
    """
    return _GroupedLinear.apply(rows, groups, gemms or _DENSE, *weights)


Rows = Any  # what a GEMM reads of x or of a gradient: a Tensor [m, i], or codes


class GroupedGemms:
    """The GEMMs of experts with weights in 16 bits; subclasses store them in another way."""

    def input(
        self, x: Tensor, groups: RowGroups, needs_weight_grad: bool
    ) -> tuple[Rows, tuple[Tensor, ...]]:
        """Return the rows of ``x`` for a GEMM, and what the weight gradient needs of it."""
        return x, (x,)

    def product(
        self,
        rows: Rows,
        groups: RowGroups,
        weights: Sequence[Tensor],
        like: Tensor,
        *,
        of_gradient: bool = False,
    ) -> Tensor:
        """Multiply rows [m, i] by their experts' weights, in the dtype of ``like``.

        ``of_gradient``: multiply rows [m, o] by the transposed weights.
        """
        whole = stacked(weights)
        return F.grouped_mm(rows, whole if of_gradient else whole.mT, offs=groups.ends)

    def gradient(
        self, grad: Tensor, groups: RowGroups, saved: list[Tensor]
    ) -> tuple[Rows, Callable[[Sequence[Tensor | None]], GroupedWeightGrad]]:
        """Return the rows of the output gradient, and a function to make weight gradients."""
        (x,) = saved
        return grad, lambda weights: GroupedWeightGrad(weights, grad, x, groups)


_DENSE = GroupedGemms()


def bias_of_rows(num_rows: int, groups: RowGroups, biases: Sequence[Tensor]) -> Tensor:
    """Return each row's bias: [m, o]; backward sums over the rows of each expert."""
    return _BiasOfRows.apply(num_rows, groups, *biases)


class _BiasOfRows(Function[Tensor]):
    @staticmethod
    def forward(
        ctx: Context[RowGroups], num_rows: int, groups: RowGroups, *biases: Tensor
    ) -> Tensor:
        ctx.values = groups
        row = torch.arange(num_rows, dtype=torch.int32, device=biases[0].device)
        expert = groups.expert_of(row).clamp(max=len(biases) - 1)  # rows of no expert have any bias
        return torch.stack(biases).index_select(0, expert)

    @staticmethod
    def backward(ctx: Context[RowGroups], grad: Tensor) -> tuple[Tensor | None, ...]:
        # The kernel needs a multiple of 16 bytes in each dimension, and valid strides without rows.
        grad = grad.contiguous() if len(grad) else grad.new_zeros(grad.shape)
        ones = torch.ones_like(grad[:, : _ALIGNMENT // grad.itemsize])
        sums = F.grouped_mm(ones.t(), grad, offs=ctx.values.ends)
        return None, None, *sums[:, 0].contiguous().unbind()


# The parameter objects, since queue and main_grad need more than the saved values.
_Values = tuple[tuple[Tensor, ...], RowGroups, GroupedGemms]


class _GroupedLinear(Function[Tensor]):
    """Grouped GEMMs of outputs, input gradients and, unless deferred, weight gradients."""

    @staticmethod
    def forward(
        ctx: Context[_Values], x: Tensor, groups: RowGroups, gemms: GroupedGemms, *weights: Tensor
    ) -> Tensor:
        x = x.contiguous()
        rows, saved = gemms.input(x, groups, any(ctx.needs_input_grad[3:]))
        ctx.save_for_backward(*weights, *saved)
        ctx.values = weights, groups, gemms
        return gemms.product(rows, groups, weights, x)

    @staticmethod
    def backward(ctx: Context[_Values], grad: Tensor) -> tuple[Tensor | None, ...]:
        params, groups, gemms = ctx.values
        saved = [*ctx.saved_tensors[len(params) :]]
        # The kernel checks strides even without rows: allocate a tensor with valid ones.
        grad = grad.contiguous() if len(grad) else grad.new_zeros(grad.shape)
        rows, weight_grad = gemms.gradient(grad, groups, saved)
        needs_x, _, _, *needs = ctx.needs_input_grad
        grad_x: Tensor | None = None
        if needs_x:
            grad_x = gemms.product(rows, groups, params, grad, of_gradient=True)
        chosen = [params[k] if needed else None for k, needed in enumerate(needs)]
        item = weight_grad(chosen)
        computed = iter([] if not item.params or is_deferred(item) else item.gradients())
        own = (None if param is None else next(computed, None) for param in chosen)
        return grad_x, None, None, *own


class GroupedWeightGrad(WeightGrad):
    """The weight gradients of all experts from one backward pass; None for a frozen weight."""

    def __init__(
        self, weights: Sequence[Tensor | None], grad: Tensor, rows: Tensor, groups: RowGroups
    ) -> None:
        super().__init__(None, None, grad, rows, group=None, is_own=True)
        self._weights = weights
        self._groups = groups

    @property
    def params(self) -> list[Tensor]:
        return [weight for weight in self._weights if weight is not None]

    def gradients(self) -> list[Tensor | None]:
        adding = [weight for weight in self._weights if adds_to_main_grad(weight)]
        is_first = {weight.overwrite_main_grad for weight in adding}
        if len(adding) == len(self._weights) and len(is_first) == 1:
            # One kernel adds the products to all main gradients, if it exists.
            total = view_of_all([weight.main_grad for weight in adding])
            if total is not None and self._has_added(total, keep=not is_first.pop()):
                return [has_been_added(weight) for weight in adding]
        return self._computed()

    def _has_added(self, total: Tensor, *, keep: bool) -> bool:
        """Add the products to ``total`` [e, o, i] with one kernel, if it exists."""
        fused = kernels.find("grouped_matmul", self.grad)
        if fused is None or self.grad.dtype.itemsize != 2:
            return False
        fused.add_products(self.grad, self.x, self._groups.ends, total, keep=keep)
        return True

    def _computed(self) -> list[Tensor | None]:
        """Return the gradients as `gradients` does, of any weights."""
        params = self.params
        if len(params) == len(self._weights) and not any(map(adds_to_main_grad, params)):
            return [*F.grouped_mm(self.grad.t(), self.x, offs=self._groups.ends)]
        counts = list(self._groups.counts)
        grads, inputs = (rows[: sum(counts)].split(counts) for rows in (self.grad, self.x))
        parts = zip(self._weights, grads, inputs, strict=True)
        return [
            WeightGrad(weight, None, grad, x, group=None, is_own=True).compute()[0]
            for weight, grad, x in parts
            if weight is not None
        ]


def stacked(weights: Sequence[Tensor]) -> Tensor:
    """Stack the weights: [e, o, i], a view if they are equally spaced in one storage, else a copy.

    They are after `share_storage`, and in a parameter buffer.
    """
    view = view_of_all(weights)
    return torch.stack([weight.detach() for weight in weights]) if view is None else view


def view_of_all(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a view [e, ...] of tensors that are equally spaced in one storage, else None."""
    first, second = tensors[0], tensors[1]
    begin, storage = first.storage_offset(), first.untyped_storage()._cdata
    step = second.storage_offset() - begin
    is_even = step >= first.numel() and step * first.itemsize % _ALIGNMENT == 0
    are_next = (
        tensor.storage_offset() == begin + number * step
        and tensor.is_contiguous()
        and tensor.untyped_storage()._cdata == storage
        for number, tensor in enumerate(tensors)
    )
    if not (is_even and all(are_next)):
        return None
    return first.detach().as_strided((len(tensors), *first.shape), (step, *first.stride()))
