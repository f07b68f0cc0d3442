"""Log messages that a process writes once."""

from __future__ import annotations

import logging
from functools import cache

logger = logging.getLogger(__name__)


@cache
def warn_once(message: str, level: int = logging.WARNING) -> None:
    """Log a message at its first call only."""
    logger.log(level, message)
