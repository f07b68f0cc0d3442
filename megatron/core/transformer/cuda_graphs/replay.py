"""CUDA graph replay of layers as nodes of the autograd graph.

Since each replay is an autograd node, parameter hooks run after each layer as in eager mode, and a
data-parallel wrapper overlaps gradient reductions with the rest of backward.  A micro-batch owns a
recording from the forward pass of its first layer to the backward pass of that layer; as many
recordings exist as the schedule keeps micro-batches in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.autograd import Context, Function
from megatron.core.tensor_parallel.weight_gradient import (
    adds_to_main_grad,
    has_been_added,
    has_main_grad,
)
from megatron.core.transformer.cuda_graphs.capture import (
    HIDDEN,
    Part,
    Run,
    Shared,
    record,
    tensors_of,
    without_memory,
)
from megatron.core.transformer.module import before_reading

_Key = tuple[tuple[str, torch.Size, torch.dtype, bool], ...]


class _Replayed(NamedTuple):
    part: Part
    when_done: Callable[[], None] | None


class _Replay(Function[Tensor]):
    """Replay the forward graph of a part, and its backward graph in backward.

    ``when_done`` is given to the first part only; it returns the recording after backward.
    """

    @staticmethod
    def forward(
        ctx: Context[_Replayed],
        part: Part,
        when_done: Callable[[], None] | None,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.values = _Replayed(part, when_done)
        # Inputs that all layers share have one static copy, which the first part fills.
        num_copied = 1 if when_done is None else len(part.inputs)
        for fixed, tensor in zip(part.inputs[:num_copied], tensors, strict=False):
            _put(fixed, tensor)
        part.forward.replay()
        return part.output.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context[_Replayed], grad: Tensor) -> tuple[Tensor | None, ...]:
        part, when_done = ctx.values
        assert part.grad_output is not None, "recorded as a whole"
        for param in part.adding:
            # Before the first micro-batch the buffer still holds the last step's gradients.
            if adds_to_main_grad(param) and param.overwrite_main_grad:
                param.main_grad.zero_()
        _put(part.grad_output, grad)
        part.backward.replay()
        inputs = part.grad_inputs
        if when_done is not None:
            # Another micro-batch may replay this recording before autograd consumes the gradients.
            inputs = [None if g is None else g.clone() for g in inputs]
            when_done()
        return None, None, *inputs, *map(_given, part.params, part.grad_params)


def _put(fixed: Tensor, tensor: Tensor) -> None:
    """Copy ``tensor`` to a static input, unless the previous graph wrote it there already."""
    if fixed.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            fixed.copy_(tensor)


def _given(param: nn.Parameter, grad: Tensor | None) -> Tensor | None:
    """Return the gradient for autograd.

    ``grad`` None: the graph has added it to ``main_grad``.  A parameter with ``main_grad`` has a
    hook that copies the static tensor at once.  Otherwise autograd keeps the tensor as
    ``param.grad`` beyond the next replay: clone it.
    """
    if grad is None:
        assert has_main_grad(param), "a graph adds to nothing else"
        return has_been_added(param)
    return grad if has_main_grad(param) else grad.clone()


class _Recording:
    """The captured parts and the eager parts of all layers, for one micro-batch in flight.

    ``steps`` has one pair (captured, eager) per layer; either may be None.
    """

    def __init__(self, steps: list[tuple[Part | None, Run | None]], owner: LayerGraphs) -> None:
        self._steps = steps
        self._parts = [part for part, _ in steps if part is not None]
        self._owner = owner

    def run(self, hidden: Tensor, shared: Shared) -> Tensor:
        """Run all layers: [s, b, h] -> [s, b, h]."""
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
        """Free the graphs; the recording must not run again."""
        for part in self._parts:
            part.forward.release()
            part.backward.release()


class LayerGraphs:
    """The CUDA graphs of a stack of layers.

    Micro-batches run eagerly in the first ``num_warmup_steps`` steps, in which libraries choose
    kernels and create communicators (neither can be captured), and whenever their shapes differ
    from those of the first micro-batch.
    """

    def __init__(self, layers: Iterable[nn.Module], num_warmup_steps: int, *, whole: bool) -> None:
        """Prepare capture.  ``whole``: as much as possible of each layer, else attention alone."""
        self._layers = list(layers)
        self._runs: list[tuple[Run | None, Run | None]] = [
            layer.capture_parts(whole=whole)  # type: ignore[operator]
            for layer in self._layers
        ]
        self._steps_to_warm_up = num_warmup_steps
        self._recordings: list[_Recording] = []
        self._idle: list[_Recording] = []
        self._key: _Key | None = None
        # Hidden states and the inputs that all layers share, without memory.
        self._like: tuple[Tensor, Shared] | None = None

    def begin_step(self, num_in_flight: int) -> None:
        """Begin a training step; capture until there is a recording per micro-batch in flight.

        Capture only here: it synchronises with the device, which inside a step may be waiting for
        another pipeline stage that in turn waits for this rank.  Collective if the layers are.
        """
        self._steps_to_warm_up -= 1
        if self._steps_to_warm_up < 0 and self._like is not None:
            while len(self._recordings) < num_in_flight:
                self._recordings.append(self._record(*self._like))
        self._idle = list(self._recordings)

    def release(self) -> None:
        """Free all graphs."""
        for recording in self._recordings:
            recording.release()
        self._recordings, self._idle, self._like = [], [], None

    def give_back(self, recording: _Recording) -> None:
        """Make a recording available again, after the backward pass of its micro-batch."""
        self._idle.append(recording)

    def recording(self, hidden: Tensor, shared: Shared) -> _Recording | None:
        """Return an idle recording for these inputs; None if they must run eagerly."""
        tensors = tensors_of(hidden, shared)
        has_more = any(v is not None and n not in _names(tensors) for n, v in shared.items())
        is_capturable = any(captured is not None for captured, _ in self._runs)
        if has_more or not is_capturable or not torch.is_grad_enabled():
            return None
        key = tuple((n, t.shape, t.dtype, t.requires_grad) for n, t in tensors.items())
        if self._key is None:
            self._key, self._like = key, without_memory(hidden, shared)
        return self._idle.pop() if key == self._key and self._idle else None

    def _record(self, hidden: Tensor, shared: Shared) -> _Recording:
        # Gather parameters now: the hooks that wait for them must not run during capture.
        for layer in self._layers:
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
