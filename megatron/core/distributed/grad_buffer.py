"""Contiguous gradient buffers, reduced over data-parallel ranks bucket by bucket.

``param.main_grad`` is a view of the buffer.  A gradient reaches it in one of two ways:

- Through autograd: `GradSlot.take` copies the first gradient of a step (so the buffer needs no
  zeroing) and adds later ones.
- Fused into the layer: the layer adds its weight gradient to ``param.main_grad`` and then sets
  ``param.grad_added_to_main_grad``.  To autograd our layers return None as the gradient, for which
  it still runs the parameter's hook; layers of others return a tensor of the weight's shape with
  arbitrary content, which `GradSlot.take` drops.  A parameter used twice (a tied embedding) must
  not use this path: autograd would add the arbitrary tensor to the real gradient of the other use.

``param.overwrite_main_grad`` exists on parameters whose layer may use the fused path
(`takes_products`); our own layers use it if and only if the attribute exists.  True means
that the buffer still holds values of the last step: the layer writes its first weight gradient of
the step instead of adding it, then sets False.  For a layer that sets only
``grad_added_to_main_grad``, `GradSlot.reset` zeroes the buffer.

Collectives, started by the data-parallel wrapper: one all-reduce per bucket over the bucket's
group.  With a distributed optimizer, one reduce-scatter, then an all-reduce of this rank's share
over the other optimizer instances.  In deterministic mode without a distributed optimizer, one
reduce-scatter and one all-gather, which add in the same order as the distributed optimizer does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.device import cpu_kernels
from megatron.core.device.async_host_copy import AsyncHostCopy
from megatron.core.distributed.buffer_plan import BufferLayout
from megatron.core.distributed.non_finite import GradientCheck
from megatron.core.parallel.collectives import (
    all_gather_single,
    all_reduce_over,
    reduce_scatter_single,
)
from megatron.core.params.param_info import local_part

# Elements per chunk when a 16-bit gradient is added to an fp32 sum on the CPU.  torch's addition of
# mixed dtypes takes 7 times as long as converting and adding chunks that fit into the cache.
_CHUNK = 2**18


class GradientHook:
    """Hook of a data-parallel wrapper on a parameter: calls ``method`` of the wrapper.

    All references are weak.  Python does not see a cycle of references through such a hook, so the
    model and its buffers would stay in memory for good.
    """

    def __init__(self, method: Callable[..., None], slot: GradSlot, bucket: GradBucket) -> None:
        self._method = weakref.WeakMethod(method)
        self._slot = weakref.ref(slot)
        self._bucket = weakref.ref(bucket)

    def __call__(self, param: Tensor) -> None:
        """Report the gradient of ``param``."""
        method = self._method()
        slot = self._slot()
        bucket = self._bucket()
        if method is not None:
            method(slot, bucket)


def take_over(param: nn.Parameter) -> None:
    """Remove what an earlier wrapper of the same module has left on ``param``."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    for key in [key for key, hook in hooks.items() if isinstance(hook, GradientHook)]:
        del hooks[key]
    for name in ("main_grad", "grad_added_to_main_grad", "overwrite_main_grad"):
        if hasattr(param, name):
            delattr(param, name)


def gradient_of(param: nn.Parameter) -> Tensor | None:
    """Return ``param.main_grad``, else this rank's part of ``param.grad``; None without either."""
    main_grad = getattr(param, "main_grad", None)
    if main_grad is None and param.grad is not None:
        return local_part(param.grad)
    return main_grad


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """Reduction of a bucket: multiply by ``factor``, then reduce over ``group`` by ``op``."""

    group: ProcessGroup
    factor: float
    op: dist.ReduceOp.RedOpType
    check: GradientCheck | None  # of this rank's gradients before they are reduced
    is_sharded: bool = False  # each rank keeps only the sum of its own share of the bucket
    outer: ProcessGroup | None = None  # ranks of other instances that own the same share
    in_fixed_order: bool = False  # sums are bitwise identical to those of the sharded reduction


class GradSlot:
    """Main gradient of one parameter (a view of the buffer), and its state in this step."""

    def __init__(self, param: nn.Parameter, name: str, main_grad: Tensor) -> None:
        self.param = param
        self.name = name
        self.main_grad = main_grad
        self.is_stale = False  # main_grad still holds the last step's values
        self._is_added = False  # a complete gradient came, and was copied or added
        self._is_overwritten = False  # the layer writes its first weight gradient of a step
        # Megatron-LM's contract with layers and the optimizer: attributes of the parameter.
        param.main_grad = main_grad  # type: ignore[attr-defined]
        param.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def take(self) -> bool:
        """Move the gradient that autograd has just finished into ``main_grad``.

        Returns False if there is no gradient yet: the layer has put it into a `WeightGradQueue`,
        and a later pass computes it and calls this hook again.
        """
        param: Any = self.param
        grad = param.grad
        if param.grad_added_to_main_grad:
            assert not self._is_added, (
                f"{self.name} received both an autograd gradient and a fused main gradient"
            )
            param.grad_added_to_main_grad = False
            self._is_overwritten = getattr(param, "overwrite_main_grad", None) is False
        elif grad is None:
            return False
        else:
            self._is_added = True
            if self.is_stale:
                self.main_grad.copy_(grad)
            else:
                add_into(self.main_grad, grad)
        self.is_stale = False
        param.grad = None
        return True

    def reset(self) -> None:
        """Begin a step.

        Zeroing reads and writes the whole buffer, so it is done only for a layer that always adds
        to ``main_grad``.  The others overwrite the stale values with their first gradient.
        """
        param: Any = self.param
        param.grad = None
        param.grad_added_to_main_grad = False
        if hasattr(param, "overwrite_main_grad"):
            param.overwrite_main_grad = True
        if self._is_added or self._is_overwritten:
            self.is_stale = True
        else:
            self.main_grad.zero_()

    def fill(self) -> None:
        """Zero the stale values of a parameter that received no gradient in this step."""
        if self.is_stale:
            self.main_grad.zero_()
            self.is_stale = False


