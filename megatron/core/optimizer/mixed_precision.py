"""Main parameters: fp32 copies that the optimizer updates in place of 16-bit model parameters.

fp32 model parameters are their own main parameters.  So are 16-bit ones under
--use-precision-aware-optimizer, and bf16 ones that a fused Adam kernel updates: the bits that the
model parameter lacks are then part of the optimizer state (`reduced_precision_state`).

With --optimizer-cpu-offload main parameters, optimizer state and the update are on the host.  A
step copies the reduced gradients to the host, updates there on the CPU, and copies the result back
into the model.  With --overlap-cpu-optimizer-d2h-h2d a side stream makes all copies: gradients are
copied while the device computes the gradient norm, and one batch of parameters is copied back while
the next one is updated.  On a CPU device nothing is offloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core import device
from megatron.core.distributed.grad_buffer import gradient_of
from megatron.core.fusions import kernels
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import ParamGroup
from megatron.core.optimizer.reduced_precision_state import is_fp32
from megatron.core.params.param_info import FlatPart, ParamInfo, info_of, local_part

_HALF = (torch.bfloat16, torch.float16)
# Elements per batch: one batch is updated while the previous one is copied back.
_BATCH = 2**24


class ShardRange(NamedTuple):
    """Range of elements, ``start`` to ``stop``, of this rank's shard of a parameter, flattened."""

    start: int
    stop: int
    copy: int  # this rank's index among the ranks that update the same part
    num_copies: int


