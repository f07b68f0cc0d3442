"""The train loop: it calls the optimizer step; everything else is a callback."""

from __future__ import annotations

from megatron.training.estimates.flops import num_floating_point_operations
from megatron.training.process import exit_report
from megatron.training.runtime.runtime import Runtime
from megatron.training.step.train_step import train_step


def train(run: Runtime) -> None:
    """Run optimizer steps until all are done, or a signal or a callback requests a stop.

    Collective over all ranks.
    """
    for chunk in run.model_chunks:
        chunk.train()
    run.callbacks.on_train_start(run)
    while not run.finished():
        run.callbacks.on_step_start(run)
        result = train_step(run)
        flops = num_floating_point_operations(run.config, result.batch_size, run.padded_vocab_size)
        run.state.advance(result, flops)
        exit_report.note(iteration=run.state.iteration)
        run.callbacks.on_step_end(run, result)
    run.callbacks.on_train_end(run)
