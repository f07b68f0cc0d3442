"""Result checks that loss functions call, with the interface of Megatron-LM's rerun state machine.

A rejected result ends the run or is logged.  No step is run again (--rerun-mode), so the only state
is the largest values seen so far.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.config.errors import NonFiniteError
from megatron.core.rank_local import each_rank_owns

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Number of values from which `is_unexpectedly_large` takes the maximum, before it rejects any.
_NUM_SAMPLES_BEFORE_JUDGING = 100


class RerunStateMachine:
    """Checks of results, with the methods that scripts call on `get_rerun_state_machine()`."""

    def __init__(self) -> None:
        self._largest: dict[str, float] = {}
        self._num_seen: dict[str, int] = {}

    def validate_result(
        self,
        result: T,
        rejection_func: Callable[[T], Tensor | bool],
        message: str = "unexpected result",
        comparison_func: Callable[[T, T], float] | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:
        """Call ``rejection_func(result)``, and synchronise with the device to read its answer.

        If it returns True anywhere, raise NonFiniteError if ``fatal``, else log a warning.
        ``comparison_func`` and ``tolerance`` have no effect: no result is computed a second time.
        """
        del comparison_func, tolerance
        if not bool(torch.as_tensor(rejection_func(result)).any()):
            return
        rank = dist.get_rank() if dist.is_initialized() else 0
        shown = result.tolist() if isinstance(result, Tensor) else result
        text = f"rank {rank}: {message}: {shown}"
        if fatal:
            raise NonFiniteError(text)
        logger.warning("%s", text, extra={"all_ranks": True})

    def is_unexpectedly_large(
        self,
        result: Tensor,
        threshold: float,
        context: str,
        num_samples: int = _NUM_SAMPLES_BEFORE_JUDGING,
        resample: bool = False,
    ) -> bool:
        """Return whether ``result`` is at least ``threshold`` times the maximum so far.

        The maximum is over the first ``num_samples`` values of the series ``context``, for which
        the result is False.  ``resample`` restarts the series.
        """
        value = float(result)
        if resample:
            self._largest.pop(context, None)
            self._num_seen.pop(context, None)
        seen = self._num_seen.get(context, 0)
        if seen < num_samples:
            self._num_seen[context] = seen + 1
            self._largest[context] = max(value, self._largest.get(context, value))
            return False
        return value >= threshold * self._largest[context]


_machine = RerunStateMachine()
each_rank_owns(__name__, "_machine")


def get_rerun_state_machine() -> RerunStateMachine:
    """Return the checker of this rank."""
    return _machine
