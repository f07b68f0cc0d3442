"""The train loop: it calls the optimizer step; everything else is a callback."""

from __future__ import annotations

from megatron.training.estimates.flops import num_floating_point_operations
from megatron.training.process import exit_report
from megatron.training.process.rank_print import print_rank_0
from megatron.training.step.rerun import StepRejected, run_step
from megatron.training.step.run import TrainingRun
from megatron.training.step.train_step import train_step


def train(run: TrainingRun) -> None:
    """Run optimizer steps until all are done, or a signal or a callback requests a stop.

    Collective over all ranks.
    """
    for chunk in run.model_chunks:
        chunk.train()
    # Scripts that test resumption search for Megatron-LM's line.
    if run.state.iteration == 0 or run.rerun.current_iteration != run.state.iteration:
        print_rank_0(f"Setting rerun_state_machine.current_iteration to {run.state.iteration}...")
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
        flops = num_floating_point_operations(
            run.config_of_work, result.batch_size, run.padded_vocab_size
        )
        run.state.advance(result, flops)
        exit_report.note(iteration=run.state.iteration)
        run.callbacks.on_step_end(run, result)
    run.callbacks.on_train_end(run)
