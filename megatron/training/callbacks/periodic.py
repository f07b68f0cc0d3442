"""What a run does in a step or every so many: sections, evaluations, saves, stops, garbage.

Exit conditions are checked after logging, evaluation and the regular save, in the order of
`ExitConditions`.  The first that holds is the reported reason.  The run then saves a checkpoint,
unless this step has one already.

Order of collectives of exit conditions: the signal flag (one all-reduce, with
--exit-signal-handler), the elapsed time (one all-reduce, with --exit-duration-in-mins).
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.dist_checkpointing.all_ranks import SaveFailed
from megatron.core.parallel.collectives import all_gather_json
from megatron.training.data.loaders import state_path
from megatron.training.fault_tolerance import sections
from megatron.training.process.rank_print import print_rank_0
from megatron.training.process.signals import StopSignal
from megatron.training.runtime.context import StepResult
from megatron.training.step.evaluate import evaluate_all, minutes_over_limit, received_anywhere
from megatron.training.step.run import Callback, EvalResult, ModelRun, PauseReason, TrainingRun


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

    _is_first = True

    def on_train_start(self, run: TrainingRun) -> None:
        if seeks_best(run) and not run.data.valid_loaders:
            flag = "--save-best" if run.config.checkpoint.save_best else "--early-stopping-patience"
            raise ConfigError(
                f"{flag} compares evaluations, and the run has no validation data: give a --split "
                "with a share for it or --valid-data-path, and --eval-iters above 0"
            )

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        if not run.data.valid_loaders:
            return
        if self._is_first and run.config.validation.best_metric and not result.skipped:
            _best_metric(run, dict.fromkeys(result.losses, 0.0))  # raises for an unknown name
            self._is_first = False
        is_last = seeks_best(run) and run.state.iteration == run.train_iters
        if not _is_due(run.config.validation.eval_interval, run.state.iteration) and not is_last:
            return
        with run.callbacks.paused(run, "evaluation"):
            results = evaluate_all(run)
        for evaluated in results:
            run.callbacks.on_eval_end(run, evaluated)
        if seeks_best(run) and len(results) == len(run.data.valid_loaders):
            note_best(run, results)


def seeks_best(run: TrainingRun) -> bool:
    """Return whether the run compares its evaluations."""
    patience = run.config.validation.early_stopping_patience
    return run.config.checkpoint.save_best or patience is not None


def note_best(run: TrainingRun, results: Sequence[EvalResult]) -> None:
    """Compare the mean of --best-metric over the validation sets with the best one so far.

    Collective over all ranks, which take the same decision.  Raises ConfigError on all ranks if
    the metric is not measured.
    """
    state = run.state
    means = {
        name: sum(each.losses[name] for each in results) / len(results)
        for name in results[0].losses
    }
    name, value = _best_metric(run, means)
    higher = -1 if "loss" in name else 1
    gain = higher * (value - state.best_metric) if state.best_iteration else math.inf
    if math.isnan(value):
        gain = 0.0
    if gain > 0:
        state.best_metric = value
        state.best_iteration = state.iteration
    is_enough = gain > run.config.validation.early_stopping_min_delta
    state.evaluations_since_best = 0 if is_enough else state.evaluations_since_best + 1
    if state.best_iteration:
        best = f"{name} {state.best_metric:.6E} of iteration {state.best_iteration}"
        print_rank_0(f" the best evaluation is {best}")
    if run.finished() and state.iteration < run.train_iters:
        print_rank_0(
            f" stopping early: {state.evaluations_since_best} evaluations in a row were no "
            "improvement (--early-stopping-patience)"
        )


def _best_metric(run: TrainingRun, losses: Mapping[str, float]) -> tuple[str, float]:
    """Return name and value of --best-metric, by default the first of ``losses``.

    The values are those of the rank that prints them.  Collective over all ranks.
    """
    of_ranks = all_gather_json(dict(losses) if run.is_last_loss_rank else {}, run.groups.world)
    shared = max(of_ranks, key=len)
    name = run.config.validation.best_metric or next(iter(shared))
    if name not in shared:
        raise ConfigError(
            f"--best-metric {name} is not measured in this run: choose one of {', '.join(shared)}"
        )
    return name, shared[name]


class CheckpointCallback(Callback):
    """Save checkpoints.  Collective over all ranks, which all take the same decision."""

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        """Publish finished background saves, and save if the step is due."""
        poll(run)
        config, iteration = run.config.checkpoint, run.state.iteration
        before = run.state.consumed_train_samples - result.batch_size
        size = run.batches.global_batch_size(before)
        is_ramp = run.batches.global_batch_size(before + size) != size
        is_best = config.save_best and run.state.best_iteration == iteration
        if _is_due(config.save_interval, iteration) or is_ramp or is_best:
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
    path = state_path(run, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save({"dataloader_state_dict": loader.save_state()}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
