"""Saves at --save-interval, and before the batch size changes."""

from __future__ import annotations

from megatron.training.callbacks.base import Callback
from megatron.training.checkpoint_io import save_unless_saved
from megatron.training.runtime import Runtime
from megatron.training.state import StepResult


class CheckpointCallback(Callback):
    """Collective over all ranks; what decides is the same on all of them."""

    def on_step_end(self, run: Runtime, result: StepResult) -> None:
        interval = run.config.checkpoint.save_interval
        is_due = interval is not None and run.state.iteration % interval == 0
        before = run.state.consumed_train_samples - result.batch_size
        sizes = {
            run.batches.global_batch_size(consumed)
            for consumed in (before, run.state.consumed_train_samples)
        }
        if is_due or len(sizes) > 1:
            save_unless_saved(run)
