"""Runs recorded layers in place of Python, inside autograd.

Each replay is a node of autograd: gradients of parameters arrive as from a layer that was run, so
that a data-parallel wrapper reduces them layer by layer while backward goes on.  One micro-batch at
a time uses a recording, from its first layer forward to its first layer backward; as many are made
as the schedule keeps in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.tensor_parallel.weight_gradient import has_been_added
from megatron.core.transformer.cuda_graphs.capture import (
    HIDDEN,
    Part,
    Run,
    record,
    tensors_of,
    without_memory,
)
from megatron.core.transformer.module import before_reading

_Key = tuple[tuple[str, torch.Size, torch.dtype, bool], ...]


class _Replay(torch.autograd.Function):
    """A part of a layer, forward and backward by its graphs."""

    @staticmethod
    def forward(
        ctx: Any, part: Part, when_done: Callable[[], None] | None, *tensors: Tensor
    ) -> Tensor:
        ctx.part, ctx.when_done = part, when_done
        # The first part copies for all of them what they share.
        num_copied = 1 if when_done is None else len(part.inputs)
        for fixed, tensor in zip(part.inputs[:num_copied], tensors, strict=False):
            _put(fixed, tensor)
        part.forward.replay()
        return part.output.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        part: Part = ctx.part
        assert part.grad_output is not None, "recorded as a whole"
        for param in part.adding:
            if param.overwrite_main_grad:  # the wrapper left the last step's numbers there
                param.main_grad.zero_()
        _put(part.grad_output, grad)
        part.backward.replay()
        inputs = part.grad_inputs
        if ctx.when_done is not None:  # the memory may be used again before these are
            inputs = [None if g is None else g.clone() for g in inputs]
            ctx.when_done()
        return None, None, *inputs, *map(_given, part.params, part.grad_params)


def _put(fixed: Tensor, tensor: Tensor) -> None:
    """Copy, unless the graph before has written to the place itself."""
    if fixed.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            fixed.copy_(tensor)


def _given(param: nn.Parameter, grad: Tensor | None) -> Tensor | None:
    """What autograd gets: of a gradient in main_grad, that goes there at once, or that stays."""
    if grad is None:
        return has_been_added(param)
    return grad if hasattr(param, "main_grad") else grad.clone()


class _Recording:
    """The captured parts of all layers and what runs eagerly, for one micro-batch in flight.

    Of each layer ``steps`` holds both, in this order; either may be None.
    """

    def __init__(self, steps: list[tuple[Part | None, Run | None]], owner: LayerGraphs) -> None:
        self._steps = steps
        self._parts = [part for part, _ in steps if part is not None]
        self._owner = owner

    def run(self, hidden: Tensor, shared: Mapping[str, Any]) -> Tensor:
        """All layers: [s, b, h] -> [s, b, h]."""
        others = [t for name, t in tensors_of(hidden, shared).items() if name != HIDDEN]
        for part, rest in self._steps:
            if part is not None:
                for module in part.hooked:
                    before_reading(module)
                is_first = part is self._parts[0]
                when_done = partial(self._owner.give_back, self) if is_first else None
                hidden = _Replay.apply(part, when_done, hidden, *others, *part.params)
            if rest is not None:
                hidden = rest(hidden, **shared)
        return hidden

    def release(self) -> None:
        """It will not run again."""
        for part in self._parts:
            part.forward.release()
            part.backward.release()


class LayerGraphs:
    """The graphs of a stack of layers.

    Micro-batches run eagerly for ``num_warmup_steps`` steps, in which kernels are chosen and
    communicators are made, and whenever they have other shapes than the first one had.
    """

    def __init__(self, layers: Sequence[nn.Module], num_warmup_steps: int, *, whole: bool) -> None:
        """``whole``: capture as much as possible of each layer, else its attention alone."""
        self._layers: Sequence[Any] = layers
        self._runs = [layer.capture_parts(whole=whole) for layer in self._layers]
        self._steps_to_warm_up = num_warmup_steps
        self._recordings: list[_Recording] = []
        self._idle: list[_Recording] = []
        self._key: _Key | None = None
        self._like: Any = None  # hidden states and what layers share, without memory

    def begin_step(self, num_in_flight: int) -> None:
        """A training step begins that keeps so many micro-batches in flight: record for them.

        Never later: recording waits for the device, which may wait for another stage by then.
        Collective where the layers are.
        """
        self._steps_to_warm_up -= 1
        if self._steps_to_warm_up < 0 and self._like is not None:
            while len(self._recordings) < num_in_flight:
                self._recordings.append(self._record(*self._like))
        self._idle = list(self._recordings)

    def release(self) -> None:
        """Release the graphs."""
        for recording in self._recordings:
            recording.release()
        self._recordings, self._idle, self._like = [], [], None

    def give_back(self, recording: _Recording) -> None:
        """Its micro-batch is done."""
        self._idle.append(recording)

    def recording(self, hidden: Tensor, shared: Mapping[str, Any]) -> _Recording | None:
        """An idle one for these inputs; None where they are to be run eagerly."""
        tensors = tensors_of(hidden, shared)
        has_more = any(v is not None and n not in _names(tensors) for n, v in shared.items())
        is_capturable = any(captured is not None for captured, _ in self._runs)
        if has_more or not is_capturable or not torch.is_grad_enabled():
            return None
        key = tuple((n, t.shape, t.dtype, t.requires_grad) for n, t in tensors.items())
        if self._key is None:
            self._key, self._like = key, without_memory(hidden, shared)
        return self._idle.pop() if key == self._key and self._idle else None

    def _record(self, hidden: Tensor, shared: Mapping[str, Any]) -> _Recording:
        for layer in self._layers:  # their hooks have nothing to wait for inside a graph
            for module in layer.modules():
                before_reading(module)
        captured = [(run, i) for i, (run, _) in enumerate(self._runs) if run is not None]
        parts = iter(
            record(
                [run for run, _ in captured],
                [self._layers[i] for _, i in captured],
                hidden,
                shared,
                feeds_next=[
                    self._runs[i][1] is None and self._is_captured(i + 1) for _, i in captured
                ],
            )
        )
        steps = [(None if run is None else next(parts), rest) for run, rest in self._runs]
        return _Recording(steps, self)

    def _is_captured(self, i: int) -> bool:
        return i < len(self._runs) and self._runs[i][0] is not None


def _names(tensors: Mapping[str, Tensor]) -> set[str]:
    return {name.split(".")[0] for name in tensors}
