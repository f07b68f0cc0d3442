"""Print and log on selected ranks, so that a failing write never ends a run.

The rank comes from torch once a process group exists, before that from the launcher's environment
variables.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from textwrap import TextWrapper
from typing import Any, TextIO

import torch.distributed as dist

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.progress import CLEAR as CLEAR
from megatron.core.rank_local import each_rank_owns
from megatron.training.process.preflight import launch_problems

LEVEL_VARIABLE = "MEGATRON_LOGGING_LEVEL"
# Scripts search for whole lines of these loggers, in Python's default format as in Megatron-LM.
_is_short = False
each_rank_owns(__name__, "_is_short")
_IN_DEFAULT_FORMAT = frozenset({"megatron.core.rerun_state_machine"})


def rank() -> int:
    """Return the global rank; before the process group exists, RANK of the environment.

    Returns 0 if RANK is not a number, so that this process prints the error about it.
    """
    if dist.is_initialized():
        return dist.get_rank()
    with suppress(ValueError):
        return int(os.environ.get("RANK") or 0)
    return 0


def world_size() -> int:
    """Return the number of ranks; before the process group exists, WORLD_SIZE.

    Raises ConfigError if the variables of the launcher are not valid.
    """
    if dist.is_initialized():
        return dist.get_world_size()
    ConfigError.raise_for(launch_problems(os.environ))
    return int(os.environ.get("WORLD_SIZE") or 1)


def ranks_here() -> int:
    """Return the number of ranks on this host (LOCAL_WORLD_SIZE)."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def is_rank0() -> bool:
    """Return whether this is rank 0."""
    return rank() == 0


def is_last_rank() -> bool:
    """Return whether this is the last rank."""
    return rank() == world_size() - 1


def print_rank_0(message: object, rank: int | None = None) -> None:
    """Print ``message`` on rank 0; ``rank``: the number of this rank, if the caller knows it."""
    if is_rank0() if rank is None else rank == 0:
        print(f"{CLEAR if _is_short and sys.stdout.isatty() else ''}{message}", flush=True)


def print_flags(title: str, words: Sequence[str]) -> None:
    """Print flags and values on rank 0; on a terminal, lines break between words."""
    text = f"> {title}: {' '.join(words)}"
    if sys.stdout.isatty():
        lines = TextWrapper(shutil.get_terminal_size().columns, subsequent_indent="    ")
        lines.break_on_hyphens = lines.break_long_words = False  # to copy flags from it
        text = lines.fill(text)
    print_rank_0(text)


def print_detail(message: object) -> None:
    """Print a line of Megatron-LM's log on rank 0 that --log-style short leaves out."""
    if not is_short():
        print_rank_0(message)


def print_live(text: str) -> None:
    """Print a line that the next one overwrites, if the output is a terminal."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"{text[:width]}{CLEAR}\r", end="", flush=True)


def choose_style(style: str) -> None:
    """Set whether this rank prints a short log; ``style`` is the value of --log-style."""
    global _is_short
    is_alone = "TORCHELASTIC_RUN_ID" not in os.environ and world_size() == 1
    _is_short = style == "short" or (style == "auto" and is_alone and sys.stdout.isatty())


def is_short() -> bool:
    """Return whether this rank prints a short log."""
    return _is_short


def print_rank_last(message: object) -> None:
    """Print ``message`` on the last rank."""
    if is_last_rank():
        print(message, flush=True)


class _LossyStream:
    """A text stream that drops text it cannot write: full disk, closed pipe."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def survive_lost_output() -> None:
    """Keep the program running when standard output or error is closed or cannot be written.

    A closed descriptor is opened on /dev/null.  Otherwise the next opened file, perhaps of a
    checkpoint, would get its number, and libraries would write their output into that file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number is free
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # not replaced by other code
            if stream is None:  # it was closed when Python started
                stream = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
                setattr(sys, f"__{name}__", stream)
            setattr(sys, name, _LossyStream(stream))


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


def print_device_memory(title: str) -> None:
    """Print the memory of this rank's GPU, in MiB, after ``title``."""
    stats = device.memory_stats()
    parts = " | ".join(
        f"{key.replace('_', ' ')}: {stats[key] / 2**20}"
        for key in ("allocated", "max_allocated", "reserved", "max_reserved")
    )
    print(f"[Rank {rank()}] {title} memory (MB) | {parts}", flush=True)
