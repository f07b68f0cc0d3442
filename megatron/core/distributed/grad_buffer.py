"""Contiguous gradients, reduced over data-parallel ranks bucket by bucket.

``param.main_grad`` is a view of the buffer.  A gradient arrives there in one of two ways:

- through autograd: `GradSlot.take` copies the first one of a step (so the buffer needs no
  zeroing) and adds later ones;
- straight from a layer that adds its weight gradient to ``param.main_grad`` and then sets
  ``param.grad_added_to_main_grad``.  Such a layer returns a tensor of any content as the gradient,
  which tells autograd that the parameter is done; the tensor is dropped.  A parameter with a
  second use (a tied embedding) must not come this way.  Where ``param.overwrite_main_grad`` is
  True the numbers in the buffer are no gradients yet: a layer that knows of this writes its first
  product of the step over them and sets it to False; the buffer is zeroed for a layer that does
  not.  Our own layers come this way where the attribute is present (`GradSlot.open_to_layers`).

Collectives, started by the wrapper: per bucket one all-reduce over the bucket's group.  Where
every rank keeps its share alone it is one reduce-scatter, and an all-reduce of the share over the
optimizer's other instances; where sums are to be those of the sharded run, one reduce-scatter and
one all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.config.errors import NonFiniteError
from megatron.core.device import cpu_kernels
from megatron.core.device.async_host_copy import AsyncHostCopy
from megatron.core.distributed.buckets import BufferLayout
from megatron.core.distributed.non_finite import non_finite_gradients
from megatron.core.parallel.collectives import all_gather_single, reduce_scatter_single
from megatron.core.params.param_info import local_part

# Elements converted at a time when a 16-bit gradient is added to a 32-bit sum on the CPU: torch's
# mixed addition takes 7 times as long as a conversion and an addition that stay in the cache.
_CHUNK = 2**18


def gradient_of(param: nn.Parameter) -> Tensor | None:
    """Where the gradient of ``param``, or of this rank's part of it, is summed up; or None."""
    main_grad = getattr(param, "main_grad", None)
    if main_grad is None and param.grad is not None:
        return local_part(param.grad)
    return main_grad


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """What happens to a bucket: multiplied by ``factor``, then summed over ``group``."""

    group: ProcessGroup
    factor: float
    average_in_collective: bool  # the collective divides by the number of ranks
    check_for_nan: bool
    is_sharded: bool = False  # a rank keeps the sum of its share of the bucket alone
    outer: ProcessGroup | None = None  # ranks with the same share, whose sums are summed again
    in_fixed_order: bool = False  # every sum is that of the sharded reduction, to the bit

    @property
    def num_ranks(self) -> int:
        """Ranks that are summed over."""
        return self.group.size() * (1 if self.outer is None else self.outer.size())

    @property
    def op(self) -> Any:
        """What the collectives do."""
        return dist.ReduceOp.AVG if self.average_in_collective else dist.ReduceOp.SUM


class GradSlot:
    """The place of one parameter's gradient."""

    def __init__(self, param: nn.Parameter, name: str, main_grad: Tensor) -> None:
        self.param = param
        self.name = name
        self.main_grad = main_grad
        self.is_stale = False  # main_grad holds the last step's numbers
        self._came_through_autograd = False
        self._is_overwritten = False  # by a layer, at its first product of a step
        # The contract with layers and the optimizer: attributes of the parameter itself.
        param.main_grad = main_grad  # type: ignore[attr-defined]
        param.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def open_to_layers(self) -> None:
        """Let the layer of this parameter add its gradient to ``main_grad``, now zero, itself."""
        self.param.overwrite_main_grad = True  # type: ignore[attr-defined]

    def take(self) -> bool:
        """Account for the gradient that autograd has just finished; whether there was one.

        There is none where a layer has left it to a queue: it will come with another pass.
        """
        param: Any = self.param
        if param.grad_added_to_main_grad:
            assert not self._came_through_autograd, f"{self.name} comes now this way, now that"
            param.grad_added_to_main_grad = False
            self._is_overwritten = getattr(param, "overwrite_main_grad", None) is False
            self.is_stale = False
        elif param.grad is not None:
            self._came_through_autograd = True
            if self.is_stale:
                self.main_grad.copy_(param.grad)
            else:
                add_into(self.main_grad, param.grad)
            self.is_stale = False
        else:
            return False
        param.grad = None
        return True

    def reset(self) -> None:
        """Begin a step.  Only layers that add to ``main_grad`` and never write need zeros."""
        param: Any = self.param
        param.grad = None
        param.grad_added_to_main_grad = False
        if hasattr(param, "overwrite_main_grad"):
            param.overwrite_main_grad = True
        if self._came_through_autograd or self._is_overwritten:
            self.is_stale = True
        else:
            self.main_grad.zero_()

    def fill(self) -> None:
        """A parameter without a gradient in this step counts as zero."""
        if self.is_stale:
            self.main_grad.zero_()
            self.is_stale = False


