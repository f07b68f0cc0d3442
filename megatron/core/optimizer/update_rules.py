"""The update rules AdamW, SGD and Lion, each one kernel call per group, device and dtype.

AdamW and SGD call the kernels of ``torch.optim`` with ``fused=True``, so their results are bitwise
identical to it.  The classes of ``torch.optim`` are not used, since constructing one imports
torch's compiler, which takes longer than the rest of the start of a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError
from megatron.core.fusions import kernels
from megatron.core.fusions.adam_step import Moment, Step, Updated
from megatron.core.optimizer.optimizer_config import OPTIMIZERS, OptimizerConfig
from megatron.core.optimizer.param_groups import ParamGroup
from megatron.core.optimizer.reduced_precision_state import (
    QuantizedState,
    SideMaster,
    SplitMaster,
    StateChunk,
    StateStorage,
    dtype_of,
    is_fp32,
    is_plain,
    stretches,
)

State = dict[str, Tensor | StateStorage]


class UpdateRule(ABC):
    """Update rule with its groups of main parameters and their optimizer state.

    For a 16-bit parameter that is its own main parameter, ``state["main"]`` stores the missing bits
    (`SplitMaster`) or the main parameter in reduced precision (`SideMaster`).
    """

    # Whether each element is updated by its own gradient and state alone.  Only then may a rank
    # update parts of parameters (distributed optimizer, FSDP, tensor parallelism).
    is_element_wise = True
    # Whether `begin_step` may leave it to the device whether the step changes anything.
    skips_on_device = False

    def __init__(self, groups: Sequence[ParamGroup], config: OptimizerConfig) -> None:
        self.config = config
        self.param_groups = list(groups)
        self.state: dict[nn.Parameter, State] = {}
        # Main parameter -> 16-bit model weight to be written after the update.  A kernel that
        # writes the weight itself removes the entry; the optimizer copies those that are left.
        self.weights: dict[nn.Parameter, Tensor] = {}
        # One step count per device, shared by the state of all parameters on it.
        devices = {param.device for group in self.param_groups for param in group["params"]}
        self._steps = {d: torch.zeros((), dtype=torch.float32, device=d) for d in devices}
        # Whether the running step changes anything, 1 or 0 (None: it does), and the opposite for
        # torch's kernels, unless the host can read it without waiting.
        self._accepted: Tensor | None = None
        self._found_inf: Tensor | None = None

    @abstractmethod
    def new_state(self, param: nn.Parameter) -> State:
        """Return the state of ``param`` before its first update."""

    def update_at_once(
        self, params: Sequence[nn.Parameter], group: ParamGroup, divisor: Tensor | None
    ) -> Sequence[nn.Parameter]:
        """Update the parameters whose stored state a fused kernel reads; return the others.

        ``divisor`` (float32) of the gradients; None for 1.
        """
        return params

    @abstractmethod
    def update(self, chunk: StateChunk, group: ParamGroup, grad_scale: Tensor | None) -> None:
        """Update ``chunk``, of one device and dtype, by its gradients divided by ``grad_scale``."""

    def state_of(self, param: nn.Parameter) -> State:
        """Return the state of ``param``, allocated at the first call."""
        if param not in self.state:
            self.state[param] = self.new_state(param)
            dtype = self.config.main_params_dtype
            if param.dtype is torch.bfloat16 and is_fp32(dtype):
                self.state[param]["main"] = SplitMaster(param.detach())
            elif param.dtype in (torch.bfloat16, torch.float16):
                self.state[param]["main"] = SideMaster(param.detach(), dtype_of(dtype))
        return self.state[param]

    def _move_new_state_to_right_device(self) -> None:
        """Move the state to the devices of the parameters: projects call it after offloading."""
        for param, state in self.state.items():
            for name, value in state.items():
                state[name] = value.to(param.device)

    @property
    def steps_done(self) -> float:
        """Number of updates so far."""
        return max((float(steps) for steps in self._steps.values()), default=0.0)

    @steps_done.setter
    def steps_done(self, count: float) -> None:
        for steps in self._steps.values():
            steps.fill_(count)

    def begin_step(self, accepted: Tensor | None = None) -> None:
        """Increment the step count: called once per step, before the first call of `step`.

        ``accepted``: a truth value on the device; if it is False, the step changes nothing, not
        even the count.  Only for rules with ``skips_on_device``.
        """
        self._accepted = self._found_inf = None
        if accepted is not None:
            self._accepted = accepted.float()
            self._found_inf = None if accepted.is_cpu else 1.0 - self._accepted
        for steps in self._steps.values():
            steps.add_(1.0 if self._accepted is None else self._accepted)

    @torch.no_grad()
    def step(
        self, divisor: float | Tensor = 1.0, only: Container[nn.Parameter] | None = None
    ) -> None:
        """Update every parameter by its ``grad`` divided by ``divisor``.

        A step may be several calls after one `begin_step`, each with some parameters in ``only``.
        """
        if self._accepted is not None and self._accepted.is_cpu and not self._accepted:
            return
        for group in self.param_groups:
            # One kernel call takes tensors of one device and dtype.
            lists: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
            for param in group["params"]:
                if only is None or param in only:
                    lists.setdefault((param.device, param.dtype), []).append(param)
            for (where, _), alike in lists.items():
                scale = _on_device(divisor, where)
                params = self.update_at_once(alike, group, scale)
                if not params:
                    continue
                states = [self.state_of(param) for param in params]
                for part in stretches(params, _gradients(params), states, self._steps[where]):
                    self.update(part, group, scale)
                    part.put_back()


def register_optimizer(name: str, rule: type[UpdateRule]) -> None:
    """Add an update rule for --optimizer ``name``.  Raises ConfigError for a name that is taken."""
    if not (isinstance(rule, type) and issubclass(rule, UpdateRule)):
        raise ConfigError(f"register_optimizer({name!r}, ...): {rule!r} is no class of UpdateRule")
    OPTIMIZERS.register(name, rule)


def update_rule(name: str) -> type[UpdateRule]:
    """Return the rule that --optimizer ``name`` selects.  Raises ConfigError if unknown."""
    return cast(type[UpdateRule], OPTIMIZERS.find(name))  # `register_optimizer` has checked it


class AdamW(UpdateRule):
    """Adam with decoupled weight decay."""

    def __init__(self, groups: Sequence[ParamGroup], config: OptimizerConfig) -> None:
        own: ParamGroup = {
            "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_eps,
        }
        super().__init__([{**own, **group} for group in groups], config)
        self.skips_on_device = type(self) is AdamW  # a derived class may have another `update`
        self._corrections: dict[object, Tensor] = {}  # of this step, which may update by buckets

    def begin_step(self, accepted: Tensor | None = None) -> None:
        super().begin_step(accepted)
        self._corrections = {}

    def new_state(self, param: nn.Parameter) -> State:
        return {
            "step": self._steps[param.device],
            "exp_avg": _zeros(param, self.config.exp_avg_dtype),
            "exp_avg_sq": _zeros(param, self.config.exp_avg_sq_dtype, is_square=True),
        }

    def update_at_once(
        self, params: Sequence[nn.Parameter], group: ParamGroup, divisor: Tensor | None
    ) -> Sequence[nn.Parameter]:
        grads = _gradients(params)
        fused = kernels.find("adam", *params, *grads)
        if fused is None and kernels.is_available("adam", *params, *grads):
            for param in params:  # of a simulated GPU, whose kernel allocates nothing else
                self.state_of(param)
            return []
        if fused is None:
            return params
        taken: list[Updated] = []
        rest: list[nn.Parameter] = []
        for param, grad in zip(params, grads, strict=True):
            state = self.state_of(param)
            mean, square = (_moment(state[key]) for key in ("exp_avg", "exp_avg_sq"))
            main = state.get("main")
            weight = self.weights.get(param)
            if not (
                weight is not None
                and weight.dtype in fused.WEIGHTS
                and weight.is_contiguous()
                and param.dtype == torch.float32
            ):
                weight = None  # the kernel cannot write it
            if (
                isinstance(main, SideMaster)
                or (weight is None and is_plain(param, grad, state))
                or not (param.is_contiguous() and grad.is_contiguous())
                or not all(values.dtype in fused.MOMENTS for values, *_ in (mean, square))
            ):
                rest.append(param)
                continue
            lower = main.lower if isinstance(main, SplitMaster) else None
            if weight is not None:
                del self.weights[param]
            taken.append(Updated(param.detach(), lower, grad, mean, square, weight))
        if taken:
            fused.update(taken, self._step_of(group, divisor, params[0].device))
        return rest

    def _step_of(self, group: ParamGroup, divisor: Tensor | None, where: torch.device) -> Step:
        number, (beta1, beta2) = self._steps[where], group["betas"]
        key = where, beta1, beta2
        if key not in self._corrections:
            both = torch.stack([1 - beta ** number.double() for beta in (beta1, beta2)])
            self._corrections[key] = both.float()
        return Step(
            number=number,
            corrections=self._corrections[key],
            divisor=torch.ones((), device=where) if divisor is None else divisor,
            accepted=self._accepted,
            lr=group["lr"],
            betas=(beta1, beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )

    def update(self, chunk: StateChunk, group: ParamGroup, grad_scale: Tensor | None) -> None:
        torch._fused_adamw_(
            chunk.values,
            chunk.grads,
            [state["exp_avg"] for state in chunk.states],
            [state["exp_avg_sq"] for state in chunk.states],
            [],
            # Not the entries of the states, which projects may have moved to the host and back.
            [self._steps[chunk.values[0].device]] * len(chunk.values),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
            found_inf=self._found_inf,
        )


class SGD(UpdateRule):
    """SGD with momentum; weight decay is added to the gradient."""

    def __init__(self, groups: Sequence[ParamGroup], config: OptimizerConfig) -> None:
        super().__init__([{"momentum": config.sgd_momentum, **group} for group in groups], config)
        self.skips_on_device = type(self) is SGD
        self.has_momentum = config.sgd_momentum != 0.0

    def new_state(self, param: nn.Parameter) -> State:
        return {"momentum_buffer": _zeros(param)} if self.has_momentum else {}

    def update(self, chunk: StateChunk, group: ParamGroup, grad_scale: Tensor | None) -> None:
        torch._fused_sgd_(
            chunk.values,
            chunk.grads,
            [state["momentum_buffer"] for state in chunk.states if self.has_momentum],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,  # without dampening, a buffer of zeros gives the same first step
            grad_scale=grad_scale,
            found_inf=self._found_inf,
        )


class Lion(UpdateRule):
    """Lion (arXiv 2302.06675): the sign of interpolated momentum, with decoupled weight decay."""

    def __init__(self, groups: Sequence[ParamGroup], config: OptimizerConfig) -> None:
        betas = config.lion_beta1, config.lion_beta2
        super().__init__([{"betas": betas, **group} for group in groups], config)

    def new_state(self, param: nn.Parameter) -> State:
        return {"exp_avg": _zeros(param, self.config.exp_avg_dtype)}

    def update(self, chunk: StateChunk, group: ParamGroup, grad_scale: Tensor | None) -> None:
        means = [state["exp_avg"] for state in chunk.states]
        grads = chunk.grads
        beta1, beta2 = group["betas"]
        if grad_scale is not None:
            grads = list(torch._foreach_div(grads, grad_scale))
        steps = torch._foreach_lerp(means, grads, 1.0 - beta1)
        torch._foreach_sign_(steps)
        torch._foreach_mul_(chunk.values, 1.0 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(chunk.values, steps, alpha=-group["lr"])
        torch._foreach_lerp_(means, grads, 1.0 - beta2)


def _zeros(
    param: Tensor, dtype: torch.dtype | str = torch.float32, *, is_square: bool = False
) -> Tensor | StateStorage:
    """Return state of zeros like ``param``: fp32 or wider, or quantized to ``dtype``."""
    if not is_fp32(dtype):
        return QuantizedState(param, dtype_of(dtype), is_square=is_square)
    return torch.zeros_like(param, dtype=torch.promote_types(param.dtype, torch.float32))


def _on_device(divisor: float | Tensor, where: torch.device) -> Tensor | None:
    """Return a divisor as torch's kernels take it: on the device; None for one that is known as 1.

    The values of a GPU are not known: torch.full runs on it, and the host does not wait.
    """
    if isinstance(divisor, Tensor) and not divisor.is_cpu:
        return divisor
    return torch.full((), float(divisor), device=where) if divisor != 1.0 else None


def _moment(kept: Tensor | StateStorage) -> Moment:
    """Return a moment's stored values, its block exponents, and whether it stores square roots."""
    if isinstance(kept, Tensor):
        return kept, None, False
    assert isinstance(kept, QuantizedState), "a moment is no main parameter"
    return kept.values, kept.exponents, kept.is_square


def _gradients(params: Sequence[Tensor]) -> list[Tensor]:
    grads = [p.grad for p in params if p.grad is not None]
    assert len(grads) == len(params), "a parameter is updated without a gradient"
    return grads
