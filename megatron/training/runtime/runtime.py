"""The live objects of a run (Runtime), and what is called while it goes on (Callback).

The two are in one module as each needs the type of the other.

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
hooks are called on all ranks in the same order.  ``close`` must not communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from megatron.core.diagnostics.timers import Timers
from megatron.core.dist_checkpointing.background import BackgroundSave, Worker
from megatron.core.dist_checkpointing.mapping import SavePlan
from megatron.core.dist_checkpointing.snapshot import HostBuffer
from megatron.core.num_microbatches_calculator import NumMicroBatchesCalculator
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.pipeline_parallel.plan import Placement
from megatron.training.config.run import RunConfig
from megatron.training.runtime.sink_failure import call_each
from megatron.training.runtime.state import StepResult, TrainState
from megatron.training.runtime.step_graph import StepGraph

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


@dataclass
class Runtime:
    """What the loop, the step and the callbacks work on."""

    config: RunConfig
    groups: ProcessGroupCollection
    timers: Timers
    batches: NumMicroBatchesCalculator
    started_at_s: float  # time.time() of the process start
    state: TrainState = field(default_factory=TrainState)
    tokenizer: Any = None
    padded_vocab_size: int = 0
    model_chunks: list[nn.Module] = field(default_factory=list)  # wrapped in DDP
    optimizer: Any = None
    scheduler: Any = None
    forward_step_func: Callable[..., Any] | None = None
    process_non_loss_data_func: Callable[..., Any] | None = None
    non_loss_data_func: Callable[..., Any] | None = None
    step_graph: StepGraph | None = None  # with --cuda-graph-scope full_iteration
    train_data: Any = None  # an iterator; with several model chunks one for each
    # one loader per validation set; a fresh iterator is made for every pass
    valid_loaders: list[Any] = field(default_factory=list)
    test_loader: Any = None
    has_test_set: bool = False  # the same on all ranks
    callbacks: CallbackList = field(default_factory=CallbackList)
    last_step: StepResult | None = None  # for scripts that log the step they have made
    saved_at: int | None = None  # iteration of the newest checkpoint of this run
    pending_save: BackgroundSave | None = None  # with --async-save
    snapshot_memory: HostBuffer = field(default_factory=HostBuffer)
    checkpoint_worker: Worker | None = None  # with --use-persistent-ckpt-worker
    save_plan: SavePlan | None = None  # with --ckpt-assume-constant-structure
    failed_saves: int = 0  # in a row
    train_iters: int = 0  # derived from --train-samples where that is given
    phase: str = "start-up"  # what the run is doing: the report of a failed allocation says it

    @property
    def placement(self) -> Placement:
        """Which virtual pipeline stage lies where."""
        return self.config.placement

    @property
    def stages(self) -> list[int]:
        """The virtual pipeline stage of each model chunk."""
        rank = self.groups.pp.rank()
        return [self.placement.stage(rank, chunk) for chunk in range(self.placement.num_chunks)]

    @property
    def has_loss(self) -> bool:
        """Whether one of the chunks computes the loss."""
        return self.placement.num_stages - 1 in self.stages

    @property
    def is_rank_0(self) -> bool:
        """Whether this rank speaks at start-up."""
        return dist.get_rank() == 0

    @property
    def is_last_loss_rank(self) -> bool:
        """Whether this is the last rank that has the loss; it prints the training line.

        It is also the last of all ranks, except under zb-v, whose first stage has the loss.
        """
        others = (self.groups.tp, self.groups.cp, self.groups.dp)
        return self.has_loss and all(group.rank() == group.size() - 1 for group in others)

    def finished(self) -> bool:
        """Whether the loop ends before another step."""
        return self.state.stop_reason is not None or self.state.iteration >= self.train_iters