class GradBucket:
    """A stretch of the buffer that is reduced by one collective."""

    def __init__(self, data: Tensor, slots: Sequence[GradSlot], reduction: Reduction) -> None:
        self.data = data
        self.slots = tuple(slots)
        self.reduction = reduction
        group = reduction.group
        self._share = data.view(group.size(), -1)[group.rank()]
        self.is_started = self.is_finished = False
        self._missing = set(self.slots)  # not yet finished by this step's last backward pass
        self._work: Any = None
        self._is_finite: AsyncHostCopy | None = None

    def mark_ready(self, slot: GradSlot) -> bool:
        """Backward is done with a parameter; whether it was the last."""
        self._missing.discard(slot)
        return self.is_ready

    @property
    def is_ready(self) -> bool:
        """Whether backward has finished all parameters."""
        return not self._missing

    @property
    def owned(self) -> Tensor:
        """Where this rank finds sums once the bucket is finished."""
        return self._share if self.reduction.is_sharded else self.data

    def start(self) -> None:
        """Scale, and start the reduction without waiting for it."""
        assert not self.is_started, "a bucket is reduced once a step"
        self.is_started = True
        for slot in self.slots:
            slot.fill()
        reduction, group = self.reduction, self.reduction.group
        if reduction.check_for_nan and reduction.num_ranks > 1 and not self.data.is_meta:
            # `finish` looks at it once the collective is under way.
            self._is_finite = AsyncHostCopy(torch.isfinite(self.data.sum(dtype=torch.float32)))
        factor = reduction.factor
        if reduction.average_in_collective:
            factor *= reduction.num_ranks
        if factor != 1.0:
            self.data.mul_(factor)
        if group.size() == 1:
            return
        if reduction.is_sharded or reduction.in_fixed_order:
            self._work = reduce_scatter_single(
                self._share, self.data, op=reduction.op, group=group, async_op=True
            )
        else:
            self._work = dist.all_reduce(self.data, op=reduction.op, group=group, async_op=True)

    def finish(self) -> None:
        """Wait for the sums.  Raises NonFiniteError when this rank put in a NaN.

        Collective over the optimizer's instances, or the bucket's group in fixed order.
        """
        if self.is_finished:
            return
        self.is_finished = True
        reduction, group = self.reduction, self.reduction.group
        if self._work is not None:
            self._work.wait()
            self._work = None
        if reduction.outer is not None and reduction.outer.size() > 1:
            dist.all_reduce(self._share, op=reduction.op, group=reduction.outer)
        if reduction.in_fixed_order and not reduction.is_sharded and group.size() > 1:
            all_gather_single(self.data, self._share, group=group)
        if self._is_finite is not None and not self._is_finite.get():
            culprits = non_finite_gradients((s.name, s.main_grad) for s in self.slots)
            if culprits is not None:  # else only their sum has overflowed
                raise NonFiniteError(f"{culprits}, met before reducing over data-parallel ranks")

    def reset(self) -> None:
        """Begin a step."""
        self.is_started = self.is_finished = False
        self._missing = set(self.slots)
        self._is_finite = None
        for slot in self.slots:
            slot.reset()


class GradBuffer:
    """The gradients of ``params`` in one tensor, cut into ``buckets``.  Starts at zero."""

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter]],
        layout: BufferLayout,
        grad_dtype: torch.dtype,
        reduction: Reduction,
    ) -> None:
        self.layout = layout
        self.reduction = reduction
        self.data = torch.zeros(layout.numel, dtype=grad_dtype, device=params[0][1].device)
        self.slots = [
            GradSlot(param, name, self.data[start:stop].view(param.shape))
            for (name, param), (start, stop) in zip(params, layout.spans, strict=True)
        ]
        self.buckets = [
            GradBucket(self.data[b.start : b.stop], [self.slots[i] for i in b.params], reduction)
            for b in layout.buckets
        ]


def takes_products(param: nn.Parameter, grad_dtype: torch.dtype) -> bool:
    """Whether adding a matrix product straight to the gradient of ``param`` is the faster way.

    On a CPU it is for equal dtypes only: benchmarks/weight_gradient.md.
    """
    if param.dim() != 2:
        return False
    return param.dtype == grad_dtype or (
        grad_dtype == torch.float32
        and device.is_cuda(param.device)
        and device.supports_fp32_accumulate_addmm()
    )


def add_into(total: Tensor, grad: Tensor) -> None:
    """``total += grad`` for equal shapes and any two dtypes; ``total`` is contiguous."""
    if total.dtype == grad.dtype or device.is_cuda(total.device):
        total.add_(grad)
        return
    if total.dtype == torch.float32 and grad.is_contiguous() and cpu_kernels.take(grad):
        cpu_kernels.run("add_into", [total, grad], format=grad.dtype, count=grad.numel())
        return
    scratch = torch.empty(min(_CHUNK, grad.numel()), dtype=total.dtype, device=total.device)
    flat = grad.reshape(-1)
    for part, more in zip(total.view(-1).split(_CHUNK), flat.split(_CHUNK), strict=True):
        part.add_(scratch[: more.numel()].copy_(more))
