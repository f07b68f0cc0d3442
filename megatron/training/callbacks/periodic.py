"""What a run does in a step or every so many: sections, evaluations, saves, stops, garbage.

Exit conditions are checked after logging, evaluation and the regular save, in the order of
`ExitConditions`.  The first that holds is the reported reason.  The run then saves a checkpoint,
unless this step has one already.

Order of collectives of exit conditions: the signal flag (one all-reduce, with
--exit-signal-handler), the elapsed time (one all-reduce, with --exit-duration-in-mins).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron.core import device
from megatron.core.dist_checkpointing.all_ranks import SaveFailed
from megatron.training.checkpointing.paths import checkpoint_folder
from megatron.training.fault_tolerance import sections
from megatron.training.process.rank_print import print_rank_0
from megatron.training.process.signals import StopSignal
from megatron.training.runtime.context import StepResult
from megatron.training.step.evaluate import evaluate_all, minutes_over_limit, received_anywhere
from megatron.training.step.run import Callback, ModelRun, PauseReason, TrainingRun


class Sections(Callback):
    """Report training steps, steps of evaluations and checkpoints to the `Monitor` of this rank.

    It is the first callback, so that a step ends before the work around it.  Collective over all
    ranks with --calc-ft-timeouts: see `Monitor.learn`.
    """

    def on_step_start(self, run: TrainingRun) -> None:
        sections.monitor.begin_step(run.state.iteration + 1)

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        sections.monitor.end_step()

    def on_eval_step_start(self, run: ModelRun) -> None:
        sections.monitor.begin("step")

    def on_eval_step_end(self, run: ModelRun) -> None:
        sections.monitor.end("step")

    def on_pause(self, run: TrainingRun, reason: PauseReason) -> None:
        if reason == "checkpoint":
            sections.monitor.begin("checkpointing")

    def on_resume(self, run: TrainingRun, reason: PauseReason) -> None:
        if reason == "checkpoint":
            sections.monitor.end("checkpointing")
            sections.monitor.learn()

    def on_train_end(self, run: TrainingRun) -> None:
        sections.monitor.learn()

    def close(self) -> None:
        sections.monitor.close()


class EvaluationCallback(Callback):
    """Evaluate the validation sets.  Collective over all ranks."""

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        interval = run.config.validation.eval_interval
        if not interval or run.state.iteration % interval or not run.data.valid_loaders:
            return
        with run.callbacks.paused(run, "evaluation"):
            results = evaluate_all(run)
        for evaluated in results:
            run.callbacks.on_eval_end(run, evaluated)


class CheckpointCallback(Callback):
    """Save checkpoints.  Collective over all ranks, which all take the same decision."""

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        """Publish finished background saves, and save if the step is due."""
        poll(run)
        config, iteration = run.config.checkpoint, run.state.iteration
        before = run.state.consumed_train_samples - result.batch_size
        size = run.batches.global_batch_size(before)
        is_ramp = run.batches.global_batch_size(before + size) != size
        if _is_due(config.save_interval, iteration) or is_ramp:
            save_unless_saved(run)
        if _is_due(config.non_persistent_save_interval, iteration):
            save_unless_saved(run, is_transient=True)


def poll(run: TrainingRun) -> None:
    """Process a background save that has finished.  Collective while a save is pending."""
    with _reports(run):
        run.checkpoints.poll(run)


def save(run: TrainingRun, *, is_last: bool = False, is_transient: bool = False) -> None:
    """Save a checkpoint of this step; see `Checkpointer.save`.  Collective over all ranks."""
    with _reports(run), run.callbacks.paused(run, "checkpoint"):
        save_loader_state(run, run.data.train_loader)
        run.checkpoints.save(run, run.parts, is_last=is_last, is_transient=is_transient)


def save_unless_saved(run: TrainingRun, *, is_transient: bool = False) -> None:
    """Call `save` if the run saves checkpoints and none of them has this step yet."""
    config = run.config.checkpoint
    saves = run.checkpoints
    if not (is_transient or config.save is not None) or saves.saved_at == run.state.iteration:
        return
    if saves.pending is None or config.async_save_when_busy == "wait":
        save(run, is_transient=is_transient)
    else:
        print_rank_0(
            f"NOTE: iteration {run.state.iteration} is not saved: the checkpoint of iteration "
            f"{saves.pending.iteration} is still being written (--async-save-when-busy skip)"
        )


def save_last(run: TrainingRun) -> None:
    """Wait for the pending save; then save this step if no checkpoint has it.  Collective."""
    if run.checkpoints.pending is not None:
        with _reports(run), run.callbacks.paused(run, "checkpoint"):
            run.checkpoints.wait(run)
    if run.config.checkpoint.save is not None and run.checkpoints.saved_at != run.state.iteration:
        save(run, is_last=True)


@contextmanager
def _reports(run: TrainingRun) -> Iterator[None]:
    """Tell the callbacks, at the end of the context, what has happened to checkpoints."""
    failure: SaveFailed | None = None
    try:
        yield
    except SaveFailed as error:  # on all ranks alike
        failure = error
    events = run.checkpoints.events
    run.checkpoints.events = []
    for event in events:
        run.callbacks.on_checkpoint(run, event)
    if failure is not None:
        raise failure


def _is_due(interval: int | None, iteration: int) -> bool:
    return interval is not None and iteration % interval == 0


class ExitConditions(Callback):
    """Stop the run when an exit condition holds.

    ``stop_signal`` is the handler that --exit-signal-handler has installed.
    """

    def __init__(self, stop_signal: StopSignal | None) -> None:
        self._stop_signal = stop_signal

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        if self._stop_signal is not None and received_anywhere(self._stop_signal):
            run.state.stop(f"exiting program after receiving {self._stop_signal.name}.")
        minutes = minutes_over_limit(run)
        if minutes is not None:
            run.state.stop(f"exiting program after {minutes} minutes")
        interval = run.config.training.exit_interval
        if interval and run.state.iteration % interval == 0:
            run.state.stop(f"exiting program at iteration {run.state.iteration}")

    def on_train_end(self, run: TrainingRun) -> None:
        if run.state.stop_reason is not None:
            save_last(run)


class ManualGC(Callback):
    """Collect garbage every --manual-gc-interval steps (0: never) and around evaluations."""

    def on_train_start(self, run: TrainingRun) -> None:
        gc.disable()
        gc.collect()

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        interval = run.config.training.manual_gc_interval
        if interval and run.state.iteration % interval == 0:
            gc.collect()

    def on_pause(self, run: TrainingRun, reason: PauseReason) -> None:
        if reason == "evaluation" and run.config.training.manual_gc_eval:
            gc.collect()

    def on_resume(self, run: TrainingRun, reason: PauseReason) -> None:
        if reason == "evaluation" and run.config.training.manual_gc_eval:
            gc.collect(generation=0)  # only objects that the evaluation created

    def close(self) -> None:
        gc.enable()


class TrainSync(Callback):
    """Synchronize with the device every ``interval`` steps."""

    def __init__(self, interval: int) -> None:
        self._interval = interval

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        if run.state.iteration % self._interval == 0:
            device.synchronize()


def save_loader_state(run: TrainingRun, loader: Any) -> None:
    """Write the loader's state after the micro-batches of this step, if --dataloader-save is set.

    The files are those of Megatron-LM: ``iter_N/mp_rank_00[_000]/train_dataloader_dprankNNN.pt``
    holds ``{"dataloader_state_dict": loader.save_state()}``.  The program that brings the loader
    restores it, because only its package knows the types of the state.

    ``loader``: of the program, or None.
    One rank of each data-parallel replica writes: the one that reads for the first stage.  Called
    before the checkpoint is published, so that a published checkpoint has its state.
    """
    folder = run.config.data.dataloader_save
    groups = run.groups
    is_reader = groups.tp.rank() == 0 and groups.pp.rank() == 0 and groups.cp.rank() == 0
    if folder is None or loader is None or not is_reader:
        return
    stage = "mp_rank_00" + ("_000" if groups.pp.size() > 1 else "")
    name = f"train_dataloader_dprank{groups.dp.rank():03d}.pt"
    path = Path(checkpoint_folder(folder, run.state.iteration)) / stage / name
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save({"dataloader_state_dict": loader.save_state()}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
