"""A run (ModelRun, TrainingRun) and the hooks that are called while it runs (Callback).

One module holds both because each needs the type of the other.

The loop has no code for logs, profilers or exit conditions.  It calls these hooks on every rank::

    on_train_start                      after set-up and loading, before the first step
      on_step_start                     before the micro-batches of a step
      on_step_end                       after the update; state.iteration is already advanced
      on_pause, on_resume               around an evaluation or a save between steps
        on_eval_step_start, _end        around each global batch of an evaluation
      on_eval_end                       after each evaluation of one data set, also outside the loop
      on_checkpoint                     after a checkpoint was saved, scheduled or deleted
    on_train_end                        after the last step, however the loop was ended
    close                               last, also after an exception

Callbacks are called in the order of the list; `megatron.training.callbacks.default` explains the
order of the built-in ones.  Evaluations and saves run inside `on_step_end` of built-in callbacks,
which come first.  They therefore run between `on_step_start` and `on_step_end` of a user's
callback: to measure a step, subtract the time from `on_pause` to `on_resume`.

Every rank calls the same hooks in the same order, so a hook may call
collectives; whether it does must depend on nothing but the configuration and the iteration.
``close`` must not communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from megatron.core.diagnostics.fault_injection import fault_point
from megatron.core.diagnostics.log_once import warn_switched_off
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.rerun.state_machine import RerunStateMachine
from megatron.training.checkpointing.checkpoint_tensors import RunParts
from megatron.training.checkpointing.checkpointer import Checkpointer, CheckpointEvent
from megatron.training.config.run import RunConfig
from megatron.training.data.loaders import TrainingData
from megatron.training.models.registry import implementation_of, layers_of_stages
from megatron.training.runtime.context import RunContext, StepResult
from megatron.training.runtime.step_graph import StepGraph

PauseReason = Literal["evaluation", "checkpoint"]


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """Mean losses over one dataset; ``losses`` is empty except on ranks of the last stage."""

    losses: Mapping[str, float]
    split: Literal["validation", "test"] = "validation"
    set_index: int | None = None  # index of the set with --multiple-validation-sets
    is_final: bool = False  # evaluated at the end of the run, not inside the loop


class Callback:
    """Base class of callbacks; each hook does nothing by default.

    ``log_name`` names the log that a callback writes, with its file.  If writing that log fails,
    the callback is removed instead of ending the run.  Such a callback must not communicate in any
    hook, because it may be removed on one rank only.
    """

    log_name: str | None = None

    def on_train_start(self, run: TrainingRun) -> None:
        """Called after set-up and loading, before the first step."""

    def on_step_start(self, run: TrainingRun) -> None:
        """Called before a step; ``run.state.iteration`` is the number of finished steps."""

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        """Called after a step; ``run.state.iteration`` is its number, counted from 1."""

    def on_pause(self, run: TrainingRun, reason: PauseReason) -> None:
        """Called when training pauses, until `on_resume`."""

    def on_resume(self, run: TrainingRun, reason: PauseReason) -> None:
        """Called when training continues after `on_pause`."""

    def on_eval_step_start(self, run: ModelRun) -> None:
        """Called before a global batch of an evaluation."""

    def on_eval_step_end(self, run: ModelRun) -> None:
        """Called after a global batch of an evaluation."""

    def on_eval_end(self, run: ModelRun, result: EvalResult) -> None:
        """Called after the evaluation of one dataset."""

    def on_checkpoint(self, run: TrainingRun, event: CheckpointEvent) -> None:
        """Called after a checkpoint was saved, scheduled, finalized or deleted."""

    def on_train_end(self, run: TrainingRun) -> None:
        """Called after the training loop; a final evaluation may follow."""

    def close(self) -> None:
        """Release resources.  Must not communicate: other ranks may have exited."""

    def writers(self) -> Mapping[str, Any]:
        """Return the writers of this rank by name (tensorboard, wandb), for scripts that log."""
        return {}


def _on_all(hook: str) -> Any:
    """Return a method that calls ``hook`` of all callbacks of a list, in order."""

    def call(callbacks: CallbackList, *args: object) -> None:
        call_each(callbacks._callbacks, lambda callback: getattr(callback, hook)(*args))

    return call


class CallbackList(Callback):
    """A list of callbacks that calls each hook on all of them, in order.

    An exception in a hook ends the run like one in the loop, unless it is the failure of a log
    sink.
    """

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self._callbacks = list(callbacks)

    def append(self, callback: Callback) -> None:
        """Add ``callback`` at the end."""
        self._callbacks.append(callback)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def __len__(self) -> int:
        return len(self._callbacks)

    on_train_start = _on_all("on_train_start")
    on_step_start = _on_all("on_step_start")
    on_step_end = _on_all("on_step_end")
    on_eval_step_start = _on_all("on_eval_step_start")
    on_eval_step_end = _on_all("on_eval_step_end")
    on_eval_end = _on_all("on_eval_end")
    on_checkpoint = _on_all("on_checkpoint")
    on_train_end = _on_all("on_train_end")
    close = _on_all("close")

    @contextmanager
    def paused(self, run: TrainingRun, reason: PauseReason) -> Iterator[None]:
        """Context manager for work between two steps, which does not count as training time."""
        call_each(self._callbacks, lambda callback: callback.on_pause(run, reason))
        yield
        call_each(self._callbacks, lambda callback: callback.on_resume(run, reason))

    def writers(self) -> Mapping[str, Any]:
        return {name: w for callback in self._callbacks for name, w in callback.writers().items()}


@dataclass(kw_only=True)
class ModelRun(RunContext):
    """A model on its ranks, with its data: enough to evaluate.

    Programs without data, callbacks or checkpoints leave these fields empty.
    """

    model_chunks: list[nn.Module]  # in the wrapper for data parallelism
    forward_step_func: Callable[..., Any]
    process_non_loss_data_func: Callable[..., Any] | None = None
    non_loss_data_func: Callable[..., Any] | None = None
    data: TrainingData = field(default_factory=TrainingData)
    callbacks: CallbackList = field(default_factory=CallbackList)
    checkpoints: Checkpointer = field(default_factory=Checkpointer)
    # `step.rerun.install_state_machine` replaces it
    rerun: RerunStateMachine = field(default_factory=RerunStateMachine)

    @property
    def config_of_work(self) -> RunConfig:
        """The configuration for estimates of a step's work: with rows of their mean length."""
        mean = self.data.mean_row_tokens
        if not mean:
            return self.config
        return replace(self.config, data=replace(self.config.data, seq_length=mean))

    @property
    def parts(self) -> RunParts:
        """The objects that a checkpoint is saved from and loaded into."""
        return RunParts(
            model_chunks=self.model_chunks,
            groups=self.groups,
            stages=layers_of_stages(self.config),
            kind=self.config.language_model.model_kind,
            asked=self.config.asked,
            rerun=self.rerun,
        )

    def load(self) -> None:
        """Load weights that are not trained, then the checkpoint of --load, if there is one.

        Collective over all ranks.
        """
        fault_point("load.before")
        implementation_of(self.config).load_frozen(self)
        self.checkpoints.load(self, self.parts)


@dataclass(kw_only=True)
class TrainingRun(ModelRun):
    """A run that trains: the loop, the step and the callbacks share it."""

    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    step_graph: StepGraph | None = None  # with --cuda-graph-scope full_iteration

    @property
    def parts(self) -> RunParts:
        """The objects that a checkpoint is saved from and loaded into."""
        return replace(super().parts, optimizer=self.optimizer, scheduler=self.scheduler)


class SinkFailed(Exception):
    """Failure of a file, service or library that a sink writes to; the message gives the cause."""


# Errors of a sink.  A sink converts exceptions of its library to SinkFailed.
SINK_ERRORS = (OSError, SinkFailed)


def call_each(items: list[Any], act: Callable[[Any], object]) -> None:
    """Call ``act`` for each of ``items``; remove an item whose log fails, with a warning.

    ``log_name`` of an item is the name of the log that it writes, with its file, or None.
    """
    for item in list(items):
        try:
            act(item)
        except SINK_ERRORS as error:
            if item.log_name is None:
                raise
            items.remove(item)
            warn_switched_off(item.log_name, error)
