"""Weight gradients of linear layers: at once or left in a queue, returned or added where they go.

``t`` tokens, ``i``/``o`` input and output width of this rank's matrix, ``tp`` ranks of a group.
The gradient of a weight [o, i] is grad^T x with grad [t, o] and x [t, i].  Under sequence
parallelism x is this rank's rows [t/tp, i] and is gathered when the product is computed: a queue
keeps 1/tp of the inputs for the price of one all-gather each, which `WeightGradQueue.run` starts
one product ahead.

Collectives: an all-gather of x over the layer's group, under sequence parallelism only.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.params.param_info import info_of
from megatron.core.tensor_parallel.mappings import all_gather_single

# Autograd hands this thread-local state on to the threads in which it computes.
_QUEUE = "megatron weight gradients"
_living: weakref.WeakSet[WeightGradQueue] = weakref.WeakSet()


class WeightGrad:
    """The gradients of one layer's weight and bias from one backward pass, not computed yet.

    A parameter without a gradient is None.  With ``group`` the rows of ``x`` lie on its ranks.
    ``is_own`` says that this layer alone uses the weight: it may then come apart from the others.
    """

    def __init__(
        self,
        weight: Tensor | None,
        bias: Tensor | None,
        grad: Tensor,
        x: Tensor,
        *,
        group: ProcessGroup | None,
        is_own: bool,
    ) -> None:
        self.weight, self.bias, self.is_own = weight, bias, is_own
        self.grad, self.x = grad.flatten(0, -2), x.flatten(0, -2)
        self.group = None if weight is None else group
        self._gathering: dist.Work | None = None

    @property
    def params(self) -> list[Tensor]:
        """The parameters that wait for their gradients."""
        return [p for p in (self.weight, self.bias) if p is not None]

    @property
    def adds(self) -> bool:
        """Whether `compute` adds the gradient to the main gradient, and returns no number."""
        return self.weight is not None and self.is_own and adds_to_main_grad(self.weight)

    def start(self) -> None:
        """Begin to gather the input.  Collective over the layer's group."""
        if self.group is not None:
            x = self.x.contiguous()
            self.x = x.new_empty((x.shape[0] * self.group.size(), x.shape[1]))
            self._gathering = all_gather_single(self.x, x, group=self.group, async_op=True)
            self.group = None

    def compute(self) -> tuple[Tensor | None, Tensor | None]:
        """Gradient of the weight and of the bias."""
        self.start()
        if self._gathering is not None:
            self._gathering.wait()
        weight_grad = None
        if self.weight is not None:
            weight_grad = self._product(self.weight, adds=self.adds)
        return weight_grad, None if self.bias is None else self.grad.sum(0)

    def _product(self, weight: Tensor, *, adds: bool) -> Tensor:
        """grad^T x, or anything of its shape where the product ``adds`` to the main gradient."""
        if adds:
            return _add_product(weight, self.grad.t(), self.x)
        return self.grad.t().matmul(self.x)


def adds_to_main_grad(weight: Tensor) -> bool:
    """Whether the wrapper lets a layer add to ``weight.main_grad`` (`distributed.grad_buffer`)."""
    return hasattr(weight, "overwrite_main_grad")


def _add_product(weight: Any, grad: Tensor, x: Tensor) -> Tensor:
    """Add to the main gradient, or write it; what autograd gets is dropped by the wrapper."""
    total, keep = weight.main_grad, 0 if weight.overwrite_main_grad else 1
    if total.dtype == x.dtype:
        torch.addmm(total, grad, x, beta=keep, out=total)
    else:
        torch.addmm(total, grad, x, out_dtype=total.dtype, beta=keep, out=total)
    return has_been_added(weight)


def add_to_main_grad(weight: Any, grad: Tensor) -> Tensor:
    """Add a gradient to the main gradient, or write it, in its dtype; what autograd gets."""
    if weight.overwrite_main_grad:
        weight.main_grad.copy_(grad)
    else:
        weight.main_grad.add_(grad)
    return has_been_added(weight)


