"""The root logger: level, and which ranks speak."""

from __future__ import annotations

import logging
import os
import sys

from megatron.core.config.errors import ConfigError
from megatron.training.process.rank_print import rank

LEVEL_VARIABLE = "MEGATRON_LOGGING_LEVEL"


class StdoutHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what ``sys.stdout`` is at the time of the record."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.addFilter(_is_for_this_rank)

    @property
    def stream(self):  # type: ignore[no-untyped-def]
        """The current standard output."""
        return sys.stdout


def _is_for_this_rank(record: logging.LogRecord) -> bool:
    """Rank 0 logs every record, other ranks errors and those with ``extra={"all_ranks": True}``.

    (Torch's own loggers do not propagate to the root.)
    """
    is_marked = bool(record.__dict__.get("all_ranks", False))
    return rank() == 0 or record.levelno >= logging.ERROR or is_marked


def setup_logging(logging_level: int | None) -> None:
    """Send the root logger to standard output, INFO and above.

    ``logging_level`` (--logging-level) sets another level, else the environment variable
    MEGATRON_LOGGING_LEVEL does.  Handlers that somebody else installed stay.
    """
    root = logging.getLogger()
    if not any(isinstance(handler, StdoutHandler) for handler in root.handlers):
        root.addHandler(StdoutHandler())
    from_environment = os.environ.get(LEVEL_VARIABLE)
    if logging_level is None and from_environment is not None:
        if not from_environment.isdigit():
            raise ConfigError(
                f"{LEVEL_VARIABLE}={from_environment} is not a number: "
                "use 10 for DEBUG, 20 for INFO, 30 for WARNING"
            )
        logging_level = int(from_environment)
    root.setLevel(logging.INFO if logging_level is None else logging_level)
