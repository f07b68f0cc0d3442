"""Print on selected ranks, so that a failing write never ends a run.

The rank comes from torch once a process group exists, before that from the launcher's environment
variables.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any, TextIO

import torch.distributed as dist

from megatron.core.config.errors import ConfigError
from megatron.training.process.preflight import launch_problems


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


def print_rank_0(message: object) -> None:
    """Print ``message`` on rank 0."""
    if is_rank0():
        print(message, flush=True)


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
