"""The result of an optimizer step: losses, gradient norm, learning rate, and what is logged."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import device
from megatron.core.optimizer.clip_grads import calc_params_l2_norm
from megatron.training.checkpointing.checkpoint_tensors import RunParts
from megatron.training.estimates.flops import tokens_of_a_sample
from megatron.training.runtime.runtime import Runtime
from megatron.training.runtime.state import StepResult
from megatron.training.step.aux_loss_logging import added_losses
from megatron.training.step.weight_hash import check_replicas, params_hash

Outcome = tuple[bool, float | None, int | None]  # of `MegatronOptimizer.step`


def unjudged_result(
    run: Runtime, losses: list[dict[str, Tensor]], num_microbatches: int, batch_size: int
) -> StepResult:
    """Return the result of the step, as far as it is known.  Collective over all ranks."""
    config = run.config
    iteration = run.state.iteration + 1
    if config.training.empty_unused_memory_level >= 2:
        device.empty_cache()
    reduced, layer_losses = _all_losses(run, losses, num_microbatches)
    interval = config.training.check_weight_hash_across_dp_replicas_interval
    if interval is not None and iteration % interval == 0:
        check_replicas(RunParts(model_chunks=run.model_chunks, groups=run.groups), iteration)
    return StepResult(
        losses=reduced,
        grad_norm=None,
        num_zeros=None,
        params_norm=_params_norm(run),
        learning_rate=math.nan,
        decoupled_learning_rate=None,
        loss_scale=math.nan,
        skipped=False,
        nan=False,
        batch_size=batch_size,
        num_tokens=batch_size * tokens_of_a_sample(run.config_of_work),
        params_hash=_params_hash(run, iteration),
        layer_losses=layer_losses,
        is_judged=False,
    )


def judge(run: Runtime, result: StepResult, outcome: Outcome) -> None:
    """Complete ``result``, and advance the learning rate if the step was updated."""
    assert run.optimizer is not None, "a run that trains has one"
    assert run.scheduler is not None, "a run that trains has one"
    updated, result.grad_norm, result.num_zeros = outcome
    if updated:
        run.scheduler.step(increment=result.batch_size)
    result.learning_rate, result.decoupled_learning_rate = run.scheduler.current_learning_rates()
    result.loss_scale = float(run.optimizer.get_loss_scale())
    result.skipped = not updated
    result.nan = not updated and any(_not_finite(loss) for loss in result.losses.values())
    result.is_judged = True


def _all_losses(
    run: Runtime, reported: list[dict[str, Tensor]], num_microbatches: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return all losses of the step by key, and the losses of single expert layers.

    Collective over all ranks.
    """
    experts, layers, ahead = added_losses(run, num_microbatches)
    if not run.has_loss:
        return {}, {}
    group = run.groups.dp_cp
    return reduce_losses(reported, group) | experts | reduce_losses([ahead], group), layers


def reduce_losses(
    reported: Iterable[dict[str, Tensor]], group: dist.ProcessGroup
) -> dict[str, Tensor]:
    """Return one value per loss key from what each micro-batch reported.

    A pair [sum, count] becomes the total sum divided by the total count, over micro-batches and
    ``group``; a single value is averaged over this rank's micro-batches only.  Collective over
    ``group``.
    """
    totals = sum_losses(reported)
    return {key: _finish(total, group) for key, total in totals.items()}


def sum_losses(reported: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return for each key [sum, count] over micro-batches; for single values [sum, count, 0].

    The shape distinguishes the two cases, because reading a value would synchronise with the
    device.
    """
    totals: dict[str, Tensor] = {}
    for losses in reported:
        for key, value in losses.items():
            flat = value.detach().reshape(-1).to(torch.float32)
            if flat.numel() == 1:
                flat = torch.cat([flat, flat.new_ones(1), flat.new_zeros(1)])
            totals[key] = totals[key] + flat if key in totals else flat
    return totals


def _finish(total: Tensor, group: dist.ProcessGroup) -> Tensor:
    if total.numel() == 2 and group.size() > 1:
        total = total.clone()
        dist.all_reduce(total, group=group)
    return total[0] / total[1].clamp(min=1)


def _not_finite(loss: Tensor | float) -> bool:
    return not bool(torch.isfinite(torch.as_tensor(loss)).all())


def _params_norm(run: Runtime) -> float | None:
    """Return the norm of the parameters with --log-params-norm, else None.

    Computed at every step for TensorBoard; the log line shows the value of its last step.
    """
    if not run.config.logging.log_params_norm:
        return None
    return calc_params_l2_norm(run.model_chunks, run.groups)


def _params_hash(run: Runtime, iteration: int) -> int | None:
    interval = run.config.logging.log_params_hash_interval
    if interval is None or iteration % interval:
        return None
    return params_hash(RunParts(model_chunks=run.model_chunks, groups=run.groups))
