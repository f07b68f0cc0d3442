"""The train loop: it calls the optimizer step; everything else is a callback."""

from __future__ import annotations

from megatron.core.parallel.json_collectives import all_gather_json
from megatron.training.estimates.flops import num_floating_point_operations
from megatron.training.process import exit_report
from megatron.training.process.rank_print import print_rank_0
from megatron.training.runtime.runtime import Callback, Runtime
from megatron.training.step.rerun import StepRejected
from megatron.training.step.train_step import finish_deferred_step, train_step


def train(run: Runtime) -> None:
    """Run optimizer steps until all are done, or a signal or a callback requests a stop.

    Collective over all ranks.
    """
    for chunk in run.model_chunks:
        chunk.train()
    # Scripts that test resumption search for Megatron-LM's line.
    if run.state.iteration == 0 or run.rerun.current_iteration != run.state.iteration:
        print_rank_0(f"Setting rerun_state_machine.current_iteration to {run.state.iteration}...")
        run.rerun.current_iteration = run.state.iteration
    run.callbacks.on_train_start(run)
    is_watched = _is_watched(run)
    while not run.finished():
        run.callbacks.on_step_start(run)
        is_needed = is_watched or run.callbacks.needs_result(run, run.state.iteration + 1)
        try:
            result = train_step(run, may_defer=not is_needed)
        except StepRejected as rejected:
            _stop(run, rejected)
            break
        flops = num_floating_point_operations(
            run.config_of_work, result.batch_size, run.padded_vocab_size
        )
        run.state.advance(result, flops)
        exit_report.note(iteration=run.state.iteration)
        run.callbacks.on_step_end(run, result)
    try:
        finish_deferred_step(run)
    except StepRejected as rejected:
        _stop(run, rejected)
    run.callbacks.on_train_end(run)


def _is_watched(run: Runtime) -> bool:
    """Return whether the host must know the result of every step.  Collective over all ranks.

    All ranks must judge a step together, but a script may have callbacks on some ranks only.  If
    these decide for themselves (`Callback.needs_result`), the other ranks could not know.
    """
    deciders = [
        f"{type(callback).__module__}.{type(callback).__qualname__}"
        for callback in run.callbacks
        if type(callback).needs_result is not Callback.needs_result
        and not type(callback).__module__.startswith("megatron.")  # those agree on all ranks
    ]
    found = all_gather_json((_has_watcher(run), deciders), run.groups.world)
    return any(has_watcher or others != found[0][1] for has_watcher, others in found)


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
