"""The train loop and one optimizer step; everything else of a run is a callback.

Order of collectives of a step: those of forward and backward; the gradient reduction of the
data-parallel wrapper; the gradient norm inside the optimizer; the losses of expert layers over all
ranks; the reported losses, then the losses of multi-token prediction, over dp_cp.  Last, where
requested: the comparison of weights, the norm of the parameters and their hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from megatron.core import device
from megatron.core.config.errors import DataError
from megatron.core.diagnostics import straggler
from megatron.core.diagnostics.fault_injection import fault_point
from megatron.core.diagnostics.timers import timed
from megatron.core.distributed.data_parallel_base import DataParallelBase
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.non_finite import LossCheck
from megatron.core.params.param_info import local_part
from megatron.core.pipeline_parallel.microbatch import StepHooks, StepLosses
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.training.data.balanced_rows import BalancedRows
from megatron.training.data.loaders import read_ahead
from megatron.training.estimates.flops import num_floating_point_operations
from megatron.training.models.registry import shape_of_microbatch
from megatron.training.process import exit_report
from megatron.training.process.exit_report import enter_phase, in_phase
from megatron.training.process.rank_print import print_detail
from megatron.training.runtime.context import StepResult
from megatron.training.step.rerun import StepRejected, run_step
from megatron.training.step.run import ModelRun, TrainingRun
from megatron.training.step.step_result import GlobalBatch, Update, complete_result


def train_step(run: TrainingRun) -> StepResult:
    """Run forward, backward and the parameter update on one global batch.

    Collective over all ranks.  The caller is `run_step`, which repeats a step that is rejected; it
    advances ``run.state`` by the result.  A step of --iterations-to-skip reads its data and
    computes nothing.  Where the run checks for it, a loss or gradient that is not finite raises
    PassRejected, without reruns NonFiniteError; weights that differ between data-parallel ranks
    raise ReplicasDiffer.
    """
    enter_phase("training")
    batch = next_batch(run)
    if batch.is_skipped:
        return complete_result(run, batch, [], (False, None, None))

    def compute_gradients(data: object) -> StepLosses:
        losses = forward_backward(run, data, batch.num_microbatches)
        reduce_gradients(run, losses)
        return losses

    with _around_passes(run, batch):
        if run.step_graph is None:
            losses = compute_gradients(run.data.train)
        else:
            losses = run.step_graph.run(
                compute_gradients, run.data.train, batch.num_microbatches, run.model_chunks
            )
    update = update_parameters(run, batch)
    return complete_result(run, batch, losses, update)


def next_batch(run: TrainingRun) -> GlobalBatch:
    """Return the sizes of the next global batch; read and drop one that is skipped."""
    consumed = run.state.consumed_train_samples
    size = run.batches.global_batch_size(consumed)
    num_microbatches = run.batches.num_microbatches(consumed)
    is_skipped = run.state.iteration + 1 in run.config.training.iterations_to_skip
    if is_skipped:
        for data in run.data.train if isinstance(run.data.train, list) else [run.data.train]:
            if data is not None:  # this rank reads data
                for _ in range(num_microbatches):
                    next(data)
    left_out = run.batches.nominal_batch_size(consumed) - size
    return GlobalBatch(
        size=size,
        num_microbatches=num_microbatches,
        num_untrained=left_out + size if is_skipped else left_out,
        is_skipped=is_skipped,
    )


@contextmanager
def _around_passes(run: TrainingRun, batch: GlobalBatch) -> Iterator[None]:
    """Clear the gradients before the passes of a step; prefetch the next micro-batches after them.

    The host may then wait for the gradient norm.
    """
    clear_gradients(run)
    barrier = run.config.optimizer.barrier_with_L1_time
    timer = timed(run.timers, "forward-backward", log_level=1, barrier=barrier)
    with timer, straggler.stopwatch.section(straggler.PASSES):
        yield
        read_ahead(run.data.train, batch.num_microbatches if run.step_graph is not None else 1)
    if run.config.training.empty_unused_memory_level >= 1:
        device.empty_cache()


def clear_gradients(run: TrainingRun) -> None:
    """Clear all gradients of the step before."""
    for chunk in _wrapped(run.model_chunks):
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()


@in_phase("forward and backward passes")
def forward_backward(
    run: ModelRun,
    data_iterator: object,
    num_microbatches: int,
    *,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    hooks: StepHooks | None = None,
) -> StepLosses:
    """Run the pipeline schedule.  Collective over all ranks.

    Returns the dictionary that the loss function reported for each micro-batch (last stage).
    Gradients are complete, but not reduced.
    """
    check = _loss_check(run)
    hooks = hooks or StepHooks(
        grad_scale_func=partial(_scaled_loss, run) if isinstance(run, TrainingRun) else None,
        loss_check_func=check,
        pass_func=lambda kind: enter_phase(f"{kind} pass"),
        loss_share=run.objective.loss_share,
        timers=None if forward_only else run.timers,  # evaluation is not training time
        barrier_with_level_1_timers=run.config.optimizer.barrier_with_L1_time,
    )
    if isinstance(data_iterator, BalancedRows):
        num_microbatches = data_iterator.begin()
    seq_length, num_rows = shape_of_microbatch(run.config)
    forward_step = run.forward_step_func
    if run.sources is not None and not forward_only:
        run.sources.begin_step()
        forward_step = partial(run.sources.forward_step, forward_step)
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data_iterator,
        model=run.model_chunks,
        num_microbatches=num_microbatches,
        seq_length=seq_length,
        micro_batch_size=num_rows,
        decoder_seq_length=run.config.data.decoder_seq_length,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        config=run.config.model,
        pg_collection=run.groups,
        hooks=hooks,
    )
    if check is not None:
        check.check()
    return losses


@in_phase("gradient reduction")
def reduce_gradients(run: TrainingRun, losses: StepLosses) -> None:
    """Reduce the gradients to those of the global batch.  Collective over all ranks.

    Also updates the biases of MoE routers and the amax histories.
    """
    chunks = list(_wrapped(run.model_chunks))
    barrier = run.config.optimizer.barrier_with_L1_time
    with timed(run.timers, "all-grads-sync", log_level=1, barrier=barrier):
        finalize_model_grads(chunks, losses.num_tokens, pg_collection=run.groups)


@in_phase("parameter update")
def update_parameters(run: TrainingRun, batch: GlobalBatch) -> Update:
    """Update the parameters and advance the learning rate.  Collective over all ranks.

    Returns and raises as `MegatronOptimizer.step`.
    """
    barrier = run.config.optimizer.barrier_with_L1_time
    timer = timed(run.timers, "optimizer", log_level=1, barrier=barrier)
    with timer, straggler.stopwatch.section(straggler.OPTIMIZER):
        if run.checkpoints.pending is not None:
            run.checkpoints.pending.wait_for_copies()  # of the values that the update changes
        update = run.optimizer.step()
    is_updated, _, _ = update
    if is_updated:
        run.scheduler.step(increment=batch.size)
    if fault_point("step.updated", step=run.state.iteration + 1) == "bitflip":
        chunk = next(_wrapped(run.model_chunks))
        chunk.finish_param_sync()
        weight = local_part(next(chunk.parameters()).detach()).flatten()
        weight[:1].view(torch.uint8)[0] ^= 1
    return update


def _wrapped(chunks: Iterable[nn.Module]) -> Iterator[DataParallelBase]:
    for chunk in chunks:
        assert isinstance(chunk, DataParallelBase), f"{type(chunk).__name__} is not wrapped"
        yield chunk


def _scaled_loss(run: TrainingRun, loss: Tensor) -> Tensor:
    """Return ``loss`` times the loss scale, to call backward on."""
    if fault_point("step.gradient", step=run.state.iteration + 1) == "nan":
        loss = loss * float("nan")
    return run.optimizer.scale_loss(loss)


def _loss_check(run: ModelRun) -> LossCheck | None:
    for_nan = run.config.ddp.check_for_nan_in_grad
    for_spikes = run.config.resilience.check_for_spiky_loss
    if not (for_nan or for_spikes):
        return None
    return LossCheck(run.rerun, for_nan=for_nan, for_spikes=for_spikes)


def train(run: TrainingRun) -> None:
    """Run optimizer steps until all are done, or a signal or a callback requests a stop.

    Collective over all ranks.
    """
    for chunk in run.model_chunks:
        chunk.train()
    # Scripts that test resumption search for Megatron-LM's line.
    if run.state.iteration == 0 or run.rerun.current_iteration != run.state.iteration:
        print_detail(f"Setting rerun_state_machine.current_iteration to {run.state.iteration}...")
    run.callbacks.on_train_start(run)
    while not run.finished():
        run.callbacks.on_step_start(run)
        try:
            result = run_step(run, train_step)
        except StepRejected as rejected:
            run.state.stop(str(rejected))
            run.state.exit_code = rejected.exit_code
            if rejected.should_checkpoint:
                # Save again: the checkpoint needs the state of the reruns.
                run.checkpoints.saved_at = None
            break
        except StopIteration:
            raise DataError(
                f"the training data ended after {run.state.consumed_train_samples} samples: give "
                "more, or weights, which repeat it"
            ) from None
        flops = num_floating_point_operations(
            run.config_of_work, result.batch_size, run.padded_vocab_size
        )
        run.state.advance(result, flops)
        exit_report.note(iteration=run.state.iteration)
        run.callbacks.on_step_end(run, result)
    run.callbacks.on_train_end(run)
