"""Log messages that a process writes once."""

from __future__ import annotations

import logging
from functools import cache

logger = logging.getLogger(__name__)


@cache
def warn_once(message: str, level: int = logging.WARNING) -> None:
    """Log a message at its first call only."""
    logger.log(level, message)


def warn_switched_off(log_name: str, error: Exception) -> None:
    """Warn that the log ``log_name`` is not written for the rest of this run."""
    logger.warning(
        "%s is switched off for the rest of this run, training goes on: %s: %s",
        log_name,
        type(error).__name__,
        error,
        extra={"all_ranks": True},  # most sinks are on the last rank
    )
