"""Set up the root logger: its level, its output, and which ranks log."""

from __future__ import annotations

import logging
import os
import sys

from megatron.core.config.errors import ConfigError
from megatron.training.process.rank_print import rank

LEVEL_VARIABLE = "MEGATRON_LOGGING_LEVEL"
# Scripts search for whole lines of these loggers, in Python's default format as in Megatron-LM.
_IN_DEFAULT_FORMAT = frozenset({"megatron.core.rerun_state_machine"})


class StdoutHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Log handler that writes to the current ``sys.stdout``, even if it was replaced."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.addFilter(_is_for_this_rank)

    def format(self, record: logging.LogRecord) -> str:
        """Return the message alone, or ``LEVEL:logger:message`` where scripts search for it."""
        text = super().format(record)
        if record.name in _IN_DEFAULT_FORMAT:
            return f"{record.levelname}:{record.name}:{text}"
        return text

    @property
    def stream(self):  # type: ignore[no-untyped-def]
        """The current standard output."""
        return sys.stdout


def _is_for_this_rank(record: logging.LogRecord) -> bool:
    """Accept every record on rank 0, on other ranks errors and marked records.

    A record is marked by ``extra={"all_ranks": True}``.  PyTorch's own loggers are not affected:
    they do not propagate to the root logger.
    """
    is_marked = bool(record.__dict__.get("all_ranks", False))
    return rank() == 0 or record.levelno >= logging.ERROR or is_marked


def setup_logging(logging_level: int | None) -> None:
    """Send the records of the root logger to standard output, from level INFO on.

    ``logging_level`` (--logging-level) sets another level, else the environment variable
    MEGATRON_LOGGING_LEVEL does.  Handlers that other code has installed stay.  Raises ConfigError
    if the variable is not a number.
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
