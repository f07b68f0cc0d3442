"""Keep a run alive when a log cannot be written.

A log sink (TensorBoard, W&B, metrics file, progress log, memory history) that fails is switched off
with one warning, and training goes on.  Any other exception ends the run: a checkpoint is not a
log, and an error in a callback must be visible.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

logger = logging.getLogger(__name__)


class SinkFailed(Exception):
    """Failure of a file, service or library that a sink writes to; the message gives the cause."""


# Errors of a sink.  A sink converts exceptions of its library to SinkFailed.
SINK_ERRORS = (OSError, SinkFailed)


class MaySink(Protocol):
    """Object that the run calls and that may write a log."""

    @property
    def log_name(self) -> str | None:
        """Name of the log, with its file, for a warning; None for an object that writes none."""


T = TypeVar("T", bound=MaySink)


def call_each(items: list[T], act: Callable[[T], object]) -> None:
    """Call ``act`` for each of ``items``; remove an item whose log fails, with a warning."""
    for item in list(items):
        try:
            act(item)
        except SINK_ERRORS as error:
            if item.log_name is None:
                raise
            items.remove(item)
            warn_switched_off(item.log_name, error)


def warn_switched_off(log_name: str, error: Exception) -> None:
    """Warn that the log ``log_name`` is not written for the rest of this run."""
    logger.warning(
        "%s is switched off for the rest of this run, training goes on: %s: %s",
        log_name,
        type(error).__name__,
        error,
        extra={"all_ranks": True},  # most sinks are on the last rank
    )
