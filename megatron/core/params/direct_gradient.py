"""Gradients of parameters that our autograd functions add to ``main_grad`` without autograd.

Autograd runs a node and a hook for each parameter, which takes the host about 4 us: a GPT layer has
twelve parameters.  A function that takes a `GradSink` in place of the parameter gets no such node:
its backward passes the gradient to the sink itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_backward_pass = torch._C._current_graph_task_id  # -1 outside of backward
_hooks_of_saved = torch._C._autograd._top_saved_tensors_default_hooks


class GradSink(ABC):
    """Where a data-parallel wrapper takes gradients of ``param``, whose ``grad_sink`` it is.

    ``uses``: number of uses in forward passes without a gradient so far.  `direct` counts them;
    each ends with one call of `add` or `note_added`.
    ``is_in_graph``: autograd has the gradient of another use (`leave_to_autograd`).
    """

    def __init__(self, param: nn.Parameter) -> None:
        self.param = param
        self.uses = 0
        self.is_in_graph = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Become None in a file: a parameter is saved without its wrapper."""
        return type(None), ()

    @abstractmethod
    def add(self, grad: Tensor) -> None:
        """Add the gradient of one use to the main gradient."""

    @abstractmethod
    def note_added(self) -> None:
        """Record that the caller has added the gradient of one use to the main gradient."""


Given = Tensor | GradSink | None  # an argument of an autograd function: maybe a parameter


def can_be_direct(x: Tensor) -> bool:
    """Return whether a function of ``x`` may pass gradients of its parameters to their sinks.

    If ``x`` requires no gradient, autograd must see the parameters, or it would not run backward.
    """
    is_wanted = x.requires_grad and _is_grad_enabled() and not _is_compiling()
    return is_wanted and not _is_replayed()


def _is_replayed() -> bool:
    """Return whether a forward pass runs again in backward for the tensors that it saves alone.

    torch.utils.checkpoint does so with ``use_reentrant=False``: the graph has no backward pass.
    """
    return _backward_pass() != -1 and _hooks_of_saved(True) is not None


def direct(param: Tensor | None) -> Given:
    """Return the sink of ``param`` instead of it, if there is one; count the use.

    The caller has asked `can_be_direct`, and gives the result to an autograd function.
    """
    sink: GradSink | None = getattr(param, "grad_sink", None)
    if sink is None or not sink.param.requires_grad or _has_hooks(sink.param):
        return param
    sink.uses += 1
    return sink


def _has_hooks(param: Any) -> bool:
    """Return whether autograd must run hooks of ``param`` besides that of the wrapper."""
    return bool(param._backward_hooks) or len(param._post_accumulate_grad_hooks or ()) > 1


def leave_to_autograd(*params: Tensor | None) -> None:
    """Note a use without `can_be_direct`: if the step has others, they do not come last."""
    if not _is_grad_enabled() or _is_compiling() or _is_replayed():
        return
    for param in params:
        sink: GradSink | None = getattr(param, "grad_sink", None)
        if sink is not None:
            sink.is_in_graph = True


def value_of(given: Given) -> Tensor | None:
    """Return the tensor itself."""
    return given.param if isinstance(given, GradSink) else given


def deliver(given: Given, grad: Tensor | None) -> Tensor | None:
    """Return ``grad`` for autograd, or None after adding it to the main gradient of ``given``."""
    if not isinstance(given, GradSink):
        return grad
    assert grad is not None, "backward computes the gradient of each parameter"
    given.add(grad)
    return None


@contextmanager
def through_autograd(params: Iterable[Tensor]) -> Iterator[None]:
    """Let autograd see the parameters in forward passes inside the block."""
    sinks: dict[Any, GradSink] = {p: p.grad_sink for p in params if hasattr(p, "grad_sink")}
    for param in sinks:
        del param.grad_sink
    try:
        yield
    finally:
        for param, sink in sinks.items():
            param.grad_sink = sink
