"""What the optimizer updates: fp32 main parameters beside 16-bit ones, others directly.

Under --use-precision-aware-optimizer 16-bit ones are updated directly too, and so are bf16 ones by
Adam's kernel on a CPU: what makes them whole is part of the update rule's state (`kept_state`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core import device
from megatron.core.device import cpu_kernels
from megatron.core.distributed.grad_buffer import gradient_of
from megatron.core.optimizer.offload import HostBufferSlot, chosen
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.params.param_info import FlatPart, ParamInfo, info_of, local_part

_HALF = (torch.bfloat16, torch.float16)


class Part(NamedTuple):
    """Elements ``start`` to ``stop`` of what this rank holds of a parameter, flattened."""

    start: int
    stop: int
    copy: int  # this rank's number among the ranks that update the same part
    num_copies: int


@dataclass(frozen=True, eq=False)
class OptimizedParam:
    """A parameter of the model and the tensor that is updated for it, often the same memory.

    ``part``: what is updated here, while other ranks update the rest; ``main``, its gradient and
    its state are then flat, and ``info`` says where they lie.  None: all of it.  ``host``: where
    main lies, if in host memory.
    """

    name: str
    info: ParamInfo
    model: nn.Parameter
    main: nn.Parameter
    part: Part | None = None
    host: HostBufferSlot | None = None

    @property
    def has_main(self) -> bool:
        """Whether a main parameter in another format stands beside the model's."""
        return self.main.dtype != self.model.dtype

    @property
    def is_saved_apart(self) -> bool:
        """Whether a checkpoint has more bits of it than the weights that layers see."""
        return self.has_main or self.info.dtype is not None

    @property
    def model_values(self) -> Tensor:
        """Where the model holds what ``main`` is the master of."""
        return _part_of(local_part(self.model.detach()), self.part)

    def bind_main_grad(self) -> Tensor:
        """Make the summed gradient ``main.grad``; returns it, as it lies on the device.

        No gradient counts as zero: whether a parameter decays must not depend on the layout.
        """
        grad = gradient_of(self.model)
        grad = torch.zeros_like(local_part(self.model)) if grad is None else grad
        grad = _part_of(grad, self.part)
        if self.host is None:
            self.main.grad = grad
        else:
            self.host.fetch(grad)
        return grad


def optimized_params(
    names: dict[nn.Parameter, str],
    groups: Sequence[dict[str, Any]],
    config: OptimizerConfig,
    parts: Mapping[nn.Parameter, Part] | None = None,
) -> tuple[list[OptimizedParam], list[dict[str, Any]]]:
    """One record per parameter, and ``groups`` with what is updated in place of the parameters.

    ``parts``: what this rank updates, and nothing of parameters that are not among them.
    """
    mine = [[p for p in g["params"] if parts is None or p in parts] for g in groups]
    every = [p for members in mine for p in members]
    part_of = dict.fromkeys(every) if parts is None else parts
    on_host = dict.fromkeys(every, False)
    if config.optimizer_cpu_offload and device.host_is_apart():
        numels = [_part_of(local_part(p.detach()), part_of[p]).numel() for p in every]
        fraction = config.optimizer_offload_fraction
        on_host = dict(zip(every, chosen(numels, fraction), strict=True))
    params: list[OptimizedParam] = []
    main_groups: list[dict[str, Any]] = []
    for group, members in zip(groups, mine, strict=True):
        records = [_record(names[p], p, part_of[p], config, on_host[p]) for p in members]
        params.extend(records)
        main_groups.append({**group, "params": [record.main for record in records]})
    return params, main_groups


def _record(
    name: str, param: nn.Parameter, part: Part | None, config: OptimizerConfig, on_host: bool
) -> OptimizedParam:
    local, info = local_part(param), info_of(param)
    values = _part_of(local.detach(), part)
    is_half, host = param.dtype in _HALF, None
    if on_host:
        host = HostBufferSlot(values, getattr(param, "main_grad", param).dtype, config)
        main = host.main
    elif is_half and param.dtype not in _directly(config, info, values):
        main = nn.Parameter(values.float())
    else:
        is_same = part is None and local is param and not is_half
        main = param if is_same else nn.Parameter(values)
    if main is not param:
        main.grad_dtype = None  # gradients come in the buffer's format
    if part is not None:
        held = info.part.start if info.part else 0
        whole, start = tuple(param.shape), held + part.start
        info = replace(info, part=FlatPart(whole, start, part.copy, part.num_copies))
    return OptimizedParam(name, info, param, main, part, host)


def _directly(config: OptimizerConfig, info: ParamInfo, values: Tensor) -> tuple[torch.dtype, ...]:
    """16-bit formats of parameters that have no fp32 main parameter beside them."""
    is_whole = config.main_params_dtype == "fp32"  # 16 bits beside 16 of bf16; not of fp16
    # What was gathered as codes is no longer the upper half of anything.
    if (is_whole and info.travels_as_codes) or not values.is_contiguous():
        return ()
    # Adam's kernel on a CPU is as fast on 16 and 16 bits as on fp32: a third copy has no use.
    if config.use_precision_aware_optimizer or (
        config.optimizer == "adam" and cpu_kernels.take(values)
    ):
        return (torch.bfloat16,) if is_whole else (torch.bfloat16, torch.float16)
    return ()


def _part_of(tensor: Tensor, part: Part | None) -> Tensor:
    """A flat view; all of ``tensor`` as it is for None."""
    return tensor if part is None else tensor.view(-1)[part.start : part.stop]


@torch.no_grad()
def copy_main_to_model(params: Sequence[OptimizedParam]) -> None:
    """Round the updated main parameters into the model."""
    pairs = [(p.model_values, p.main) for p in params if p.has_main or p.host]
    if pairs:
        torch._foreach_copy_([model for model, _ in pairs], [main for _, main in pairs])


@torch.no_grad()
def copy_model_to_main(params: Sequence[OptimizedParam]) -> None:
    """Start the main parameters from the model's, after a checkpoint without optimizer state."""
    pairs = [(p.model_values, p.main) for p in params if p.has_main or p.host]
    if pairs:
        torch._foreach_copy_([main for _, main in pairs], [model for model, _ in pairs])
