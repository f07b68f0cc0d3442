"""What a schedule calls besides the model.  Configs hold no callables; these travel beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.core.diagnostics.timers import Timers, timed
from megatron.core.pipeline_parallel.plan import PassKind


@dataclass(frozen=True, kw_only=True)
class StepHooks:
    """All optional.  A step without hooks runs forward and backward passes and nothing else."""

    # Multiplies the loss before backward (loss scale).
    grad_scale_func: Callable[[Tensor], Tensor] | None = None
    # The context of all backward passes but the last; by default the wrapper's own ``no_sync``.
    no_sync_func: Callable[[], AbstractContextManager[object]] | None = None
    # Called once after the last backward pass with the model chunks and, for a loss per token,
    # the number of tokens of this rank.
    finalize_model_grads_func: Callable[[Sequence[Any], Tensor | None], None] | None = None
    # Told before the first micro-batch of a step (weights may have changed since the last).
    first_microbatch_func: Callable[[], None] | None = None
    # Sees every loss before backward, with the number of its micro-batch.
    loss_check_func: Callable[[Tensor, int], None] | None = None
    # Told the kind of each pass of a micro-batch before it begins.
    pass_func: Callable[[PassKind], None] | None = None
    timers: Timers | None = None
    # Whether timers of level 1 wait for the other ranks before they start.
    barrier_with_level_1_timers: bool = True

    def timed(self, name: str, log_level: int = 2) -> AbstractContextManager[None]:
        """Measure the block under ``name``."""
        barrier = log_level == 1 and self.barrier_with_level_1_timers
        return timed(self.timers, name, log_level=log_level, barrier=barrier)
