"""What the optimizer updates: fp32 main parameters beside 16-bit ones, others directly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.grad_buffer import gradient_of
from megatron.core.param_info import ParamInfo, info_of

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class OptimizedParam:
    """A parameter of the model and the tensor that is updated for it, often the same."""

    name: str
    info: ParamInfo
    model: nn.Parameter
    main: nn.Parameter

    @property
    def has_main(self) -> bool:
        """Whether a main parameter stands beside the model's."""
        return self.main is not self.model

    def hand_over_gradient(self) -> Tensor:
        """Make the summed gradient ``main.grad``, in main's dtype; returns it.

        No gradient counts as zero: whether a parameter decays must not depend on the layout.
        """
        grad = gradient_of(self.model)
        if grad is None:
            grad = torch.zeros_like(self.model)
        self.main.grad = grad if grad.dtype == self.main.dtype else grad.to(self.main.dtype)
        return self.main.grad


def optimized_params(
    names: dict[nn.Parameter, str], groups: Sequence[dict[str, Any]]
) -> tuple[list[OptimizedParam], list[dict[str, Any]]]:
    """One record per parameter, and ``groups`` with what is updated in place of the parameters."""
    params: list[OptimizedParam] = []
    main_groups: list[dict[str, Any]] = []
    for group in groups:
        records = [OptimizedParam(names[p], info_of(p), p, _main_of(p)) for p in group["params"]]
        params.extend(records)
        main_groups.append({**group, "params": [record.main for record in records]})
    return params, main_groups


def _main_of(param: nn.Parameter) -> nn.Parameter:
    if param.dtype not in _HALF:
        return param
    return nn.Parameter(param.detach().float())


@torch.no_grad()
def copy_main_to_model(params: Sequence[OptimizedParam]) -> None:
    """Round the updated main parameters into the model."""
    pairs = [(p.model, p.main) for p in params if p.has_main]
    if pairs:
        torch._foreach_copy_([model for model, _ in pairs], [main for _, main in pairs])


@torch.no_grad()
def copy_model_to_main(params: Sequence[OptimizedParam]) -> None:
    """Start the main parameters from the model's, after a checkpoint without optimizer state."""
    pairs = [(p.model, p.main) for p in params if p.has_main]
    if pairs:
        torch._foreach_copy_([main for _, main in pairs], [model for model, _ in pairs])
