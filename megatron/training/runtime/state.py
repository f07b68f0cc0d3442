"""Counters of a run (TrainState, saved in every checkpoint) and the result of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import Tensor


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


@dataclass
class TrainState:
    """Counters of a run.  A sample is a sequence; all fields but the last two are saved."""

    iteration: int = 0
    consumed_train_samples: int = 0
    skipped_train_samples: int = 0
    consumed_valid_samples: int = 0
    num_tokens: int = 0
    num_floating_point_operations_so_far: float = 0.0
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
        return {f.name: values[f.name] for f in fields(self) if f.metadata.get("saved", True)}

    def load(self, values: dict[str, Any]) -> None:
        """Restore counters from `to_dict`; ignore counters that this version does not have."""
        for f in fields(self):
            if f.metadata.get("saved", True) and f.name in values:
                setattr(self, f.name, values[f.name])
