"""One optimizer step.

Order of collectives: those of forward and backward; the gradient reduction of the data-parallel
wrapper; the gradient norm inside the optimizer; the losses of expert layers over all ranks; the
reported losses, then the losses of multi-token prediction, over dp_cp.  Last, where requested: the
comparison of weights, the norm of the parameters and their hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megatron.core import device
from megatron.core.diagnostics import straggler
from megatron.core.diagnostics.fault_injection import fault_point
from megatron.core.diagnostics.timers import timed
from megatron.core.distributed.data_parallel_base import DataParallelBase
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.non_finite import LossCheck, naming_step
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.queued_step import QueuedStep
from megatron.core.params.param_info import local_part
from megatron.core.pipeline_parallel.plan import PassKind
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.pipeline_parallel.step_hooks import StepHooks
from megatron.core.tensor_parallel.quantized_linear import update_amax_histories
from megatron.core.transformer.moe.expert_bias import update_expert_biases
from megatron.training.data.prefetch import read_ahead
from megatron.training.models.registry import shape_of_microbatch
from megatron.training.process import exit_report
from megatron.training.runtime.deferred_step import DeferredStep
from megatron.training.runtime.phases import in_phase
from megatron.training.runtime.runtime import Runtime
from megatron.training.runtime.state import StepResult
from megatron.training.step.rerun import end_if_rejected
from megatron.training.step.step_result import Outcome, judge, unjudged_result

Data = Iterator[object] | None  # micro-batches; None on ranks that do not read data


def train_step(run: Runtime, *, may_defer: bool = False) -> StepResult:
    """Run forward, backward and the parameter update on one global batch.

    Collective over all ranks.  The caller advances ``run.state``.  A step of --iterations-to-skip
    reads its data and computes nothing.  Where the run checks for it, raises for a loss or gradient
    that is not finite StepRejected, without reruns NonFiniteError, and ReplicasDiffer for weights
    that differ between data-parallel ranks.

    With ``may_defer`` the host need not wait for the device: it may judge the step in the next call
    or in `finish_deferred_step`, which then raise in its place, after they have set ``run.state``
    back to the counters before the rejected step.
    """
    run.phase = "training"
    iteration = run.state.iteration + 1
    fault_point("step.before", step=iteration)
    before = replace(run.state)
    num_microbatches = run.batches.num_microbatches(run.state.consumed_train_samples)
    batch_size = run.batches.global_batch_size(run.state.consumed_train_samples)
    nominal = run.batches.nominal_batch_size(run.state.consumed_train_samples)
    losses: list[dict[str, Tensor]] = []
    outcome: Outcome = (False, None, None)
    check: LossCheck | None = None
    queued: QueuedStep | None = None
    if iteration in run.config.training.iterations_to_skip:
        finish_deferred_step(run)
        _pass_over(run.train_data, num_microbatches)
        run.state.skipped_train_samples += batch_size
    elif may_defer and _can_defer(run):
        if run.config.ddp.check_for_nan_in_grad:
            check = LossCheck(run.rerun, defers=True)
        losses = _first_pass(run, num_microbatches, check)
        queued = _queue_update(run, check)
    else:
        losses = _first_pass(run, num_microbatches)
        with naming_step(iteration):
            _prepare_update(run)
            losses, outcome = _judged_passes(run, num_microbatches, losses)
    run.state.skipped_train_samples += nominal - batch_size
    if fault_point("step.updated", step=iteration) == "bitflip":
        _flip_a_bit(next(_wrapped(run.model_chunks)))
    result = unjudged_result(run, losses, num_microbatches, batch_size)
    if queued is None:
        judge(run, result, outcome)
    else:
        run.deferred = DeferredStep(
            result=result,
            queued=queued,
            loss_check=check,
            unread=[read for c in _wrapped(run.model_chunks) for read in c.check.take_deferred()],
            before=before,
            num_microbatches=num_microbatches,
        )
    return result


def finish_deferred_step(run: Runtime) -> bool:
    """Judge the deferred step, if there is one, and complete its result.

    The host waits until the device has computed its gradient norm.  Returns False if the step was
    rejected, which makes it collective over all ranks: what was computed of the next step is
    dropped, and the step is computed again.  Raises as `train_step`.
    """
    step = run.deferred
    run.deferred = None
    if step is None:
        return True
    read = step.queued.read()
    if run.rerun.is_accepted(read, is_checked=step.queued.is_checked):
        run.rerun.accept(run.train_data)
        judge(run, step.result, step.queued.result())
        return True
    after = replace(run.state)
    vars(run.state).update(vars(step.before))
    exit_report.note(iteration=run.state.iteration)
    with naming_step(run.state.iteration + 1):
        run.rerun.return_to_deferred(run.train_data, read)
        step.reject(run.rerun)
        losses, outcome = _judged_passes(run, step.num_microbatches)
    result = unjudged_result(run, losses, step.num_microbatches, step.result.batch_size)
    judge(run, result, outcome)
    vars(step.result).update(vars(result))
    vars(run.state).update(vars(after))
    exit_report.note(iteration=run.state.iteration)
    return False


def _can_defer(run: Runtime) -> bool:
    """Return whether the host may judge the next step after it has queued passes of another one.

    The same on all ranks.  Not if the step waits for the device anyway.
    """
    config = run.config
    iteration = run.state.iteration + 1
    intervals = (
        config.training.check_weight_hash_across_dp_replicas_interval,
        config.logging.log_params_hash_interval,
    )
    optimizer = run.optimizer
    assert optimizer is not None, "a run that trains has one"
    is_checked = config.ddp.check_for_nan_in_grad or optimizer.is_checked
    return (
        optimizer.can_queue(run.rerun)
        and run.rerun.can_defer(is_checked=is_checked)
        and not any(interval is not None and iteration % interval == 0 for interval in intervals)
        and not config.logging.log_params_norm
        # These judge values on the host.
        and not config.resilience.check_for_spiky_loss
        and not config.ddp.check_for_large_grads
        and not config.resilience.log_straggler  # measures each step
    )


def _pass_over(data: Data | list[Data], num_microbatches: int) -> None:
    """Read and drop the micro-batches of a step, on the ranks that read data."""
    for iterator in data if isinstance(data, list) else [data]:
        if iterator is not None:
            for _ in range(num_microbatches):
                next(iterator)


def _first_pass(
    run: Runtime, num_microbatches: int, check: LossCheck | None = None
) -> list[dict[str, Tensor]]:
    """Begin the step, compute its gradients and judge the deferred step; return as `_gradients`.

    If the deferred step was rejected, its new update follows the gradients: they are computed
    again.  Collective over all ranks.
    """
    with naming_step(run.state.iteration + 1):
        run.rerun.current_iteration = run.state.iteration
        has_begun = run.rerun.should_run_forward_backward(run.train_data)
        assert has_begun, "a step has a first pass"
        losses = _gradients(run, num_microbatches, check)
    if finish_deferred_step(run):
        return losses
    if check is not None:
        check.forget()
    return _first_pass(run, num_microbatches, check)


def _judged_passes(
    run: Runtime, num_microbatches: int, losses: list[dict[str, Tensor]] | None = None
) -> tuple[list[dict[str, Tensor]], Outcome]:
    """Compute the gradients again if the rerun state machine rejects a result, then update.

    ``losses``: as of `_gradients`, of the first pass.  Collective over all ranks.  Returns the
    losses of the last pass.  Raises StepRejected.
    """
    while run.rerun.should_run_forward_backward(run.train_data):
        losses = _gradients(run, num_microbatches)
        _prepare_update(run)
    end_if_rejected(run)
    assert losses is not None, "a rejected pass is computed again"
    return losses, _update(run)


def _barrier(run: Runtime) -> bool:
    return run.config.optimizer.barrier_with_L1_time


def _gradients(
    run: Runtime, num_microbatches: int, check: LossCheck | None = None
) -> list[dict[str, Tensor]]:
    """Compute the gradients of the step into the gradient buffers.

    ``check``: of a step that is deferred; without it losses and gradients are validated at once.
    Returns the losses that each micro-batch reported (last stage).  Collective over all ranks.
    """
    for chunk in _wrapped(run.model_chunks):
        chunk.zero_grad_buffer()
        chunk.check.take_deferred()
        chunk.check.defers = check is not None
    assert run.optimizer is not None, "a run that trains has one"
    run.optimizer.zero_grad()
    run.timers("forward-backward", log_level=1).start(barrier=_barrier(run))
    passes = partial(
        forward_backward,
        run,
        num_microbatches=num_microbatches,
        forward_only=False,
        check=check,
    )
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
    with _before_update(run) as optimizer:
        optimizer.prepare_grads(run.rerun, may_update=True)


def _queue_update(run: Runtime, check: LossCheck | None) -> QueuedStep:
    """Queue the update, and end the step before the host knows whether a rank rejects it."""
    with _before_update(run) as optimizer:
        queued = optimizer.queue_step(run.rerun, () if check is None else check.losses)
    run.rerun.defer()
    return queued


@contextmanager
def _before_update(run: Runtime) -> Iterator[MegatronOptimizer]:
    """Time the work before the update, which must not change what a background save copies."""
    timer = timed(run.timers, "optimizer", log_level=1, barrier=_barrier(run))
    with timer, straggler.stopwatch.section(straggler.OPTIMIZER):
        if run.pending_save is not None:
            run.pending_save.wait_for_copies()
        assert run.optimizer is not None, "a run that trains has one"
        yield run.optimizer


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
    check: LossCheck | None = None,
) -> list[dict[str, Tensor]]:
    """Run the pipeline schedule.  Collective over all ranks.

    ``check``: of losses, by default the one that the flags request.
    Returns the dictionary that the loss function reported for each micro-batch (last stage).
    """
    check = check or _loss_check(run)
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