class GradBucket:
    """A contiguous range of the buffer that one collective reduces."""

    def __init__(self, data: Tensor, slots: Sequence[GradSlot], reduction: Reduction) -> None:
        self.data = data
        self.slots = tuple(slots)
        self.reduction = reduction
        group = reduction.group
        self._share = data.view(group.size(), -1)[group.rank()]
        self.is_started = self.is_finished = False
        self.missing = set(self.slots)  # gradients that the last backward pass has not finished
        self._work: dist.Work | None = None
        self.checked: AsyncHostCopy | None = None  # value for `Reduction.check`

    @property
    def owned(self) -> Tensor:
        """The part of ``data`` that holds reduced gradients on this rank after `finish`."""
        return self._share if self.reduction.is_sharded else self.data

    def start(self) -> None:
        """Scale the gradients and start the reduction asynchronously.

        From here to `finish` the collective owns ``data``: nothing may read or write it.  All
        ranks of the group must start their buckets in the same order.
        """
        assert not self.is_started, "a bucket is reduced once a step"
        self.is_started = True
        for slot in self.slots:
            slot.fill()
        reduction = self.reduction
        group = self.reduction.group
        if reduction.check is not None:
            # Reading the result at once would block the host until backward has caught up.
            self.checked = reduction.check.read([self.data])
        if reduction.factor != 1.0:
            self.data.mul_(reduction.factor)
        if group.size() == 1:
            return
        if reduction.is_sharded or reduction.in_fixed_order:
            self._work = reduce_scatter_single(
                self._share, self.data, op=reduction.op, group=group, async_op=True
            )
        else:
            self._work = dist.all_reduce(self.data, op=reduction.op, group=group, async_op=True)

    def finish(self) -> None:
        """Wait for the reduction.

        Collective over the optimizer instances, and with ``in_fixed_order`` over the bucket's
        group: called for every bucket in the order of `start`.
        """
        if self.is_finished:
            return
        self.is_finished = True
        reduction = self.reduction
        group = self.reduction.group
        if self._work is not None:
            self._work.wait()
            self._work = None
        if reduction.outer is not None:
            all_reduce_over(self._share, reduction.outer, op=reduction.op)
        if reduction.in_fixed_order and not reduction.is_sharded and group.size() > 1:
            all_gather_single(self.data, self._share, group=group)

    def reset(self) -> None:
        """Begin a step: expect a gradient of every parameter again."""
        self.is_started = self.is_finished = False
        self.missing = set(self.slots)
        self.checked = None
        for slot in self.slots:
            slot.reset()


class GradBuffer:
    """The gradients of ``params`` in one tensor, split into ``buckets``.  Initially zero.

    ``param_data``: the values of the parameters in a tensor of the same layout, if the distributed
    optimizer shards them and layers do not use 8-bit codes instead.
    """

    param_data: Tensor | None = None

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter]],
        layout: BufferLayout,
        grad_dtype: torch.dtype,
        reduction: Reduction,
    ) -> None:
        self.layout = layout
        self.reduction = reduction
        self.grad_data = torch.zeros(layout.numel, dtype=grad_dtype, device=params[0][1].device)
        self.slots = [
            GradSlot(param, name, self.grad_data[start:stop].view(param.shape))
            for (name, param), (start, stop) in zip(params, layout.spans, strict=True)
        ]
        self.buckets = [
            GradBucket(
                self.grad_data[b.start : b.stop], [self.slots[i] for i in b.params], reduction
            )
            for b in layout.buckets
        ]


def takes_products(param: nn.Parameter, grad_dtype: torch.dtype) -> bool:
    """Return whether a GEMM that accumulates into ``param.main_grad`` is faster than autograd.

    On a CPU only if both have the same dtype; measured in benchmarks/weight_gradient.md.
    """
    if param.dim() != 2:
        return False
    return param.dtype == grad_dtype or (
        grad_dtype == torch.float32
        and device.is_cuda(param.device)
        and device.supports_fp32_accumulate_addmm()
    )


def add_into(total: Tensor, grad: Tensor) -> None:
    """Add ``grad`` to ``total``: equal shapes, any two dtypes, ``total`` contiguous."""
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
