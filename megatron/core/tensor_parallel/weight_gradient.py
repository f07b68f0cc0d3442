"""Weight gradients of linear layers: computed at once or deferred in a queue.

``t`` tokens, ``i``/``o`` input and output width of this rank's matrix, ``tp`` ranks of a group.
The gradient of a weight [o, i] is grad^T x with grad [t, o] and x [t, i].  Under sequence
parallelism x is this rank's rows [t/tp, i] and is all-gathered when the GEMM runs: a queue holds
1/tp of the inputs at the cost of one all-gather each, which `WeightGradQueue.run` starts one GEMM
ahead.

Collectives: an all-gather of x over the layer's group, under sequence parallelism only.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.autograd import Context, Function, ThreadLocal, runs_hooks_without_gradient
from megatron.core.params.param_info import info_of
from megatron.core.tensor_parallel.mappings import all_gather_single

# The queue that backward passes of this thread fill; None outside `WeightGradQueue.collecting`.
_collecting: ThreadLocal[WeightGradQueue] = ThreadLocal("megatron weight gradients")
_living: weakref.WeakSet[WeightGradQueue] = weakref.WeakSet()


class MainGradParameter(nn.Parameter):
    """Type of parameters with a main gradient, for the type checker only.

    No object has this class: `distributed.grad_buffer` sets these attributes on parameters.
    """

    main_grad: Tensor
    overwrite_main_grad: bool
    grad_added_to_main_grad: bool


class WeightGrad:
    """The deferred gradients of one layer's weight and bias from one backward pass.

    A parameter that needs no gradient is None.  With ``group`` the rows of ``x`` are sharded over
    its ranks.  ``is_own``: only this layer uses the weight, so its gradient can be deferred alone.
    Keeps ``grad`` and ``x`` alive until the gradients are computed.
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
        self.weight = weight
        self.bias = bias
        self.is_own = is_own
        self.grad = grad.flatten(0, -2)
        self.x = x.flatten(0, -2)
        self.group = None if weight is None else group
        self._gathering: dist.Work | None = None

    @property
    def params(self) -> list[Tensor]:
        """The parameters whose gradients are to be computed."""
        return [p for p in (self.weight, self.bias) if p is not None]

    def start(self) -> None:
        """Start the all-gather of the input, once.  Collective over the layer's group."""
        if self.group is not None:
            x = self.x.contiguous()
            self.x = x.new_empty((x.shape[0] * self.group.size(), x.shape[1]))
            self._gathering = all_gather_single(self.x, x, group=self.group, async_op=True)
            self.group = None

    def compute(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of weight and bias.

        The weight's is that of `has_been_added` if it was added to ``main_grad``.  Collective like
        `start`.
        """
        self.start()
        if self._gathering is not None:
            self._gathering.wait()
        weight_grad = None if self.weight is None else self._product(self.weight)
        return weight_grad, None if self.bias is None else self.grad.sum(0)

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of `params`.  As `compute` otherwise."""
        given = zip((self.weight, self.bias), self.compute(), strict=True)
        return [grad for param, grad in given if param is not None]

    def _product(self, weight: Tensor) -> Tensor | None:
        """Return grad^T x, or `has_been_added` if the GEMM accumulates it in the main gradient.

        The first GEMM of a step overwrites (beta = 0), so the buffer needs no zeroing.
        """
        grad = self.grad.t()
        x = self.x
        if not (self.is_own and adds_to_main_grad(weight)):
            return grad.matmul(x)
        total = weight.main_grad
        keep = 0 if weight.overwrite_main_grad else 1
        wider: dict[str, Any] = {} if total.dtype == x.dtype else {"out_dtype": total.dtype}
        torch.addmm(total, grad, x, beta=keep, out=total, **wider)
        return has_been_added(weight)


def adds_to_main_grad(weight: Tensor | None) -> TypeGuard[MainGradParameter]:
    """Return whether a layer may add to ``weight.main_grad`` (see `distributed.grad_buffer`)."""
    return hasattr(weight, "overwrite_main_grad")


def has_main_grad(param: nn.Parameter) -> TypeGuard[MainGradParameter]:
    """Return whether a data-parallel wrapper keeps the gradient of ``param`` in a buffer."""
    return hasattr(param, "main_grad")


def add_to_main_grad(weight: MainGradParameter, grad: Tensor) -> Tensor | None:
    """Add ``grad`` to the main gradient, or overwrite it; return `has_been_added`."""
    if weight.overwrite_main_grad:
        weight.main_grad.copy_(grad)
    else:
        weight.main_grad.add_(grad)
    return has_been_added(weight)


def has_been_added(weight: MainGradParameter) -> Tensor | None:
    """Mark ``weight.main_grad`` as written; return what autograd needs to run the wrapper's hook.

    That is None, or in a torch that then runs no hook a tensor, which the hook drops unread: it
    would cost the memory of the weight when memory is at its peak.
    """
    weight.overwrite_main_grad = False
    weight.grad_added_to_main_grad = True
    return None if runs_hooks_without_gradient() else torch.empty_like(weight)


class _Deliver(Function[Tensor]):
    """A graph of one node whose backward computes the gradients.

    Gradients that autograd computes become ``param.grad`` without a copy; gradients passed to
    ``torch.autograd.backward`` from outside would be copied.
    """

    @staticmethod
    def forward(ctx: Context[WeightGrad], item: WeightGrad, *_: Tensor) -> Tensor:
        ctx.values = item
        return item.grad.new_empty(())

    @staticmethod
    def backward(ctx: Context[WeightGrad], _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.values.gradients()


class WeightGradQueue:
    """A queue of deferred weight gradients, oldest first.

    Linear layers can defer only if a queue exists during forward: construct it before the first
    forward pass of a step.  The resulting sums are bitwise identical to those without a queue.
    """

    def __init__(self) -> None:
        self._items: deque[WeightGrad] = deque()
        self._only_output_layer = False
        _living.add(self)

    def __len__(self) -> int:
        return len(self._items)

    @contextmanager
    def collecting(self, *, only_output_layer: bool = False) -> Iterator[None]:
        """Defer the weight gradients of linear layers in backward passes inside the block.

        Applies to this thread.  ``only_output_layer`` defers only those of the output layer.
        """
        before = _collecting.get()
        self._only_output_layer = only_output_layer
        _collecting.set(self)
        try:
            yield
        finally:
            _collecting.set(before)

    def run(self, count: int | None = None) -> None:
        """Compute the oldest ``count`` gradients, or all, and accumulate them.

        Parameter hooks run as in a backward pass, so the caller enters the wrapper's ``no_sync``
        for all but the last micro-batch.  If all are run, the gradients of an output layer with
        several losses are computed together.  Collective over the tensor-parallel group under
        sequence parallelism: all its ranks call it with the same counts.
        """
        left = len(self) if count is None else min(count, len(self))
        while left:
            items = [self._items.popleft()]
            weight = items[0].params[0]
            if count is None and _is_output_layer(weight):
                items += [item for item in self._items if item.params[0] is weight]
                self._items = deque(i for i in self._items if i.params[0] is not weight)
            left -= len(items)
            with torch.no_grad():
                for item in [*items, self._items[0]] if left else items:
                    item.start()
            with torch.enable_grad():
                delivered = [_Deliver.apply(item, *item.params) for item in items]
            torch.autograd.backward(delivered)

    def takes(self, item: WeightGrad) -> bool:
        """Append ``item`` unless only the output layer is deferred; return whether it was."""
        if self._only_output_layer and not _is_output_layer(item.params[0]):
            return False
        self._items.append(item)
        return True


def _is_output_layer(param: Tensor) -> bool:
    return isinstance(param, nn.Parameter) and info_of(param).is_embedding_or_output


def may_be_deferred() -> bool:
    """Return whether a queue exists, so that backward may defer weight gradients."""
    return bool(_living)


def is_deferred(item: WeightGrad) -> bool:
    """Offer ``item`` to this thread's queue; return whether it took it, else compute it at once."""
    queue = _collecting.get()
    if queue is None or not item.is_own:
        return False
    return bool(item.params) and queue.takes(item)
