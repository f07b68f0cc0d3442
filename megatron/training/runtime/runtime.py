"""Live objects of a run (Runtime) and hooks that are called while it runs (Callback).

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

import torch.distributed as dist
from torch import nn

from megatron.core.config.value_types import Arguments, JsonObject
from megatron.core.diagnostics.timers import Timers
from megatron.core.dist_checkpointing.background import BackgroundSave, HostBuffer, Worker
from megatron.core.dist_checkpointing.mapping import SavePlan
from megatron.core.num_microbatches_calculator import NumMicroBatchesCalculator
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.pipeline_parallel.plan import Placement
from megatron.core.pipeline_parallel.schedules import AdjustShapes
from megatron.core.rerun_state_machine import RerunStateMachine
from megatron.training.config.run import RunConfig
from megatron.training.runtime.sink_failure import call_each
from megatron.training.runtime.state import StepResult, TrainState
from megatron.training.runtime.step_graph import StepGraph
from megatron.training.tokenizer import MegatronTokenizer

PauseReason = Literal["evaluation", "checkpoint"]


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """Mean losses over one dataset; ``losses`` is empty except on ranks of the last stage."""

    losses: Mapping[str, float]
    split: Literal["validation", "test"] = "validation"
    set_index: int | None = None  # index of the set with --multiple-validation-sets
    is_final: bool = False  # evaluated at the end of the run, not inside the loop


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent:
    """Event in the life of a checkpoint.  --async-save uses ``scheduled`` and ``finalized``.

    ``stall_s`` is the time in seconds for which training stopped.
    """

    kind: Literal["saved", "scheduled", "finalized", "deleted"]
    iteration: int
    stall_s: float = 0.0


class Callback:
    """Base class of callbacks; each hook does nothing by default.

    ``log_name`` names the log that a callback writes, with its file.  If writing that log fails,
    the callback is removed instead of ending the run.  Such a callback must not communicate in any
    hook, because it may be removed on one rank only.
    """

    log_name: str | None = None

    def on_train_start(self, run: Runtime) -> None:
        """Called after set-up and loading, before the first step."""

    def on_step_start(self, run: Runtime) -> None:
        """Called before a step; ``run.state.iteration`` is the number of finished steps."""

    def on_step_end(self, run: Runtime, result: StepResult) -> None:
        """Called after a step; ``run.state.iteration`` is its number, counted from 1."""

    def on_pause(self, run: Runtime, reason: PauseReason) -> None:
        """Called when training pauses, until `on_resume`."""

    def on_resume(self, run: Runtime, reason: PauseReason) -> None:
        """Called when training continues after `on_pause`."""

    def on_eval_step_start(self, run: Runtime) -> None:
        """Called before a global batch of an evaluation."""

    def on_eval_step_end(self, run: Runtime) -> None:
        """Called after a global batch of an evaluation."""

    def on_eval_end(self, run: Runtime, result: EvalResult) -> None:
        """Called after the evaluation of one dataset."""

    def on_checkpoint(self, run: Runtime, event: CheckpointEvent) -> None:
        """Called after a checkpoint was saved, scheduled, finalized or deleted."""

    def on_train_end(self, run: Runtime) -> None:
        """Called after the training loop; a final evaluation may follow."""

    def close(self) -> None:
        """Release resources.  Must not communicate: other ranks may have exited."""

    def writers(self) -> Mapping[str, Any]:
        """Return the writers of this rank by name (tensorboard, wandb), for scripts that log."""
        return {}


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

    def on_train_start(self, run: Runtime) -> None:
        call_each(self._callbacks, lambda callback: callback.on_train_start(run))

    def on_step_start(self, run: Runtime) -> None:
        call_each(self._callbacks, lambda callback: callback.on_step_start(run))

    def on_step_end(self, run: Runtime, result: StepResult) -> None:
        call_each(self._callbacks, lambda callback: callback.on_step_end(run, result))

    @contextmanager
    def paused(self, run: Runtime, reason: PauseReason) -> Iterator[None]:
        """Context manager for work between two steps, which does not count as training time."""
        call_each(self._callbacks, lambda callback: callback.on_pause(run, reason))
        yield
        call_each(self._callbacks, lambda callback: callback.on_resume(run, reason))

    def on_eval_step_start(self, run: Runtime) -> None:
        call_each(self._callbacks, lambda callback: callback.on_eval_step_start(run))

    def on_eval_step_end(self, run: Runtime) -> None:
        call_each(self._callbacks, lambda callback: callback.on_eval_step_end(run))

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
        """Return the SummaryWriter of this rank, or None."""
        return self.writers().get("tensorboard")

    def wandb_writer(self) -> Any:
        """Return the wandb module if this rank has started a wandb run, otherwise None."""
        return self.writers().get("wandb")


@dataclass
class Runtime:
    """Live objects of a run, which the loop, the step and the callbacks share."""

    config: RunConfig
    groups: ProcessGroupCollection
    timers: Timers
    batches: NumMicroBatchesCalculator
    started_at_s: float  # time.time() of the process start
    state: TrainState = field(default_factory=TrainState)
    tokenizer: MegatronTokenizer | None = None  # from `setup_tokenizer` on
    padded_vocab_size: int = 0
    model_chunks: list[nn.Module] = field(default_factory=list)  # wrapped in DDP
    optimizer: MegatronOptimizer | None = None
    scheduler: OptimizerParamScheduler | None = None
    # Shapes of what stages send, of a model that sends more than hidden states.
    adjust_tensor_shapes: AdjustShapes | None = None
    forward_step_func: Callable[..., Any] | None = None
    process_non_loss_data_func: Callable[..., Any] | None = None
    non_loss_data_func: Callable[..., Any] | None = None
    step_graph: StepGraph | None = None  # with --cuda-graph-scope full_iteration
    loss_share: float = 1.0  # see `StepHooks`
    dataset_settings: dict[str, Any] = field(default_factory=dict)  # computed by `prepare_data`
    mean_row_tokens: int = 0  # of training data; 0: all rows have --seq-length tokens
    train_data: Any = None  # iterator; with several model chunks a list of one per chunk
    train_loader: Any = None  # of the program, with --dataloader-type external
    # one loader per validation set; every pass makes a new iterator
    valid_loaders: list[Any] = field(default_factory=list)
    test_loader: Any = None
    has_test_set: bool = False  # the same on all ranks
    callbacks: CallbackList = field(default_factory=CallbackList)
    last_step: StepResult | None = None  # for scripts that write their own log
    loaded_from: str | None = None  # folder of the checkpoint that the run began with
    saved_at: int | None = None  # iteration of the newest checkpoint of this run
    adapter_base: Arguments | None = None  # what checkpoints of adapters say about their base
    started_from: str | None = None  # folder of the weights that the run started from
    pending_save: BackgroundSave | None = None  # with --async-save
    snapshot_memory: HostBuffer = field(default_factory=HostBuffer)
    checkpoint_worker: Worker | None = None  # with --use-persistent-ckpt-worker
    save_plan: SavePlan | None = None  # with --ckpt-assume-constant-structure
    failed_saves: int = 0  # consecutive
    train_iters: int = 0  # derived from --train-samples or --epochs where these are given
    samples_of_epochs: int | None = None  # with --epochs
    # of this rank; `step.rerun.install_state_machine` replaces it
    rerun: RerunStateMachine = field(default_factory=RerunStateMachine)
    # What the objective of the run saves in a checkpoint after the current step, and what it has
    # found in the checkpoint that the run continues.
    objective_state: JsonObject | None = None
    exit_code: int = 0  # of the program, where a step was rejected
    phase: str = "start-up"  # current phase, for the out-of-memory report

    @property
    def config_of_work(self) -> RunConfig:
        """The configuration for estimates of a step's work: with rows of their mean length."""
        if not self.mean_row_tokens:
            return self.config
        return replace(self.config, data=replace(self.config.data, seq_length=self.mean_row_tokens))

    @property
    def placement(self) -> Placement:
        """Assignment of virtual pipeline stages to (pipeline rank, model chunk)."""
        return self.config.placement

    @property
    def stages(self) -> list[int]:
        """Virtual pipeline stage of each model chunk of this rank."""
        rank = self.groups.pp.rank()
        return [self.placement.stage(rank, chunk) for chunk in range(self.placement.num_chunks)]

    @property
    def has_loss(self) -> bool:
        """Whether a model chunk of this rank computes the loss."""
        return self.placement.num_stages - 1 in self.stages

    @property
    def is_rank_0(self) -> bool:
        """Whether this is global rank 0, which prints the messages at start-up."""
        return dist.get_rank() == 0

    @property
    def is_last_loss_rank(self) -> bool:
        """Whether this is the last rank that has the loss; it prints the training log.

        It is also the last global rank, except under zb-v, where the first pipeline rank has the
        loss.
        """
        others = (self.groups.tp, self.groups.cp, self.groups.dp)
        return self.has_loss and all(group.rank() == group.size() - 1 for group in others)

    def finished(self) -> bool:
        """Return whether the loop must end before another step."""
        return self.state.stop_reason is not None or self.state.iteration >= self.train_iters
