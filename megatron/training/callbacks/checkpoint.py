"""Save checkpoints at the intervals and before the batch size changes; poll a background save."""

from __future__ import annotations

from megatron.training.checkpointing.run_checkpoint import poll, save_unless_saved
from megatron.training.runtime.runtime import Callback, Runtime
from megatron.training.runtime.state import StepResult


class CheckpointCallback(Callback):
    """Save checkpoints.  Collective over all ranks, which all take the same decision."""

    def on_step_end(self, run: Runtime, result: StepResult) -> None:
        poll(run)
        config, iteration = run.config.checkpoint, run.state.iteration
        before = run.state.consumed_train_samples - result.batch_size
        if _is_due(config.save_interval, iteration) or _changes_batch_size(run, before):
            save_unless_saved(run)
        if _is_due(config.non_persistent_save_interval, iteration):
            save_unless_saved(run, is_transient=True)


def _changes_batch_size(run: Runtime, consumed: int) -> bool:
    """Return whether the batch size after a step that follows ``consumed`` samples is another."""
    size = run.batches.global_batch_size(consumed)
    return run.batches.global_batch_size(consumed + size) != size


def _is_due(interval: int | None, iteration: int) -> bool:
    return interval is not None and iteration % interval == 0
