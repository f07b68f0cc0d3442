"""Who may print.  Torch is asked for the rank only once a process group exists."""

from __future__ import annotations

import os

import torch.distributed as dist


def rank() -> int:
    """World rank; before the process group exists, what the launcher says."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of ranks; before the process group exists, what the launcher says."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


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
