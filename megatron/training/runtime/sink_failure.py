"""Keep a run alive when a log cannot be written.

A log sink (TensorBoard, W&B, metrics file, progress log, memory history) that fails is switched off
with one warning, and training goes on.  Any other exception ends the run: a checkpoint is no log,
and a mistake in a callback has to be seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

logger = logging.getLogger(__name__)


class SinkFailed(Exception):
    """The place or the library that a sink writes to has failed; the message says how."""


# What a sink's place may raise.  A library's own exceptions become SinkFailed in its sink.
SINK_ERRORS = (OSError, SinkFailed)


class MaySink(Protocol):
    """Something that is called during a run."""

    @property
    def log_name(self) -> str | None:
        """The log that it writes, with its file, for a warning; None if it writes none."""


T = TypeVar("T", bound=MaySink)


def call_each(items: list[T], act: Callable[[T], object]) -> None:
    """Call ``act`` for each of ``items``; a sink that fails leaves the list."""
    for item in list(items):
        try:
            act(item)
        except SINK_ERRORS as error:
            if item.log_name is None:
                raise
            items.remove(item)
            warn_switched_off(item.log_name, error)


def warn_switched_off(log_name: str, error: Exception) -> None:
    """Say once that a log is not written any more in this run."""
    logger.warning(
        "%s is switched off for the rest of this run, training goes on: %s: %s",
        log_name,
        type(error).__name__,
        error,
        extra={"all_ranks": True},  # most sinks are on the last rank
    )
