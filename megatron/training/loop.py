"""The train loop: it calls the optimizer step; everything else is a callback."""

from __future__ import annotations

from megatron.training.estimates.flops import num_floating_point_operations
from megatron.training.process import exit_report
from megatron.training.runtime.runtime import Callback, Runtime
from megatron.training.runtime.stop_requests import on_any_rank
from megatron.training.step.rerun import StepRejected
from megatron.training.step.train_step import finish_deferred_step, train_step


def train(run: Runtime) -> None:
    """Run optimizer steps until all are done, or a signal or a callback requests a stop.

    Collective over all ranks.
    """
    for chunk in run.model_chunks:
        chunk.train()
    run.callbacks.on_train_start(run)
    # A script may have callbacks on some ranks only, but all ranks must judge a step together.
    is_watched = on_any_rank(_has_watcher(run))
    while not run.finished():
        run.callbacks.on_step_start(run)
        is_needed = is_watched or run.callbacks.needs_result(run, run.state.iteration + 1)
        try:
            result = train_step(run, may_defer=not is_needed)
        except StepRejected as rejected:
            _stop(run, rejected)
            break
        flops = num_floating_point_operations(run.config, result.batch_size, run.padded_vocab_size)
        run.state.advance(result, flops)
        exit_report.note(iteration=run.state.iteration)
        run.callbacks.on_step_end(run, result)
    try:
        finish_deferred_step(run)
    except StepRejected as rejected:
        _stop(run, rejected)
    run.callbacks.on_train_end(run)


def _has_watcher(run: Runtime) -> bool:
    """Return whether a callback of this rank needs the result of every step by default."""
    return any(
        type(callback).needs_result is Callback.needs_result and callback.needs_result(run, 0)
        for callback in run.callbacks
    )


def _stop(run: Runtime, rejected: StepRejected) -> None:
    """Request the end of the run; a checkpoint of the state before the step may be needed."""
    run.state.stop(str(rejected))
    run.exit_code = rejected.exit_code
    if rejected.should_checkpoint:
        run.saved_at = None  # save again: the checkpoint needs the state of the reruns
