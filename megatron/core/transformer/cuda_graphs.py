"""CUDA graphs of layers, forward and backward: captured once, replayed as autograd nodes.

Since each replay is an autograd node, parameter hooks run after each layer as in eager mode, and a
data-parallel wrapper overlaps gradient reductions with the rest of backward.  A micro-batch owns a
recording from the forward pass of its first layer to the backward pass of that layer; as many
recordings exist as the schedule keeps micro-batches in flight.

Each layer has one graph for forward and one for backward, because Python must run between them:
hooks that wait for gathered parameters or start gradient reductions cannot be captured.

Lifetime of memory: all graphs of one recording share a memory pool, so that a graph may reuse the
temporary memory of an earlier one, as in eager mode.  This is valid only if the graphs are replayed
in the order of capture: layers forward, then backward from the last layer to the first.  One
micro-batch does so.  Two micro-batches in flight interleave in the order of the schedule, so each
has a recording and a pool of its own.

Capture executes nothing on the GPU: it changes no gradient and advances no random number generator.
Collectives inside layers are captured too, so all ranks of a group must capture in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron.core import device
from megatron.core.autograd import Context, Function
from megatron.core.tensor_parallel.random import get_rng_tracker
from megatron.core.tensor_parallel.weight_gradient import (
    MainGradParameter,
    adds_to_main_grad,
    has_been_added,
    has_main_grad,
)
from megatron.core.transformer.module import before_reading

Shared = dict[str, object]  # by name, the inputs that all layers share
Run = Callable[..., Tensor]  # (hidden states, inputs that all layers share) -> hidden states


@dataclass
class Part:
    """The captured graphs of one layer, or of its attention, and their static tensors.

    Each replay reads and overwrites the same tensors (inputs, output, gradients).  ``inputs``:
    hidden states, then the inputs that all layers share.  ``grad_inputs`` and ``grad_params`` are
    None for tensors without a gradient.  ``adding``: parameters whose gradient the graph itself
    adds to ``main_grad``.
    """

    forward: device.Graph
    backward: device.Graph
    inputs: list[Tensor]
    output: Tensor
    params: list[nn.Parameter]
    hooked: list[nn.Module]  # modules with forward pre-hooks, which run before each replay
    grad_output: Tensor | None = None
    grad_inputs: Sequence[Tensor | None] = ()
    grad_params: Sequence[Tensor | None] = ()
    adding: frozenset[MainGradParameter] = frozenset()


def tensors_in(shared: object) -> list[Tensor]:
    """Return the tensors among the inputs that all layers share, and in their tuples."""
    return [leaf for leaf in tree_leaves(shared) if torch.is_tensor(leaf)]


def record(
    runs: Sequence[Run],
    modules: Sequence[nn.Module],
    hidden: Tensor,
    shared: Shared,
    *,
    feeds_next: Sequence[bool],
) -> list[Part]:
    """Capture ``runs``, which read the parameters of ``modules``.

    ``hidden`` and ``shared`` have meta tensors.  ``feeds_next``: whether the output of a run is the
    input of the next one, with nothing computed between.  Collective where the layers are.
    """

    def fixed(like: Tensor) -> Tensor:  # a static input, which is overwritten before each replay
        return torch.zeros_like(like, device=device.current(), requires_grad=like.requires_grad)

    before, arguments = tree_map_only(Tensor, fixed, (hidden, shared))
    others = tensors_in(arguments)
    pool = device.graph_pool()
    parts = []
    outputs: list[Tensor] = []
    with device.about_to_record():
        for run, module, feeds in zip(runs, modules, feeds_next, strict=True):
            graph = device.Graph(pool, get_rng_tracker().streams())
            with graph.recording(), torch.enable_grad():
                output = run(before, **arguments)
            params = [p for p in module.parameters() if p.requires_grad]
            hooked = [m for m in module.modules() if m._forward_pre_hooks]
            own = [before, *others]
            parts.append(Part(graph, device.Graph(pool), own, output.detach(), params, hooked))
            outputs.append(output)
            after = parts[-1].output if feeds else torch.empty_like(output)
            before = after.detach().requires_grad_()
        grad = None
        for part, feeds in zip(reversed(parts), reversed(feeds_next), strict=True):
            if grad is None or not feeds:
                grad = torch.zeros_like(part.output)
            grad = _record_backward(part, outputs.pop(), grad)
    return parts


def _record_backward(part: Part, output: Tensor, grad: Tensor) -> Tensor | None:
    """Capture the backward pass of a part; return the gradient of its hidden states.

    Layers that accumulate into ``main_grad`` are captured in the form that adds, never in the form
    that overwrites: a graph cannot branch, and only the first micro-batch of a step overwrites.
    `replay` zeroes ``main_grad`` before that micro-batch instead.
    """
    overwrites = {p: p.overwrite_main_grad for p in part.params if adds_to_main_grad(p)}
    for weight in overwrites:
        weight.overwrite_main_grad = False
    wanted = [t for t in (*part.inputs, *part.params) if t.requires_grad]
    part.grad_output = grad
    with part.backward.recording():
        found = torch.autograd.grad(output, wanted, grad, allow_unused=True)
    grads = dict(zip(wanted, found, strict=True))
    adding = [p for p in part.params if has_main_grad(p) and p.grad_added_to_main_grad]
    for param in adding:
        param.grad_added_to_main_grad = False
    for weight, is_first_write in overwrites.items():
        weight.overwrite_main_grad = is_first_write
    part.adding = frozenset(adding)
    part.grad_inputs = [grads.get(t) for t in part.inputs]
    part.params = [p for p in part.params if p in part.adding or grads[p] is not None]
    part.grad_params = [None if p in part.adding else grads[p] for p in part.params]
    return part.grad_inputs[0]


_Replayed = tuple[Part, Callable[[], None] | None]


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
        ctx.values = part, when_done
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

    ``steps`` has one pair (captured, eager) per layer; either may be None.  ``give_back`` is called
    with the recording after the backward pass of its micro-batch.
    """

    def __init__(
        self,
        steps: list[tuple[Part | None, Run | None]],
        give_back: Callable[[_Recording], None],
    ) -> None:
        self._steps = steps
        self.parts = [part for part, _ in steps if part is not None]
        self._give_back = give_back

    def run(self, hidden: Tensor, shared: Shared) -> Tensor:
        """Run all layers: [s, b, h] -> [s, b, h]."""
        others = tensors_in(shared)
        for part, rest in self._steps:
            if part is not None:
                for module in part.hooked:
                    before_reading(module)
                is_first = part is self.parts[0]
                when_done = partial(self._give_back, self) if is_first else None
                hidden = _Replay.apply(part, when_done, hidden, *others, *part.params)
            if rest is not None:
                hidden = rest(hidden, **shared)
        return hidden


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
        self._key: object = None
        # Hidden states and the inputs that all layers share, without memory.
        self._like: tuple[Tensor, Shared] | None = None

    def begin_step(self, num_in_flight: int) -> None:
        """Begin a training step; capture until there is a recording per micro-batch in flight.

        Capture only here: it synchronizes with the device, which inside a step may be waiting for
        another pipeline stage that in turn waits for this rank.  Collective if the layers are.
        """
        self._steps_to_warm_up -= 1
        if self._steps_to_warm_up < 0 and self._like is not None:
            while len(self._recordings) < num_in_flight:
                self._recordings.append(self._record(*self._like))
        self._idle = list(self._recordings)

    def release(self) -> None:
        """Free all graphs."""
        for part in (part for recording in self._recordings for part in recording.parts):
            part.forward.release()
            part.backward.release()
        self._recordings, self._idle, self._like = [], [], None

    def recording(self, hidden: Tensor, shared: Shared) -> _Recording | None:
        """Return an idle recording for these inputs; None if they must run eagerly."""
        has_more = any(not isinstance(x, Tensor | bool | None) for x in tree_leaves(shared))
        is_capturable = any(captured is not None for captured, _ in self._runs)
        if has_more or not is_capturable or not torch.is_grad_enabled():
            return None
        key = tree_map_only(Tensor, lambda t: (t.shape, t.dtype, t.requires_grad), (hidden, shared))
        if self._key is None:
            self._key = key
            self._like = tree_map_only(
                Tensor,
                lambda t: torch.empty_like(t, device="meta", requires_grad=t.requires_grad),
                (hidden, shared),
            )
        return self._idle.pop() if key == self._key and self._idle else None

    def _record(self, hidden: Tensor, shared: Shared) -> _Recording:
        # Gather parameters now: the hooks that wait for them must not run during capture.
        for layer in self._layers:
            for module in layer.modules():
                before_reading(module)
        captured = {i: run for i, (run, _) in enumerate(self._runs) if run is not None}
        feeds_next = [self._runs[i][1] is None and i + 1 in captured for i in captured]
        layers = [self._layers[i] for i in captured]
        runs = list(captured.values())
        parts = iter(record(runs, layers, hidden, shared, feeds_next=feeds_next))
        steps = [(None if run is None else next(parts), rest) for run, rest in self._runs]
        return _Recording(steps, lambda recording: self._idle.append(recording))
