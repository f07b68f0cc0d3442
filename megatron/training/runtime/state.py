"""What a run has done (TrainState, saved with every checkpoint) and what one step did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import Tensor


@dataclass
class StepResult:
    """One optimizer step.  Tensors stay on the device until somebody prints them."""

    losses: Mapping[str, Tensor | float]  # per loss key, reduced over replicas; last stage only
    grad_norm: Tensor | float | None
    num_zeros: int | None
    params_norm: float | None
    learning_rate: float
    decoupled_learning_rate: float | None
    loss_scale: float
    skipped: bool  # overflow, or asked for by --iterations-to-skip: no update
    nan: bool  # a skipped step whose loss was not finite
    batch_size: int  # samples
    num_tokens: int  # over all replicas
    params_hash: int | None = None  # 64 bits
    # TensorBoard tag -> auxiliary loss of one layer (--moe-per-layer-logging); last stage only
    layer_losses: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class TrainState:
    """Counters of a run.  Samples are sequences; everything but ``stop_reason`` is saved."""

    iteration: int = 0
    consumed_train_samples: int = 0
    skipped_train_samples: int = 0
    consumed_valid_samples: int = 0
    num_tokens: int = 0
    num_floating_point_operations_so_far: float = 0.0
    stop_reason: str | None = field(default=None, metadata={"saved": False})

    def advance(self, result: StepResult, num_floating_point_operations: float) -> None:
        """Count a finished step."""
        self.iteration += 1
        self.consumed_train_samples += result.batch_size
        self.num_tokens += result.num_tokens
        self.num_floating_point_operations_so_far += num_floating_point_operations

    def stop(self, reason: str) -> None:
        """End training after this step; the first reason given stays."""
        self.stop_reason = self.stop_reason or reason

    def to_dict(self) -> dict[str, Any]:
        """The saved counters."""
        values = asdict(self)
        return {f.name: values[f.name] for f in fields(self) if f.metadata.get("saved", True)}

    def load(self, values: dict[str, Any]) -> None:
        """Take over counters from `to_dict`; counters unknown to this version are ignored."""
        for f in fields(self):
            if f.metadata.get("saved", True) and f.name in values:
                setattr(self, f.name, values[f.name])
