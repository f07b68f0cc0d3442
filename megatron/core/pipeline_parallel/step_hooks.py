"""Callables that a schedule calls during a step, passed separately from the configuration."""

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
    """Optional callables of a step; without them it only runs forward and backward passes."""

    # Multiplies the loss before backward (loss scale).
    grad_scale_func: Callable[[Tensor], Tensor] | None = None
    # Context of all backward passes but the last one; default: the wrapper's own ``no_sync``.
    no_sync_func: Callable[[], AbstractContextManager[object]] | None = None
    # Called once after the last backward pass with the model chunks and, for a loss per token,
    # the number of tokens of this rank.
    finalize_model_grads_func: Callable[[Sequence[Any], Tensor | None], None] | None = None
    # Called before the first micro-batch of a step (weights may have changed since the last one).
    first_microbatch_func: Callable[[], None] | None = None
    # Called with every loss and the index of its micro-batch, before backward.
    loss_check_func: Callable[[Tensor, int], None] | None = None
    # Called with the kind of each pass of a micro-batch before the pass begins.
    pass_func: Callable[[PassKind], None] | None = None
    # What a loss per token is divided by, as share of all tokens.  Auxiliary losses are means over
    # all tokens, and have to keep their weight beside a loss of few tokens, or of pairs of answers.
    loss_share: float = 1.0
    timers: Timers | None = None
    # Whether timers of level 1 synchronise all ranks before they start.
    barrier_with_level_1_timers: bool = True

    def timed(self, name: str, log_level: int = 2) -> AbstractContextManager[None]:
        """Return a context that measures its duration with the timer ``name``."""
        barrier = log_level == 1 and self.barrier_with_level_1_timers
        return timed(self.timers, name, log_level=log_level, barrier=barrier)
