"""Runtime: the live objects of a run, filled in the order of set-up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron.core.diagnostics.timers import Timers
from megatron.core.dist_checkpointing.background import BackgroundSave, Worker
from megatron.core.dist_checkpointing.mapping import SavePlan
from megatron.core.dist_checkpointing.snapshot import HostBuffer
from megatron.core.num_microbatches_calculator import NumMicroBatchesCalculator
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.pipeline_parallel.plan import Placement
from megatron.training.callbacks.base import CallbackList
from megatron.training.config.run import RunConfig
from megatron.training.state import StepResult, TrainState
from megatron.training.step_graph import StepGraph


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
    def is_last_rank(self) -> bool:
        """Whether this rank prints the training line and writes TensorBoard: the last with a loss.

        It is the last of all, unless stages lie in a V and the loss with the embedding.
        """
        others = (self.groups.tp, self.groups.cp, self.groups.dp)
        return self.has_loss and all(group.rank() == group.size() - 1 for group in others)

    def finished(self) -> bool:
        """Whether the loop ends before another step."""
        return self.state.stop_reason is not None or self.state.iteration >= self.train_iters
