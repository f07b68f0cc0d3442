"""Messages between rank 0 and the ranks that execute."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.core.config.errors import LaunchError
from megatron.core.inference.paged_engine.step_plan import ControlChannel
from tests.support.ranks import run_ranks


def _timeout(rank: int, world_size: int) -> timedelta:
    assert dist.group.WORLD is not None
    group = ControlChannel(dist.group.WORLD)._group
    assert group is not None
    found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return found


def test_ranks_of_an_idle_server_wait_without_an_end() -> None:
    assert all(found > timedelta(days=365) for found in run_ranks(_timeout, 2))


def _silent_rank(rank: int, world_size: int) -> str:
    """Rank 0 waits for a result that rank 1 does not send; that closes their connection."""
    assert dist.group.WORLD is not None
    channel = ControlChannel(dist.group.WORLD)
    channel.longest_step = timedelta(milliseconds=100)
    try:
        channel.receive(1 - rank)
    except LaunchError as error:
        return str(error)
    return "no error"


def test_a_rank_that_does_not_answer_is_named() -> None:
    of_rank_0, of_rank_1 = run_ranks(_silent_rank, 2)
    assert "rank 1 has not sent the result of a step: " in of_rank_0
    assert "rank 0 has not sent plans: " in of_rank_1
