"""The context of a run: what exists before its model, with its counters; the result of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron.core.config.value_types import JsonObject
from megatron.core.diagnostics.timers import Timers
from megatron.core.num_microbatches_calculator import NumMicroBatchesCalculator
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.pipeline_parallel.plan import Placement
from megatron.training.config.run import RunConfig
from megatron.training.runtime.source_losses import SourceLosses
from megatron.training.tokenizer import MegatronTokenizer


@dataclass
class StepResult:
    """Result of one optimizer step.  Tensors stay on the device until a sink reads them."""

    losses: Mapping[str, Tensor | float]  # reduced over data-parallel ranks; last stage only
    grad_norm: Tensor | float | None
    num_zeros: int | None
    params_norm: float | None
    # of the next step: the scheduler has advanced already, as in the log of Megatron-LM
    learning_rate: float
    decoupled_learning_rate: float | None
    loss_scale: float
    skipped: bool  # no update: overflow or --iterations-to-skip
    nan: bool  # a skipped step whose loss was not finite
    batch_size: int  # samples
    num_tokens: int  # over all data-parallel ranks
    params_hash: int | None = None  # 64 bits; with --log-params-hash-interval
    # TensorBoard tag -> auxiliary loss of one layer (--moe-per-layer-logging); last stage only
    layer_losses: dict[str, Tensor] = field(default_factory=dict)
    num_untrained: int = 0  # samples that the step left out, of a batch that was skipped all


_TOKENS_OF = "tokens of "  # a data path


@dataclass
class TrainState:
    """Counters of a run.  A sample is a sequence; all fields but the last two are saved."""

    iteration: int = 0
    consumed_train_samples: int = 0
    skipped_train_samples: int = 0
    consumed_valid_samples: int = 0
    num_tokens: int = 0
    num_floating_point_operations_so_far: float = 0.0
    best_metric: float = 0.0  # best value of --best-metric, if `best_iteration` is above 0
    best_iteration: int = 0
    evaluations_since_best: int = 0  # without an improvement of --early-stopping-min-delta
    # Data path -> tokens with loss that were read from it (--log-loss-by-source); saved as numbers
    # of their own, because a checkpoint's counters are numbers.
    tokens_by_source: dict[str, float] = field(default_factory=dict, metadata={"saved": False})
    stop_reason: str | None = field(default=None, metadata={"saved": False})
    # Of the program, where a step was rejected.
    exit_code: int = field(default=0, metadata={"saved": False})

    def advance(self, result: StepResult, num_floating_point_operations: float) -> None:
        """Count a finished step."""
        self.iteration += 1
        self.consumed_train_samples += result.batch_size
        self.skipped_train_samples += result.num_untrained
        self.num_tokens += result.num_tokens
        self.num_floating_point_operations_so_far += num_floating_point_operations

    def stop(self, reason: str) -> None:
        """Request the end of training after this step; the first reason is kept."""
        self.stop_reason = self.stop_reason or reason

    def to_dict(self) -> dict[str, Any]:
        """Return the saved counters."""
        values = asdict(self)
        saved = {f.name: values[f.name] for f in fields(self) if f.metadata.get("saved", True)}
        return saved | {_TOKENS_OF + path: n for path, n in self.tokens_by_source.items()}

    def load(self, values: dict[str, Any]) -> None:
        """Restore counters from `to_dict`; ignore counters that this version does not have."""
        for f in fields(self):
            if f.metadata.get("saved", True) and f.name in values:
                setattr(self, f.name, values[f.name])
        for name, number in values.items():
            if name.startswith(_TOKENS_OF):
                self.tokens_by_source[name.removeprefix(_TOKENS_OF)] = number


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
    # The blends of the training data, each from the iteration on that it names; saved.
    blends: list[JsonObject] = field(default_factory=list)
    sources: SourceLosses | None = None  # with --log-loss-by-source and a blend

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
        patience = self.config.validation.early_stopping_patience
        is_exhausted = patience is not None and self.state.evaluations_since_best >= patience
        is_done = is_exhausted or self.state.iteration >= self.train_iters
        return self.state.stop_reason is not None or is_done
