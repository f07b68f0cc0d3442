"""The optimizer step: gradient norm, overflow check, clipping, update, copy into the model.

Inf or NaN in any gradient makes the norm non-finite, on every rank alike, since the norm is reduced
over all of them: no separate collective decides whether to skip.  Such a step updates no parameter.
With a loss scale it is skipped and the scale shrinks; without one the rerun state machine rejects
it if the run checks for NaN, else it is skipped.

The host queues the update before it reads the norm: the device decides whether the step changes
anything, and computes the update while the host prepares the next step.  Where the device cannot
decide, the host reads the norm first.

Order of collectives: the norm, then the count of zeros if it is logged (`clip_grads`); before
NonFiniteError, one all-gather of the error messages of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import device
from megatron.core.config.errors import CheckpointError, NonFiniteError
from megatron.core.diagnostics.timers import timed
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.distributed.data_parallel_base import DataParallelBase
from megatron.core.distributed.non_finite import non_finite_gradients
from megatron.core.optimizer.clip_grads import count_zeros, gradient_divisor, squared_norm
from megatron.core.optimizer.grad_scaler import DynamicGradScaler, GradScaler
from megatron.core.optimizer.mixed_precision import (
    OptimizedParam,
    ShardRange,
    batches,
    copy_main_to_model,
    optimized_params,
)
from megatron.core.optimizer.muon import MatrixRule
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import (
    ParamGroup,
    trainable_parameters,
    without_wrappers,
)
from megatron.core.optimizer.reduced_precision_state import StateStorage
from megatron.core.optimizer.update_rules import State, UpdateRule, update_rule
from megatron.core.parallel.collectives import all_gather_json
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import ParamInfo, local_part
from megatron.core.rerun.state_machine import RerunStateMachine, get_rerun_state_machine


class MegatronOptimizer:
    """Optimizer of the parameters of all model chunks of this rank.

    ``parts``: the part of each sharded parameter that this rank updates.
    """

    # Whether data-parallel ranks hold different parts of the gradients: norms then sum over them.
    is_sharded = False
    # Every rank takes part in a step, also one without parameters.
    is_stub_optimizer = False

    def __init__(
        self,
        config: OptimizerConfig,
        model_chunks: Sequence[nn.Module],
        param_groups: Sequence[ParamGroup],
        groups: ProcessGroupCollection,
        grad_scaler: GradScaler | None = None,
        parts: Mapping[nn.Parameter, ShardRange] | None = None,
    ) -> None:
        self.config = config
        self.groups = groups
        self.grad_scaler = grad_scaler
        self.timers = config.timers
        self.model_chunks: Sequence[nn.Module] = model_chunks
        wrappers = [chunk for chunk in model_chunks if isinstance(chunk, DataParallelBase)]
        self.check_for_nan = any(each.ddp_config.check_for_nan_in_grad for each in wrappers)
        # Attention layers that record their largest logits for --qk-clip.
        modules: list[Any] = [module for chunk in model_chunks for module in chunk.modules()]
        self._qk_layers = [m for m in modules if hasattr(m, "qk_clip_rows") and m.config.qk_clip]
        names = {param: name for name, param in trainable_parameters(model_chunks)}
        self.params, main_groups = optimized_params(names, param_groups, config, parts)
        if any(p.info.part is not None for p in self.params):
            self.is_sharded = True
        self.rule: UpdateRule
        rule = update_rule(config.optimizer)
        if issubclass(rule, MatrixRule):
            others = [group for group in main_groups if not group["is_matrix"]]
            scalar = update_rule(config.muon_scalar_optimizer)(others, config)
            spans = {param: held for each in wrappers for param, held in each.spans_by_rank()}
            self.rule = rule(main_groups, config, scalar, self.params, spans, groups)
        else:
            self.rule = rule(main_groups, config)
        # Gradients that this rank updates by, from `squared_norm` to the update.
        self._grads: list[tuple[ParamInfo, Tensor]] = []
        # Stream of the copies between device and offloaded parameters.
        self._copies: device.Stream | None = None

    @property
    def param_groups(self) -> list[ParamGroup]:
        """Groups of main parameters; the scheduler writes their ``lr`` and ``weight_decay``."""
        return self.rule.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients outside the buffers of the data-parallel wrapper.

        Also the largest attention logits that layers have recorded for --qk-clip.
        """
        del set_to_none
        for layer in self._qk_layers:
            layer.largest_logits = None
        for p in self.params:
            p.model.grad = p.main.grad = None

    @property
    def loss_scale(self) -> float:
        """The current loss scale; 1 without a gradient scaler."""
        return 1.0 if self.grad_scaler is None else self.grad_scaler.scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale, to call backward on."""
        return loss if self.grad_scaler is None else loss * self.loss_scale

    def get_loss_scale(self) -> Tensor:
        """Return `loss_scale` as a tensor."""
        return torch.tensor(self.loss_scale)

    def step(self) -> tuple[bool, float | None, int | None]:
        """Update the parameters; return (whether updated, gradient norm, number of zeros).

        Collective over the ranks of the model.  The norm is the one before clipping, of unscaled
        gradients.  A skipped step returns (False, None, None).  Where the run checks for it, a norm
        that is not finite is rejected by the rerun state machine, and without one raises
        NonFiniteError.  A pass that the machine rejects raises PassRejected and changes nothing but
        gradients.
        """
        return self.step_by_norm(self.squared_norm())

    def squared_norm(self) -> Tensor:
        """Bind the reduced gradients, and return the square of their norm, on the device.

        Collective over the ranks of the model.
        """
        with self._timed("optimizer-copy-to-main-grad"):
            # The compute stream reads the gradients, too: it allocates those that are missing.
            self._grads = [(p.info, p.bind_main_grad()) for p in self.params]
            self._fetch_offloaded([grad for _, grad in self._grads])
        with self._timed("optimizer-clip-main-grad"):
            return squared_norm(self._grads, self.groups, is_sharded=self.is_sharded)

    def step_by_norm(self, squares: Tensor) -> tuple[bool, float | None, int | None]:
        """Do what `step` does, given the square of the norm by which gradients are clipped.

        ``squares``: of the gradients that `squared_norm` has bound, and of those of other
        optimizers that step together; all of them times this optimizer's loss scale.
        """
        machine = get_rerun_state_machine()
        scale = self.loss_scale
        sent = machine.send_norm(squares, is_checked=self.is_checked)
        # The device can decide whether the step changes anything.  Offloaded parameters are updated
        # by the host, and zeros are counted in gradients of which torch's kernels leave the
        # unscaled values.
        config = self.config
        is_queued = (
            machine.judges_by_norm
            and self.rule.skips_on_device
            and not config.optimizer_cpu_offload
            and not config.log_num_zeros_in_grad
        )
        if is_queued:
            self._update(gradient_divisor(squares, scale, config.clip_grad).float(), sent.accepted)
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
            if config.log_num_zeros_in_grad:
                with self._timed("optimizer-count-zeros"):
                    num_zeros = count_zeros(self._grads, self.groups, is_sharded=self.is_sharded)
            # Unscaling and clipping are one division, which the update kernels apply as they read
            # the gradients: the buffers themselves stay scaled.
            squares = torch.tensor(squared, dtype=torch.float64)
            self._update(float(gradient_divisor(squares, scale, config.clip_grad)))
        self.drop_gradients()
        return (False, None, None) if found_inf else (True, norm / scale, num_zeros)

    # -- names under which projects reach the parts of an optimizer

    @property
    def optimizer(self) -> UpdateRule:
        """The update rule, with ``param_groups`` and ``state`` as an optimizer of torch has."""
        return self.rule

    @property
    def state(self) -> dict[nn.Parameter, State]:
        """State of each main parameter; projects move its tensors to the host and back."""
        return self.rule.state

    @property
    def chained_optimizers(self) -> list[MegatronOptimizer]:
        """This optimizer, which updates dense and expert parameters of all model chunks."""
        return [self]

    def get_parameters(self) -> list[nn.Parameter]:
        """Return the main parameters of this rank."""
        return [p.main for p in self.params]

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
                found = filter(None, all_gather_json(culprits, self.groups.world))
                raise NonFiniteError(next(found, "the norm of finite gradients overflows"))
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

    @torch.no_grad()
    def reload_model_params(self, state_dict: Mapping[str, Any] | None = None) -> None:
        """Copy model parameters to main parameters, after loading weights without their state.

        ``state_dict``: weights in higher precision, to be copied in place of the model's: the
        model's state_dict, or "model" (of several chunks "model0", ...) -> the model's state_dict.
        """
        wider = {} if state_dict is None else self._weights_in(state_dict)
        for p in self.params:
            if p.model in wider:
                p.main.copy_(p.values_in(wider[p.model]))
        copy_main_to_model([p for p in self.params if p.model not in wider], backward=True)
        for p in self.params:
            main = self.rule.state_of(p.main).get("main")
            if isinstance(main, StateStorage):
                values = wider.get(p.model)
                main.write((p.model_values if values is None else p.values_in(values)).float())

    def _weights_in(self, state_dict: Mapping[str, Any]) -> dict[nn.Parameter, Tensor]:
        """Return the entry of each trainable parameter of the model chunks."""
        keys = ["model", "model0", "model_0"]
        key = next((key for key in keys if key in state_dict), None)
        found: dict[nn.Parameter, Tensor] = {}
        for i, chunk in enumerate(self.model_chunks):
            saved = state_dict if key is None else state_dict[key.replace("0", str(i))]
            saved = {without_wrappers(name): value for name, value in saved.items()}
            for name, param in chunk.named_parameters():
                if param.requires_grad and local_part(param) is param:
                    found[param] = saved[without_wrappers(name)]
        return found

    def named_state(
        self, *, every_main: bool = False
    ) -> Iterator[tuple[str, ParamInfo, dict[str, Tensor | StateStorage]]]:
        """Yield each parameter's layout-independent name, its record and its state.

        The state consists of the update rule's tensors (zero before the first update), and of
        "fp32_param" if the model's dtype differs from the main parameter's (``every_main``: of
        every parameter).  Tensors are the live, writable ones; state in reduced precision is a
        `StateStorage`, which is read and written in fp32.  Shapes are the parameter's local shape,
        or flat as described by ``info.part``.  After writing, call `load_scalar_state`.
        State of complete matrices follows, with a number after the parameter's name.
        """
        apart: list[tuple[str, ParamInfo, dict[str, Tensor | StateStorage]]] = []
        for p in self.params:
            state = {k: kept for k, kept in self.rule.state_of(p.main).items() if k != "step"}
            for key in [key for key in state if "." in key]:
                kind, _, number = key.partition(".")
                kept = state.pop(key)
                info = p.info.of_complete(tuple(kept.shape))
                apart.append((f"{p.name}.{number}", info, {kind: kept}))
            main = state.pop("main", None)
            if main is None and (every_main or p.is_saved_apart):
                main = p.main.data
            yield p.name, p.info, state if main is None else {"fp32_param": main, **state}
        yield from apart

    def _update(self, divisor: float | Tensor, accepted: Tensor | None = None) -> None:
        """Update by the gradients divided by ``divisor``, and copy the result into the model.

        ``accepted``: see `UpdateRule.begin_step`.
        """
        self.rule.begin_step(accepted)
        with self._timed("optimizer-inner-step"):
            self._step(self.params, divisor)
            clipped = self._clip_qk(accepted)
        with self._timed("optimizer-copy-main-to-model-params"):
            # A fused kernel removes the weights that it has rounded itself; copy the others.
            left = clipped | self.rule.weights.keys()
            self._publish([p for p in self.params if p.main in left and not p.host])

    @torch.no_grad()
    def _clip_qk(self, accepted: Tensor | None) -> set[nn.Parameter]:
        """Scale query and key weights by --qk-clip; return the main parameters that it scales.

        A step that ``accepted`` rejects scales by 1.  Collective over dp_cp.
        """
        layers = [layer for layer in self._qk_layers if layer.largest_logits is not None]
        if not layers:
            return set()
        largest = torch.cat([layer.largest_logits for layer in layers])
        if self.groups.dp_cp.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.groups.dp_cp)
        if accepted is not None:
            largest = largest.where(accepted.bool(), -math.inf)
        sizes = [len(layer.largest_logits) for layer in layers]
        factors = {
            model: rows
            for layer, part in zip(layers, largest.split(sizes), strict=True)
            for linear, rows in layer.qk_clip_rows(part)
            for model in (getattr(linear, "weight", None), getattr(linear, "bias", None))
        }
        mine = [p for p in self.params if p.model in factors]
        for p in mine:
            factor = p.rows_to_elements(factors[p.model])
            main = self.rule.state_of(p.main).get("main")
            if isinstance(main, StateStorage):
                main.write(main.read() * factor)
            else:
                p.main.mul_(factor)
        return {p.main for p in mine}

    def _step(self, params: Sequence[OptimizedParam], divisor: float | Tensor) -> None:
        """Update ``params``, and copy offloaded ones back to the device.

        Device parameters go first: their kernels run while gradients of offloaded parameters are
        still being copied to the host.  Then each batch of offloaded parameters waits for its
        gradients, is updated on the CPU, and is copied back while the next batch is updated.
        """
        self.rule.weights = {
            p.main: p.host.result if p.host else p.model_values for p in params if p.has_main
        }
        self.rule.step(divisor, {p.main for p in params if not p.host})
        values = {p.host: p.model_values for p in params if p.host}
        is_overlapped = self.config.overlap_cpu_optimizer_d2h_h2d
        for batch in batches([*values], is_overlapped=is_overlapped):
            for place in batch:
                device.wait_for(place.has_come)
            self.rule.step(divisor, {place.main for place in batch})
            with device.on_stream(self._copies), torch.no_grad():
                for place in batch:
                    if place.main in self.rule.weights:  # not yet rounded by the update kernel
                        place.result.copy_(place.main)
                    values[place].copy_(place.result, non_blocking=True)
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
        copy_main_to_model([p for p in on_host if not p.is_saved_apart], backward=True)
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
        if self.grad_scaler is not None and "grad_scaler" in state:
            self.grad_scaler.load_state_dict(state["grad_scaler"])
        self._publish_loaded()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, for a run in the same layout: `scalar_state` and "optimizer".

        "optimizer" has torch.optim's format: parameters are numbered over all groups.  Values in
        reduced precision are in fp32.
        """
        index = {p.main: i for i, p in enumerate(self.params)}
        state = {
            i: {key: k.read() if isinstance(k, StateStorage) else k for key, k in kept.items()}
            for i, (_, _, kept) in enumerate(self.named_state())
        }
        groups = [{**g, "params": [index[p] for p in g["params"]]} for g in self.param_groups]
        return {**self.scalar_state(), "optimizer": {"state": state, "param_groups": groups}}

    def sharded_state_dict(
        self,
        model_sharded_state_dict: ShardedStateDict,
        is_loading: bool = False,
        metadata: Mapping[str, Any] | None = None,
        *,
        sharding_type: str | None = None,
    ) -> ShardedStateDict:
        """Return `state_dict` with an entry for each tensor, for a run in any layout.

        ``model_sharded_state_dict`` has the entries of the parameters.  Of the forms that Megatron
        Core has for a distributed optimizer there is one, ``fully_sharded_model_space``, whatever
        ``metadata`` and ``sharding_type`` say.  Raises ValueError for a parameter without an entry.
        """
        del is_loading, metadata, sharding_type
        state = self.state_dict()
        of_model = get_param_id_to_sharded_param_map(
            model_sharded_state_dict, [p.model for p in self.params]
        )
        parts = {i: p.info.part for i, p in enumerate(self.params)}
        optim_state_to_sharding_state(state["optimizer"], of_model, parts=parts)
        if self.is_sharded:
            state["param_state_sharding_type"] = "fully_sharded_model_space"
        for group in state["optimizer"]["param_groups"]:
            group["step"] = state["step"]
        state["optimizer"]["state"]["common_step"] = torch.tensor(float(state["step"]))
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore `state_dict`; groups keep this run's hyperparameters, not the saved ones.

        Raises CheckpointError if the saved groups have different numbers of parameters.
        """
        saved = state_dict["optimizer"]
        found, wanted = (
            [len(group["params"]) for group in groups]
            for groups in (saved["param_groups"], self.param_groups)
        )
        if found != wanted:
            raise CheckpointError(
                f"the checkpoint's optimizer groups have {found} parameters, this run's {wanted}"
            )
        for i, (_, _, state) in enumerate(self.named_state()):
            for key, kept in state.items():
                if key not in saved["state"][i]:
                    raise CheckpointError(f"the checkpoint's optimizer state has no entry {key!r}")
                values = torch.as_tensor(saved["state"][i][key])
                kept.copy_(values) if isinstance(kept, Tensor) else kept.write(values)
        # Megatron Core has the number of steps in the state or in each group.
        known = [saved["state"].get("common_step"), *(g.get("step") for g in saved["param_groups"])]
        steps = [state_dict.get("step"), *known]
        step = next((float(step) for step in steps if step is not None), 0.0)
        self.load_scalar_state({**state_dict, "step": step})

    def drop_gradients(self) -> None:
        """Drop ``main.grad``, which aliases the gradient buffer.

        Autograd would accumulate into it in the next backward pass, without the wrapper's hook.
        """
        self._grads = []
        for p in self.params:
            p.main.grad = None
        device.join_stream(self._copies)

    def state_tensors(self, *, on_host: bool) -> list[Tensor]:
        """Return main parameters and the state allocated so far, on the device or on the host."""
        return [tensor for _, tensor in self.tensors_by_kind(on_host=on_host)]

    def tensors_by_kind(self, *, on_host: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield what `state_tensors` returns, each tensor with the name of its kind."""
        for p in self.params:
            if bool(p.host) != on_host:
                continue
            yield "main parameters", p.main
            for kind, kept in self.rule.state.get(p.main, {}).items():
                tensors = (kept,) if isinstance(kept, Tensor) else kept.tensors
                yield from ((kind, tensor) for tensor in tensors)
            if p.host:
                yield from (("copies", tensor) for tensor in (p.host.grad, p.host.result))

    def _timed(self, name: str) -> AbstractContextManager[None]:
        return timed(self.timers, name, log_level=1, barrier=self.config.barrier_with_L1_time)