@dataclass(frozen=True, eq=False)
class OptimizedParam:
    """A model parameter and its main parameter, which often share memory.

    ``part``: the elements that this rank updates (None: all); ``main``, its gradient and its state
    are then flat, and ``info.part`` gives their position.  ``host``: the host buffers of an
    offloaded main parameter.
    """

    name: str
    info: ParamInfo
    model: nn.Parameter
    main: nn.Parameter
    part: ShardRange | None = None
    host: HostBufferSlot | None = None

    @property
    def has_main(self) -> bool:
        """Whether the main parameter has another dtype than the model parameter."""
        return self.main.dtype != self.model.dtype

    @property
    def is_saved_apart(self) -> bool:
        """Whether a checkpoint stores this parameter in a wider dtype than layers compute in."""
        return self.has_main or self.info.dtype is not None

    @property
    def model_values(self) -> Tensor:
        """View of the elements of the model parameter that ``main`` is the master copy of."""
        return self.values_in(local_part(self.model.detach()))

    def values_in(self, weight: Tensor) -> Tensor:
        """Return the elements of ``weight``, of the model parameter's shape, that ``main`` has."""
        return _part_of(weight, self.part)

    def rows_to_elements(self, rows: Tensor) -> Tensor:
        """Return a value per element of ``main``, given one per row of the local parameter."""
        numel = self.main.numel()
        part = self.info.part
        start = 0 if part is None else part.start
        columns = (numel if part is None else prod(part.shape)) // len(rows)
        held = rows[start // columns : -(-(start + numel) // columns)].repeat_interleave(columns)
        return held[start % columns :][:numel].view_as(self.main)

    def bind_main_grad(self) -> Tensor:
        """Bind the reduced gradient to ``main.grad``, without a copy; return it.

        An offloaded parameter gets its copy by `HostBufferSlot.fetch`.  A missing gradient counts
        as zero: a parameter without one would skip weight decay, and whether it has one depends on
        the layout.
        """
        grad = gradient_of(self.model)
        grad = torch.zeros_like(local_part(self.model)) if grad is None else grad
        grad = _part_of(grad, self.part)
        if self.host is None:
            self.main.grad = grad
        return grad


def optimized_params(
    names: dict[nn.Parameter, str],
    groups: Sequence[ParamGroup],
    config: OptimizerConfig,
    parts: Mapping[nn.Parameter, ShardRange] | None = None,
) -> tuple[list[OptimizedParam], list[ParamGroup]]:
    """Return a record per parameter, and ``groups`` with main parameters for model parameters.

    ``parts``: the part of each parameter that this rank updates; parameters that ``parts`` lacks
    are left out.  None: this rank updates every parameter completely.
    """
    every = [p for g in groups for p in g["params"] if parts is None or p in parts]
    part_of = dict.fromkeys(every) if parts is None else parts
    on_host = [False] * len(every)
    if config.optimizer_cpu_offload and device.host_is_apart():
        numels = [_part_of(local_part(p.detach()), part_of[p]).numel() for p in every]
        on_host = chosen(numels, config.optimizer_offload_fraction)
    records = {
        p: _record(names[p], p, part_of[p], config, is_offloaded)
        for p, is_offloaded in zip(every, on_host, strict=True)
    }
    main_groups: list[ParamGroup] = [
        {**group, "params": [records[p].main for p in group["params"] if p in records]}
        for group in groups
    ]
    return [*records.values()], main_groups


def _record(
    name: str, param: nn.Parameter, part: ShardRange | None, config: OptimizerConfig, on_host: bool
) -> OptimizedParam:
    local = local_part(param)
    info = info_of(param)
    values = _part_of(local.detach(), part)
    is_half = param.dtype in _HALF
    host = None
    if on_host:
        host = HostBufferSlot(values, getattr(param, "main_grad", param).dtype, config)
        main = host.main
    elif is_half and not (
        values.is_contiguous()
        and stores_remainders(config, values)
        # A weight gathered as 8-bit codes is no longer the upper half of its fp32 master.
        and not (is_fp32(config.main_params_dtype) and info.gathered_as_codes)
    ):
        main = nn.Parameter(values.float())
    else:
        is_same = part is None and local is param and not is_half
        main = param if is_same else nn.Parameter(values)
    if main is not param:
        main.grad_dtype = None  # the gradient has the buffer's dtype, not the parameter's
    if part is not None:
        held = info.part.start if info.part else 0
        whole = tuple(param.shape)
        info = replace(info, part=FlatPart(whole, held + part.start, part.copy, part.num_copies))
    return OptimizedParam(name, info, param, main, part, host)


def stores_remainders(config: OptimizerConfig, values: Tensor) -> bool:
    """Return whether main parameters of the weights ``values`` take 16 bits more, not an fp32 copy.

    Weights with other layouts, or gathered as codes, can have a copy all the same.
    """
    # An fp32 master is a bf16 weight and a 16-bit remainder; fp16 is not the upper half of fp32.
    has_fp32 = is_fp32(config.main_params_dtype)
    if values.dtype not in ((torch.bfloat16,) if has_fp32 else _HALF):
        return False
    # A fused Adam kernel is as fast on weight and remainder as on fp32: save the separate copy.
    is_fused = config.optimizer == "adam" and kernels.is_available("adam", values)
    return config.use_precision_aware_optimizer or is_fused


def _part_of(tensor: Tensor, part: ShardRange | None) -> Tensor:
    """Return a flat view of ``part`` of ``tensor``; for None, ``tensor`` itself."""
    return tensor if part is None else tensor.view(-1)[part.start : part.stop]


@torch.no_grad()
def copy_main_to_model(params: Sequence[OptimizedParam], *, backward: bool = False) -> None:
    """Copy the updated main parameters into the model parameters, rounded to their dtype.

    ``backward`` copies the model parameters into the main parameters instead, after a checkpoint
    without their state was loaded.
    """
    apart = [p for p in params if p.has_main or p.host]
    models = [p.model_values for p in apart]
    mains = [p.main for p in apart]
    if apart:
        torch._foreach_copy_(*((mains, models) if backward else (models, mains)))


def chosen(numels: Sequence[int], fraction: float) -> list[bool]:
    """Return for each parameter whether it is offloaded, given their numbers of elements.

    Goes through the parameters in order and offloads those that still fit into ``fraction`` of all
    elements.

    >>> chosen([4, 4, 1, 1], 0.5)
    [True, False, True, False]
    """
    left = sum(numels) * fraction
    answers = []
    for numel in numels:
        answers.append(numel <= left)
        left -= numel if numel <= left else 0
    return answers


class HostBufferSlot:
    """Host buffers of one offloaded parameter.

    ``main``: the main parameter; ``grad``: the copy of its gradient; ``result``: the updated values
    in the model's dtype, which are copied back (``main`` itself if the dtypes are equal).
    """

    def __init__(self, model: Tensor, grad_dtype: torch.dtype, config: OptimizerConfig) -> None:
        dtype = torch.promote_types(model.dtype, torch.float32)
        self.main = nn.Parameter(device.host_like(model, dtype, pin=config.pin_cpu_params))
        self.main.grad_dtype = None
        self.main.data.copy_(model)
        self.grad = device.host_like(model, grad_dtype, pin=config.pin_cpu_grads)
        self.result = self.main.data
        if model.dtype != dtype:
            self.result = device.host_like(model, model.dtype, pin=config.pin_cpu_params)
        self.has_come: device.Event | None = None  # reached when the gradient has been copied

    def fetch(self, grad: Tensor) -> None:
        """Start to copy the gradient to the host, on the current stream."""
        self.grad.copy_(grad, non_blocking=True)
        self.main.grad = self.grad
        self.has_come = device.record_event()


def batches(
    places: Sequence[HostBufferSlot], *, is_overlapped: bool
) -> Iterator[Sequence[HostBufferSlot]]:
    """Yield the parameters in batches that are updated at once; one batch without overlap."""
    begin = numel = 0
    for end, place in enumerate(places, start=1):
        numel += place.main.numel()
        if is_overlapped and numel >= _BATCH:
            yield places[begin:end]
            begin = end
            numel = 0
    if begin < len(places):
        yield places[begin:]
