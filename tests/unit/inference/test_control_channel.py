"""Messages between rank 0 and the ranks that execute."""

from __future__ import annotations

from datetime import timedelta

import torch

from megatron.core.inference.paged_engine.control import ControlChannel
from tests.ranks import run_ranks


def _timeout(rank: int, world_size: int) -> timedelta:
    group = ControlChannel(world_size)._group
    assert group is not None
    found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return found


def test_ranks_of_an_idle_server_wait_without_an_end() -> None:
    assert all(found > timedelta(days=365) for found in run_ranks(_timeout, 2))
