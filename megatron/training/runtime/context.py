"""The context of a run: what exists before its model does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from megatron.core.config.value_types import JsonObject
from megatron.core.diagnostics.timers import Timers
from megatron.core.num_microbatches_calculator import NumMicroBatchesCalculator
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.pipeline_parallel.plan import Placement
from megatron.training.config.run import RunConfig
from megatron.training.runtime.state import TrainState
from megatron.training.tokenizer import MegatronTokenizer


@dataclass
class ObjectiveState:
    """What the objective of a run has computed from its data and its checkpoint."""

    loss_share: float = 1.0  # see `StepHooks`
    dataset_settings: dict[str, Any] = field(default_factory=dict)  # of `prepare_data`
    # What it saves in a checkpoint after the current step, and what it has found in the checkpoint
    # that the run continues.
    saved: JsonObject | None = None


@dataclass(kw_only=True)
class RunContext:
    """Configuration, process groups, tokenizer and counters: what every program with a model has.

    `megatron.training.initialize.start` returns it; `ModelRun` and `TrainingRun` extend it.
    """

    config: RunConfig
    groups: ProcessGroupCollection
    timers: Timers
    batches: NumMicroBatchesCalculator
    started_at_s: float  # time.time() of the process start
    tokenizer: MegatronTokenizer
    padded_vocab_size: int
    train_iters: int = 0  # derived from --train-samples or --epochs where these are given
    samples_of_epochs: int | None = None  # with --epochs
    state: TrainState = field(default_factory=TrainState)
    objective: ObjectiveState = field(default_factory=ObjectiveState)

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