def has_been_added(weight: Any) -> Tensor:
    """Tell the wrapper that a layer has written to ``weight.main_grad``; what autograd gets."""
    weight.overwrite_main_grad, weight.grad_added_to_main_grad = False, True
    return torch.empty_like(weight)


class _Deliver(torch.autograd.Function):
    """A graph of one node: its backward pass computes gradients and gives them to autograd.

    Gradients made inside autograd become ``param.grad`` as they are; handed in, they are copied.
    """

    @staticmethod
    def forward(ctx: Any, item: WeightGrad, *_: Tensor) -> Tensor:
        ctx.item = item
        return item.grad.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(g for g in ctx.item.compute() if g is not None)


class WeightGradQueue:
    """Weight gradients that wait, oldest first.

    While a queue exists, linear layers run in a form that can leave their gradients in it: make it
    before the first forward pass of a step.  Gradients come out as bit for bit the same sums.
    """

    def __init__(self) -> None:
        self._items: deque[WeightGrad] = deque()
        self._only_output_layer = False
        _living.add(self)

    def __len__(self) -> int:
        return len(self._items)

    @contextmanager
    def collecting(self, *, only_output_layer: bool = False) -> Iterator[None]:
        """Backward passes of this thread inside compute no weight gradients of linear layers.

        ``only_output_layer`` lets all layers but the one before the loss compute them.
        """
        before = _collecting()
        self._only_output_layer = only_output_layer
        torch._C._stash_obj_in_tls(_QUEUE, self)
        try:
            yield
        finally:
            torch._C._stash_obj_in_tls(_QUEUE, before)

    def run(self, count: int | None = None) -> None:
        """Compute the oldest ``count`` gradients, or all, and give them to their parameters.

        They arrive as in a backward pass, hooks included: only the last micro-batch's run outside
        the wrapper's ``no_sync``.  If all are run, those of an output layer with several losses
        arrive at once.  Collective over the tensor-parallel group under sequence parallelism: all
        its ranks run equally many.
        """
        left = len(self) if count is None else min(count, len(self))
        while left:
            items = self._oldest(with_its_like=count is None)
            left -= len(items)
            with torch.no_grad():
                for item in [*items, self._items[0]] if left else items:
                    item.start()
            with torch.enable_grad():
                delivered = [_Deliver.apply(item, *item.params) for item in items]
            torch.autograd.backward(delivered)

    def _oldest(self, *, with_its_like: bool) -> list[WeightGrad]:
        """Take it out, with the others of the weight if it is the output layer's."""
        items = [self._items.popleft()]
        weight = items[0].params[0]
        if with_its_like and _is_output_layer(weight):
            items += [item for item in self._items if item.params[0] is weight]
            self._items = deque(item for item in self._items if item.params[0] is not weight)
        return items

    def takes(self, item: WeightGrad) -> bool:
        """Put ``item`` in, unless its layer is not asked for; whether that was done."""
        if self._only_output_layer and not _is_output_layer(item.params[0]):
            return False
        self._items.append(item)
        return True


def _is_output_layer(param: Tensor) -> bool:
    return isinstance(param, nn.Parameter) and info_of(param).is_embedding_or_output


def _collecting() -> WeightGradQueue | None:
    """The queue that backward passes of this thread fill."""
    return torch._C._get_obj_in_tls(_QUEUE) if torch._C._is_key_in_tls(_QUEUE) else None


def may_be_deferred() -> bool:
    """Whether there is a queue that may ask for gradients later."""
    return bool(_living)


def is_deferred(item: WeightGrad) -> bool:
    """Whether a queue has taken ``item``; else the caller computes it."""
    queue = _collecting()
    return queue is not None and item.is_own and bool(item.params) and queue.takes(item)
