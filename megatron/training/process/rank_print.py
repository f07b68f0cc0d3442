"""Who may print, and that it never ends a run.

Torch is asked for the rank only once a process group exists.
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
    """World rank; before the process group exists, what the launcher says.

    0 if the launcher's number is not one: such a process reports that itself.
    """
    if dist.is_initialized():
        return dist.get_rank()
    with suppress(ValueError):
        return int(os.environ.get("RANK") or 0)
    return 0


def world_size() -> int:
    """Number of ranks; before the process group exists, what the launcher says.

    Raises ConfigError if the launcher says no such number.
    """
    if dist.is_initialized():
        return dist.get_world_size()
    ConfigError.raise_for(launch_problems(os.environ))
    return int(os.environ.get("WORLD_SIZE") or 1)


def ranks_here() -> int:
    """Ranks on this host, as the launcher says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def is_rank0() -> bool:
    """Whether this is the first rank."""
    return rank() == 0


def is_last_rank() -> bool:
    """Whether this is the last rank."""
    return rank() == world_size() - 1


def print_rank_0(message: object) -> None:
    """Print on the first rank."""
    if is_rank0():
        print(message, flush=True)


def print_rank_last(message: object) -> None:
    """Print on the last rank."""
    if is_last_rank():
        print(message, flush=True)


class _LossyStream:
    """A text stream of which what cannot be written is lost: full disk, reader that has gone."""

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
    """Let no failing write to standard output or error end the program, nor a closed one.

    A closed descriptor becomes /dev/null: else the next file that is opened, perhaps one of a
    checkpoint, has its number, and gets what libraries write there.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number is free
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # not what somebody has put there
            if stream is None:  # it was closed when Python started
                stream = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
                setattr(sys, f"__{name}__", stream)
            setattr(sys, name, _LossyStream(stream))
