"""When a callback is called, and in which order.

The loop knows nothing of logs, profilers or exit conditions.  It calls, on every rank::

    on_train_start                      after set-up and loading, before the first step
      on_step_start                     before the micro-batches of a step
      on_step_end                       after the update; state.iteration is already advanced
      on_pause, on_resume               around an evaluation or a save between steps
      on_eval_end                       after each evaluation of one data set, also outside the loop
      on_checkpoint                     after a checkpoint was saved, scheduled or deleted
    on_train_end                        after the last step, however the loop was ended
    close                               at the very end, also after an exception

Callbacks are called in the order of the list; the built-in ones stand in the order in which their
effects must come (`megatron.training.callbacks.default`).  What several ranks do together inside a
hook (a reduction, a barrier) must not depend on anything but the configuration and the iteration:
hooks are called on all ranks in the same order.  ``close`` may not talk to other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megatron.training.callbacks.sink_failure import call_each

if TYPE_CHECKING:
    from megatron.training.runtime import Runtime
    from megatron.training.state import StepResult

PauseReason = Literal["evaluation", "checkpoint"]


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """Mean losses over one data set.  ``losses`` is filled on the ranks of the last stage."""

    losses: Mapping[str, float]
    split: Literal["validation", "test"] = "validation"
    set_index: int | None = None  # number of the set with --multiple-validation-sets
    is_final: bool = False  # evaluated at the end of the run, not inside the loop


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent:
    """What happened to a checkpoint.  ``scheduled`` and ``finalized`` belong to --async-save.

    ``stall_s`` is how long training stood still for it.
    """

    kind: Literal["saved", "scheduled", "finalized", "deleted"]
    iteration: int
    stall_s: float = 0.0


class Callback:
    """Does something at the marked moments of a run; each hook does nothing by default.

    ``log_name`` names the log that a callback writes, with its file.  If the place of such a log
    fails, the callback is switched off instead of ending the run; it may communicate in no hook.
    """

    log_name: str | None = None

    def on_train_start(self, run: Runtime) -> None:
        """Everything is built and loaded; no step has run."""

    def on_step_start(self, run: Runtime) -> None:
        """A step begins; ``run.state.iteration`` steps are done."""

    def on_step_end(self, run: Runtime, result: StepResult) -> None:
        """A step is done and counted: ``run.state.iteration`` is its number, from 1."""

    def on_pause(self, run: Runtime, reason: PauseReason) -> None:
        """Training stands still until `on_resume`."""

    def on_resume(self, run: Runtime, reason: PauseReason) -> None:
        """Training goes on."""

    def on_eval_end(self, run: Runtime, result: EvalResult) -> None:
        """One data set was evaluated."""

    def on_checkpoint(self, run: Runtime, event: CheckpointEvent) -> None:
        """A checkpoint was saved, scheduled, finalized or deleted."""

    def on_train_end(self, run: Runtime) -> None:
        """The loop is over; a last evaluation may follow."""

    def close(self) -> None:
        """Give back what was opened.  Other ranks may be gone already."""

    def writers(self) -> Mapping[str, Any]:
        """What this rank writes to, for scripts that log themselves: tensorboard, wandb."""
        return {}


class CallbackList(Callback):
    """Calls each callback in order.

    An exception in a hook ends the run, as one in the loop, unless a log sink has failed.
    """

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self._callbacks = list(callbacks)

    def append(self, callback: Callback) -> None:
        """Add ``callback`` behind the others."""
        self._callbacks.append(callback)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def __len__(self) -> int:
        return len(self._callbacks)

    def on_train_start(self, run: Runtime) -> None:
        call_each(self._callbacks, lambda callback: callback.on_train_start(run))

    def on_step_start(self, run: Runtime) -> None:
        call_each(self._callbacks, lambda callback: callback.on_step_start(run))

    def on_step_end(self, run: Runtime, result: StepResult) -> None:
        call_each(self._callbacks, lambda callback: callback.on_step_end(run, result))

    @contextmanager
    def paused(self, run: Runtime, reason: PauseReason) -> Iterator[None]:
        """Around what happens between two steps, so that it does not count as training time."""
        call_each(self._callbacks, lambda callback: callback.on_pause(run, reason))
        yield
        call_each(self._callbacks, lambda callback: callback.on_resume(run, reason))

    def on_eval_end(self, run: Runtime, result: EvalResult) -> None:
        call_each(self._callbacks, lambda callback: callback.on_eval_end(run, result))

    def on_checkpoint(self, run: Runtime, event: CheckpointEvent) -> None:
        call_each(self._callbacks, lambda callback: callback.on_checkpoint(run, event))

    def on_train_end(self, run: Runtime) -> None:
        call_each(self._callbacks, lambda callback: callback.on_train_end(run))

    def close(self) -> None:
        call_each(self._callbacks, lambda callback: callback.close())

    def writers(self) -> Mapping[str, Any]:
        return {name: w for callback in self._callbacks for name, w in callback.writers().items()}

    def tensorboard_writer(self) -> Any:
        """The SummaryWriter of this rank, or None."""
        return self.writers().get("tensorboard")

    def wandb_writer(self) -> Any:
        """The wandb module with a run started, or None."""
        return self.writers().get("wandb")
