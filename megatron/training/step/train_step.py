"""One optimizer step.

Order of collectives: those of forward and backward; the gradient reduction of the data-parallel
wrapper; the gradient norm inside the optimizer; the losses of expert layers over all ranks; the
reported losses, then the losses of multi-token prediction, over dp_cp.  Last, where requested: the
comparison of weights, the norm of the parameters and their hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import device
from megatron.core.diagnostics import straggler
from megatron.core.diagnostics.fault_injection import fault_point
from megatron.core.diagnostics.timers import timed
from megatron.core.distributed.data_parallel_base import DataParallelBase
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.non_finite import LossCheck, naming_step
from megatron.core.optimizer.clip_grads import calc_params_l2_norm
from megatron.core.params.param_info import local_part
from megatron.core.pipeline_parallel.plan import PassKind
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.pipeline_parallel.step_hooks import StepHooks
from megatron.core.tensor_parallel.quantized_linear import update_amax_histories
from megatron.core.transformer.moe.expert_bias import update_expert_biases
from megatron.training.checkpointing.checkpoint_tensors import RunParts
from megatron.training.data.prefetch import read_ahead
from megatron.training.estimates.flops import tokens_of_a_sample
from megatron.training.models.registry import shape_of_microbatch
from megatron.training.runtime.phases import in_phase
from megatron.training.runtime.runtime import Runtime
from megatron.training.runtime.state import StepResult
from megatron.training.step.aux_loss_logging import added_losses
from megatron.training.step.rerun import end_if_rejected
from megatron.training.step.weight_hash import check_replicas, params_hash

Data = Iterator[object] | None  # micro-batches; None on ranks that do not read data


def train_step(run: Runtime) -> StepResult:
    """Run forward, backward and the parameter update on one global batch.

    Collective over all ranks.  The caller advances ``run.state``.  A step of --iterations-to-skip
    reads its data and computes nothing.  Where the run checks for it, raises for a loss or gradient
    that is not finite StepRejected, without reruns NonFiniteError, and ReplicasDiffer for weights
    that differ between data-parallel ranks.
    """
    run.phase = "training"
    config = run.config
    iteration = run.state.iteration + 1
    fault_point("step.before", step=iteration)
    num_microbatches = run.batches.num_microbatches(run.state.consumed_train_samples)
    batch_size = run.batches.global_batch_size(run.state.consumed_train_samples)
    nominal = run.batches.nominal_batch_size(run.state.consumed_train_samples)
    losses: list[dict[str, Tensor]] = []
    updated, grad_norm, num_zeros = False, None, None
    if iteration in config.training.iterations_to_skip:
        _pass_over(run.train_data, num_microbatches)
        run.state.skipped_train_samples += batch_size
    else:
        with naming_step(iteration):
            losses = _accepted_gradients(run, num_microbatches)
            updated, grad_norm, num_zeros = _update(run)
    run.state.skipped_train_samples += nominal - batch_size
    if fault_point("step.updated", step=iteration) == "bitflip":
        _flip_a_bit(next(_wrapped(run.model_chunks)))
    assert run.optimizer is not None, "a run that trains has one"
    assert run.scheduler is not None, "a run that trains has one"
    if updated:
        run.scheduler.step(increment=batch_size)
    if config.training.empty_unused_memory_level >= 2:
        device.empty_cache()

    reduced, layer_losses = _all_losses(run, losses, num_microbatches)
    interval = config.training.check_weight_hash_across_dp_replicas_interval
    if interval is not None and iteration % interval == 0:
        check_replicas(RunParts(model_chunks=run.model_chunks, groups=run.groups), iteration)
    lr, decoupled_lr = run.scheduler.current_learning_rates()
    return StepResult(
        losses=reduced,
        grad_norm=grad_norm,
        num_zeros=num_zeros,
        params_norm=_params_norm(run),
        learning_rate=lr,
        decoupled_learning_rate=decoupled_lr,
        loss_scale=float(run.optimizer.get_loss_scale()),
        skipped=not updated,
        nan=not updated and any(_not_finite(loss) for loss in reduced.values()),
        batch_size=batch_size,
        num_tokens=batch_size * tokens_of_a_sample(config),
        params_hash=_params_hash(run, iteration),
        layer_losses=layer_losses,
    )


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


def _pass_over(data: Data | list[Data], num_microbatches: int) -> None:
    """Read and drop the micro-batches of a step, on the ranks that read data."""
    for iterator in data if isinstance(data, list) else [data]:
        if iterator is not None:
            for _ in range(num_microbatches):
                next(iterator)


def _accepted_gradients(run: Runtime, num_microbatches: int) -> list[dict[str, Tensor]]:
    """Compute the gradients, again if the rerun state machine rejects a result; return as below.

    Nothing is updated yet.  Collective over all ranks.  Raises StepRejected.
    """
    losses: list[dict[str, Tensor]] = []
    assert run.optimizer is not None, "a run that trains has one"
    run.rerun.current_iteration = run.state.iteration
    while run.rerun.should_run_forward_backward(run.train_data):
        losses = _gradients(run, num_microbatches)
        timer = timed(run.timers, "optimizer", log_level=1, barrier=_barrier(run))
        with timer, straggler.stopwatch.section(straggler.OPTIMIZER):
            _prepare_update(run)
    end_if_rejected(run)
    return losses


def _barrier(run: Runtime) -> bool:
    return run.config.optimizer.barrier_with_L1_time


def _gradients(run: Runtime, num_microbatches: int) -> list[dict[str, Tensor]]:
    """Compute the gradients of the step into the gradient buffers.

    Returns the losses that each micro-batch reported (last stage).  Collective over all ranks.
    """
    for chunk in _wrapped(run.model_chunks):
        chunk.zero_grad_buffer()
    assert run.optimizer is not None, "a run that trains has one"
    run.optimizer.zero_grad()
    run.timers("forward-backward", log_level=1).start(barrier=_barrier(run))
    passes = partial(forward_backward, run, num_microbatches=num_microbatches, forward_only=False)
    if run.step_graph is None:
        with straggler.stopwatch.section(straggler.PASSES):
            losses = passes(run.train_data)
        read_ahead(run.train_data)
    else:
        losses = run.step_graph.run(passes, run.train_data, num_microbatches, run.model_chunks)
        read_ahead(run.train_data, num_microbatches)
    run.timers("forward-backward").stop()
    if run.config.training.empty_unused_memory_level >= 1:
        device.empty_cache()
    return losses


def _prepare_update(run: Runtime) -> None:
    """Check the gradients; the update may be queued, and change nothing if a rank rejects them."""
    if run.pending_save is not None:
        run.pending_save.wait_for_copies()
    assert run.optimizer is not None, "a run that trains has one"
    run.optimizer.prepare_grads(run.rerun, may_update=True)


@in_phase("parameter update")
def _update(run: Runtime) -> tuple[bool, float | None, int | None]:
    """Update the parameters, unless that is queued already.

    Returns whether it updated the parameters, the gradient norm and the number of zero gradients.
    """
    assert run.optimizer is not None, "a run that trains has one"
    timer = timed(run.timers, "optimizer", log_level=1)
    with timer, straggler.stopwatch.section(straggler.OPTIMIZER):
        return run.optimizer.finish_step()


def _wrapped(chunks: Iterable[nn.Module]) -> Iterator[DataParallelBase]:
    for chunk in chunks:
        assert isinstance(chunk, DataParallelBase), f"{type(chunk).__name__} is not wrapped"
        yield chunk


def _flip_a_bit(chunk: DataParallelBase) -> None:
    """Flip one bit in the first parameter of this rank (fault injection)."""
    chunk.finish_param_sync()
    weight = local_part(next(chunk.parameters()).detach()).flatten()
    weight[:1].view(torch.uint8)[0] ^= 1


def _scaled_loss(run: Runtime, loss: Tensor) -> Tensor:
    """Return ``loss`` times the loss scale, to call backward on."""
    if fault_point("step.gradient", step=run.state.iteration + 1) == "nan":
        loss = loss * float("nan")
    assert run.optimizer is not None, "a run that trains has one"
    return run.optimizer.scale_loss(loss)


@in_phase("forward and backward passes")
def forward_backward(
    run: Runtime,
    data_iterator: object,
    num_microbatches: int,
    *,
    forward_only: bool,
    collect_non_loss_data: bool = False,
    hooks: StepHooks | None = None,
) -> list[dict[str, Tensor]]:
    """Run the pipeline schedule.  Collective over all ranks.

    Returns the dictionary that the loss function reported for each micro-batch (last stage).
    """
    check = _loss_check(run)
    hooks = hooks or StepHooks(
        grad_scale_func=partial(_scaled_loss, run) if run.optimizer is not None else None,
        finalize_model_grads_func=partial(_finalize, run, check),
        loss_check_func=check,
        pass_func=partial(_begin_pass, run),
        loss_share=run.loss_share,
        timers=None if forward_only else run.timers,  # evaluation is not training time
        barrier_with_level_1_timers=run.config.optimizer.barrier_with_L1_time,
    )
    seq_length, num_rows = shape_of_microbatch(run.config)
    return get_forward_backward_func()(
        forward_step_func=run.forward_step_func,
        data_iterator=data_iterator,
        model=run.model_chunks,
        num_microbatches=num_microbatches,
        seq_length=seq_length,
        micro_batch_size=num_rows,
        decoder_seq_length=run.config.data.decoder_seq_length,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        adjust_tensor_shapes_fn=run.adjust_tensor_shapes,
        config=run.config.model,
        groups=run.groups,
        hooks=hooks,
    )


def _loss_check(run: Runtime) -> LossCheck | None:
    for_nan = run.config.ddp.check_for_nan_in_grad
    for_spikes = run.config.resilience.check_for_spiky_loss
    if not (for_nan or for_spikes):
        return None
    return LossCheck(run.rerun, for_nan=for_nan, for_spikes=for_spikes)


def _begin_pass(run: Runtime, kind: PassKind) -> None:
    run.phase = f"{kind} pass"


@in_phase("gradient reduction")
def _finalize(
    run: Runtime,
    check: LossCheck | None,
    chunks: Sequence[DataParallelBase],
    num_tokens: Tensor | None,
) -> None:
    """Reduce the gradients after the last backward pass.  Collective over all ranks.

    Also checks the losses, and updates the biases of MoE routers and the amax histories.
    """
    if check is not None:
        check.check()
    finalize_model_grads(chunks, num_tokens, run.groups)
    if run.config.adapters.lora is None:  # else the routers are frozen
        update_expert_biases(chunks, run.groups, run.config.model.moe_router_bias_update_rate)
    update_amax_histories(chunks, run.groups)


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
