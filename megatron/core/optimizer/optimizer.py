"""The optimizer step: gradient norm, overflow check, clipping, update, copy into the model.

Inf or NaN in any gradient makes the norm non-finite, on every rank alike, since the norm is reduced
over all of them: no separate collective decides whether to skip.  Such a step updates no parameter.
With a loss scale it is skipped and the scale shrinks; without one the rerun state machine rejects
it if the run checks for NaN, else it is skipped.

The host queues the update before it reads the norm: the device decides whether the step changes
anything, and computes the update while the host prepares the next step.  Where the device cannot
decide, the host reads the norm first (`MegatronOptimizer._can_queue`).

Order of collectives: the norm, then the count of zeros if it is logged (`clip_grads`); before
NonFiniteError, one all-gather of the error messages of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from megatron.core import device
from megatron.core.config.errors import NonFiniteError
from megatron.core.diagnostics.timers import Timers, timed
from megatron.core.distributed.non_finite import non_finite_gradients
from megatron.core.optimizer.clip_grads import count_zeros, gradient_divisor, squared_norm
from megatron.core.optimizer.grad_scaler import DynamicGradScaler, GradScaler
from megatron.core.optimizer.mixed_precision import (
    OptimizedParam,
    ShardRange,
    batches,
    copy_main_to_model,
    copy_model_to_main,
    optimized_params,
)
from megatron.core.optimizer.muon import Muon
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import ParamGroup
from megatron.core.optimizer.reduced_precision_state import StateStorage
from megatron.core.optimizer.update_rules import RuleState, UpdateRule, update_rule
from megatron.core.parallel.collectives import all_gather_json
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import ParamInfo
from megatron.core.rerun.state_machine import RerunStateMachine, get_rerun_state_machine


class OptimizerState(TypedDict, total=False):
    """Result of `MegatronOptimizer.state_dict`, with the keys of Megatron-LM."""

    optimizer: RuleState
    grad_scaler: Mapping[str, float]
    fp32_from_fp16_params: list[list[Tensor]]


class MegatronOptimizer:
    """Optimizer of the parameters of all model chunks of this rank.

    ``parts``: the part of each sharded parameter that this rank updates; ``spans``: the element
    ranges of every rank that shares the parameter (Muon needs them to assemble a matrix).
    """

    # Whether data-parallel ranks hold different parts of the gradients: norms then sum over them.
    is_sharded = False

    def __init__(
        self,
        config: OptimizerConfig,
        names: dict[nn.Parameter, str],
        param_groups: Sequence[ParamGroup],
        groups: ProcessGroupCollection,
        *,
        parts: Mapping[nn.Parameter, ShardRange] | None = None,
        spans: Mapping[nn.Parameter, Sequence[tuple[int, int]]] | None = None,
        grad_scaler: GradScaler | None = None,
        check_for_nan: bool = False,
    ) -> None:
        self.config = config
        self.groups = groups
        self.grad_scaler = grad_scaler
        self.check_for_nan = check_for_nan
        self.timers: Timers | None = None
        self.params, main_groups = optimized_params(names, param_groups, config, parts)
        if any(p.info.part is not None for p in self.params):
            self.is_sharded = True
        self.rule = self._make_rule(main_groups, spans or {})
        # Stream of the copies between device and offloaded parameters.
        self._copies: device.Stream | None = None

    def _make_rule(
        self,
        groups: Sequence[ParamGroup],
        spans: Mapping[nn.Parameter, Sequence[tuple[int, int]]],
    ) -> UpdateRule:
        """Build the update rule that --optimizer selects."""
        config = self.config
        if not config.has_muon:
            return update_rule(config.optimizer)(groups, config)
        others = [group for group in groups if not group["is_matrix"]]
        return Muon(
            groups,
            config,
            scalar=update_rule(config.muon_scalar_optimizer)(others, config),
            params=self.params,
            spans=spans,
            process_groups=self.groups,
        )

    @property
    def param_groups(self) -> list[ParamGroup]:
        """Groups of main parameters; the scheduler writes their ``lr`` and ``weight_decay``."""
        return self.rule.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients outside the buffers of the data-parallel wrapper."""
        del set_to_none
        for p in self.params:
            p.model.grad = p.main.grad = None

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale, to call backward on."""
        return loss if self.grad_scaler is None else loss * self.grad_scaler.scale

    def get_loss_scale(self) -> Tensor:
        """Return the current loss scale; 1 without a gradient scaler."""
        return torch.tensor(1.0 if self.grad_scaler is None else self.grad_scaler.scale)

    def step(self) -> tuple[bool, float | None, int | None]:
        """Update the parameters; return (whether updated, gradient norm, number of zeros).

        Collective over the ranks of the model.  The norm is the one before clipping, of unscaled
        gradients.  A skipped step returns (False, None, None).  Where the run checks for it, a norm
        that is not finite is rejected by the rerun state machine, and without one raises
        NonFiniteError.  A pass that the machine rejects raises PassRejected and changes nothing but
        gradients.
        """
        machine = get_rerun_state_machine()
        scale = 1.0 if self.grad_scaler is None else self.grad_scaler.scale
        with self._timed("optimizer-copy-to-main-grad"):
            # The compute stream reads the gradients, too: it allocates those that are missing.
            grads = [(p.info, p.bind_main_grad()) for p in self.params]
            self._fetch_offloaded([grad for _, grad in grads])
        with self._timed("optimizer-clip-main-grad"):
            squares = squared_norm(grads, self.groups, is_sharded=self.is_sharded)
            sent = machine.send_norm(squares, is_checked=self.is_checked)
        is_queued = self._can_queue(machine)
        if is_queued:
            self.rule.begin_step(sent.accepted)
            self._update(gradient_divisor(squares, scale, self.config.clip_grad).float())
        # The host waits for the device to compute the norm.
        squared = machine.read_squared_norm(sent)
        norm = math.sqrt(squared)
        found_inf = not math.isfinite(norm)
        if self.is_checked:
            self._validate_norm(machine, norm)
        machine.check_pass()
        if self.grad_scaler is not None:
            self.grad_scaler.update(found_inf)
        num_zeros = None
        if not found_inf and not is_queued:
            if self.config.log_num_zeros_in_grad:
                with self._timed("optimizer-count-zeros"):
                    num_zeros = count_zeros(grads, self.groups, is_sharded=self.is_sharded)
            self.rule.begin_step()
            # Unscaling and clipping are one division, which the update kernels apply as they read
            # the gradients: the buffers themselves stay scaled.
            squares = torch.tensor(squared, dtype=torch.float64)
            self._update(float(gradient_divisor(squares, scale, self.config.clip_grad)))
        self.drop_gradients()
        return (False, None, None) if found_inf else (True, norm / scale, num_zeros)

    @property
    def is_checked(self) -> bool:
        """Whether a norm that is not finite is rejected, instead of skipping the step."""
        return self.check_for_nan and not isinstance(self.grad_scaler, DynamicGradScaler)

    def _validate_norm(self, machine: RerunStateMachine, norm: float) -> None:
        """Let ``machine`` reject a norm that is not finite.  Raises NonFiniteError without one."""
        culprits: str | None = None
        if not math.isfinite(norm):
            culprits = non_finite_gradients(
                (p.name, p.main.grad) for p in self.params if p.main.grad is not None
            )
            if not machine.is_running:
                # A rank that found its NaN before the reduction has already raised.  The others
                # then wait in this collective until they are stopped: the user sees the message of
                # the first rank, which names the parameter.
                found = all_gather_json(culprits, self.groups.world)
                sentences = (sentence for sentence in found if sentence is not None)
                raise NonFiniteError(next(sentences, "the norm of finite gradients overflows"))
        machine.validate_result(
            norm,
            lambda value: not math.isfinite(value),
            "found NaN or Inf in the global gradient norm",
            # The reduction over data-parallel ranks gives each of them the NaN of the others.
            is_shared=culprits is None or self.groups.dp_cp.size() > 1,
            detail=lambda: "" if culprits is None else f"; {culprits}",
        )

    def _fetch_offloaded(self, grads: Sequence[Tensor]) -> None:
        """Start to copy the gradients of offloaded parameters to the host."""
        places = [p.host for p in self.params]
        if self.config.overlap_cpu_optimizer_d2h_h2d and any(places):
            self._copies = self._copies or device.side_stream()
            device.wait_stream(self._copies)
        with device.on_stream(self._copies):
            for place, grad in zip(places, grads, strict=True):
                if place is not None:
                    place.fetch(grad)

    def _can_queue(self, machine: RerunStateMachine) -> bool:
        """Return whether the device can decide if a step is updated.  The same on all ranks.

        Offloaded parameters are updated by the host, and zeros are counted in gradients of which
        torch's kernels leave the unscaled values.
        """
        config = self.config
        return (
            machine.judges_by_norm
            and self.rule.skips_on_device
            and not config.optimizer_cpu_offload
            and not config.log_num_zeros_in_grad
        )

    def reload_model_params(self) -> None:
        """Copy model parameters to main parameters, after loading weights without their state."""
        copy_model_to_main(self.params)
        for p in self.params:
            main = self.rule.state_of(p.main).get("main")
            if isinstance(main, StateStorage):
                main.write(p.model_values.float())

    def named_state(
        self, *, every_main: bool = False
    ) -> Iterator[tuple[str, ParamInfo, dict[str, Tensor | StateStorage]]]:
        """Yield each parameter's layout-independent name, its record and its state.

        The state consists of the update rule's tensors (zero before the first update), and of
        "fp32_param" if the model's dtype differs from the main parameter's (``every_main``: of
        every parameter).  Tensors are the live, writable ones; state in reduced precision is a
        `StateStorage`, which is read and written in fp32.  Shapes are the parameter's local shape,
        or flat as described by ``info.part``.  After writing, call `load_scalar_state`.
        """
        for p in self.params:
            state = {k: kept for k, kept in self.rule.state_of(p.main).items() if k != "step"}
            main = state.pop("main", None)
            if main is None and (every_main or p.is_saved_apart):
                main = p.main.data
            yield p.name, p.info, state if main is None else {"fp32_param": main, **state}

    def _update(self, divisor: float | Tensor) -> None:
        """Update by the gradients divided by ``divisor``, and copy the result into the model."""
        with self._timed("optimizer-inner-step"):
            self._step(self.params, divisor)
        with self._timed("optimizer-copy-main-to-model-params"):
            # A fused kernel removes the weights that it has rounded itself; copy the others.
            left = self.rule.weights
            self._publish([p for p in self.params if p.main in left and not p.host])

    def _step(self, params: Sequence[OptimizedParam], divisor: float | Tensor) -> None:
        """Update ``params``, and copy offloaded ones back to the device.

        Device parameters go first: their kernels run while gradients of offloaded parameters are
        still being copied to the host.  Then each batch of offloaded parameters waits for its
        gradients, is updated on the CPU, and is copied back while the next batch is updated.
        """
        places = [p.host for p in params if p.host]
        is_all = not places and params is self.params
        self.rule.weights = {
            p.main: p.host.result if p.host else p.model_values for p in params if p.has_main
        }
        self.rule.step(divisor, None if is_all else {p.main for p in params if not p.host})
        values = {p.host: p.model_values for p in params if p.host}
        is_overlapped = self.config.overlap_cpu_optimizer_d2h_h2d
        for batch in batches(places, is_overlapped=is_overlapped):
            for place in batch:
                place.wait()
            self.rule.step(divisor, {place.main for place in batch})
            with device.on_stream(self._copies), torch.no_grad():
                for place in batch:
                    is_rounded = place.main not in self.rule.weights
                    place.give_back(values[place], is_rounded=is_rounded)
        # Later work on the main stream, such as the next forward pass, must see the copies.
        device.join_stream(self._copies)

    def _publish(self, left: Sequence[OptimizedParam]) -> None:
        """Copy the main parameters of ``left`` into the model; mark all parameters as changed.

        Collective if parameters are sharded (the all-gather of `DistributedOptimizer`).
        """
        copy_main_to_model(left)
        # A fused kernel that updates in place does not change the version.  Cached copies of
        # weights, for example in fp8, compare the version to notice an update.
        torch.autograd.graph.increment_version([p.model for p in self.params])

    def _publish_loaded(self) -> None:
        """Copy loaded main parameters into the model.

        A checkpoint has an offloaded parameter that is not ``is_saved_apart`` as the model's weight
        alone, so its main parameter is copied from the model.
        """
        on_host = [p for p in self.params if p.host]
        copy_main_to_model([p for p in on_host if p.is_saved_apart])
        copy_model_to_main([p for p in on_host if not p.is_saved_apart])
        self._publish([p for p in self.params if not p.host])

    def scalar_state(self) -> dict[str, object]:
        """Return the JSON state that is the same on all ranks: step count, loss scale, groups.

        The groups are saved for other programs: a resumed run takes the hyperparameters from its
        own command line.
        """
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        state: dict[str, object] = {"step": self.rule.steps_done, "param_groups": groups}
        if self.grad_scaler is not None:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    def load_scalar_state(self, state: Mapping[str, Any]) -> None:
        """Restore `scalar_state`, after the tensors of `named_state` were written.

        Collective if parameters are sharded.
        """
        self.rule.steps_done = state["step"]
        self.load_scaler_state(state.get("grad_scaler"))
        self._publish_loaded()

    def state_dict(self) -> OptimizerState:
        """Return this rank's state, for a run in the same layout.  Main parameters are in fp32."""
        state: OptimizerState = {"optimizer": self.rule.state_dict()}
        if self.grad_scaler is not None:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        if any(mains := self._mains()):
            state["fp32_from_fp16_params"] = [
                [main.read() if isinstance(main, StateStorage) else main.data for main in group]
                for group in mains
            ]
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: OptimizerState) -> None:
        """Restore `state_dict`; groups keep this run's hyperparameters, not the saved ones."""
        self.rule.load_state_dict(state_dict["optimizer"])
        self.load_scaler_state(state_dict.get("grad_scaler"))
        if "fp32_from_fp16_params" in state_dict:
            flat = [main for group in state_dict["fp32_from_fp16_params"] for main in group]
            mains = [main for group in self._mains() for main in group]
            for main, values in zip(mains, flat, strict=True):
                main.write(values) if isinstance(main, StateStorage) else main.copy_(values)
        else:
            copy_model_to_main(self.params)
        self._publish_loaded()

    def _mains(self) -> list[list[Tensor | StateStorage]]:
        """Return the main parameters of 16-bit weights, one list per group."""
        beside = {p.main: p.main for p in self.params if p.has_main}
        mains = [
            [self.rule.state_of(main).get("main", beside.get(main)) for main in group["params"]]
            for group in self.param_groups
        ]
        return [[main for main in group if main is not None] for group in mains]

    def load_scaler_state(self, state_dict: Mapping[str, float] | None) -> None:
        """Restore the loss scale, if both the run and the checkpoint have one."""
        if self.grad_scaler is not None and state_dict is not None:
            self.grad_scaler.load_state_dict(state_dict)

    def drop_gradients(self) -> None:
        """Drop ``main.grad``, which aliases the gradient buffer.

        Autograd would accumulate into it in the next backward pass, without the wrapper's hook.
        """
        for p in self.params:
            p.main.grad = None
        device.join_stream(self._copies)

    def state_tensors(self, *, on_host: bool) -> list[Tensor]:
        """Return main parameters and the state allocated so far, on the device or on the host."""
        mains = [p.main for p in self.params if bool(p.host) == on_host]
        copies = [
            t for p in self.params if p.host and on_host for t in (p.host.grad, p.host.result)
        ]
        return [*mains, *self.rule.tensors(mains), *copies]

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        """Yield main parameters and the state allocated so far, each with the name of its kind."""
        for p in self.params:
            yield "main parameters", p.main
            for kind, kept in self.rule.state.get(p.main, {}).items():
                yield from (
                    (kind, t) for t in ((kept,) if isinstance(kept, Tensor) else kept.tensors)
                )

    def _timed(self, name: str) -> AbstractContextManager[None]:
        return timed(self.timers, name, log_level=1, barrier=self.config.barrier_with_L1_time)
