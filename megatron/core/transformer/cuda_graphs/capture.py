"""CUDA graph capture of a stack of layers, forward and backward, for one micro-batch in flight.

Each layer has one graph for forward and one for backward.  They are separate because Python must
run between them: hooks that wait for gathered parameters or start gradient reductions cannot be
captured.

Lifetime of memory: all graphs of one recording share a memory pool, so that a graph may reuse the
temporary memory of an earlier one, as in eager mode.  This is valid only if the graphs are replayed
in the order of capture: layers forward, then backward from the last layer to the first.  One
micro-batch does so.  Two micro-batches in flight interleave in the order of the schedule, so each
has a recording and a pool of its own.

Capture executes nothing on the GPU: it changes no gradient and advances no random number generator.
Collectives inside layers are captured too, so all ranks of a group must capture in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core import device
from megatron.core.fusions.rope import RotaryTable
from megatron.core.tensor_parallel.random import get_rng_tracker
from megatron.core.tensor_parallel.weight_gradient import (
    MainGradParameter,
    adds_to_main_grad,
    has_main_grad,
)

HIDDEN = "hidden_states"
Shared = Mapping[str, object]  # by name, the inputs that all layers share
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


def tensors_of(hidden: Tensor, shared: Shared) -> dict[str, Tensor]:
    """Return the tensor inputs of a stack of layers by name; hidden states first."""
    return {HIDDEN: hidden} | shared_tensors(shared)


def shared_tensors(shared: Shared) -> dict[str, Tensor]:
    """Return the tensors among the inputs that all layers share, by name."""
    found: dict[str, Tensor] = {}
    for name, value in shared.items():
        if isinstance(value, RotaryTable):
            found |= {f"{name}.{part}": tensor for part, tensor in value.tensors().items()}
        elif torch.is_tensor(value):
            found[name] = value
    return found


def without_memory(hidden: Tensor, shared: Shared) -> tuple[Tensor, Shared]:
    """Return ``hidden`` and ``shared`` with meta tensors, the description that `record` takes."""
    found = tensors_of(hidden, shared)
    metas = {
        n: torch.empty_like(t, device="meta", requires_grad=t.requires_grad)
        for n, t in found.items()
    }
    return metas[HIDDEN], _with_tensors(shared, metas)


def _with_tensors(shared: Shared, tensors: Mapping[str, Tensor]) -> Shared:
    """Return ``shared`` with its tensors replaced by those in ``tensors``."""
    result = dict(shared)
    for name, value in shared.items():
        if isinstance(value, RotaryTable):
            parts = {part: tensors[f"{name}.{part}"] for part in value.tensors()}
            result[name] = value.with_tensors(parts)
        elif torch.is_tensor(value):
            result[name] = tensors[name]
    return result


def record(
    runs: Sequence[Run],
    modules: Sequence[nn.Module],
    hidden: Tensor,
    shared: Shared,
    *,
    feeds_next: Sequence[bool],
) -> list[Part]:
    """Capture ``runs``, which read the parameters of ``modules``.

    ``hidden`` and ``shared`` are `without_memory`.  ``feeds_next``: whether the output of a run is
    the input of the next one, with nothing computed between.  Collective where the layers are.
    """
    fixed = {name: _fixed(t) for name, t in tensors_of(hidden, shared).items()}
    others = [t for name, t in fixed.items() if name != HIDDEN]
    arguments, pool, parts = _with_tensors(shared, fixed), device.graph_pool(), []
    outputs: list[Tensor] = []
    before = fixed[HIDDEN]
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


def _fixed(tensor: Tensor) -> Tensor:
    """Allocate a static input, which is overwritten before each replay."""
    wants = tensor.requires_grad
    return torch.zeros_like(tensor, device=device.current(), requires_grad=wants)


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
