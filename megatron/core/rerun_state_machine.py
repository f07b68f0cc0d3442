"""Checks of a result that loss functions make through the reference's interface.

A rejected result ends the run or is logged; no step is run again (``--rerun-mode``), so there is
no state but the largest values seen.
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

# Values that `is_unexpectedly_large` looks at before it rejects any, as there is no scale yet.
_NUM_SAMPLES_BEFORE_JUDGING = 100


class RerunStateMachine:
    """What scripts call on the result of `get_rerun_state_machine`."""

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
        """Ask ``rejection_func`` about ``result``; waits for the device.

        A rejected result raises NonFiniteError if it is ``fatal``, else it is logged.  Nothing is
        computed a second time to compare with.
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
        """Whether ``result`` is ``threshold`` times the largest of the first ``num_samples``.

        ``context`` names the series that it belongs to; ``resample`` begins that anew.
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
    """The checker of this process."""
    return _machine
