"""The groups between hosts that the reading of documents makes on GPUs."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from megatron.training.data import batch
from tests.support.ranks import run_ranks


def broadcast_in_two_runs(rank: int, world_size: int) -> list[int]:
    """Return what each run of one process broadcasts between its hosts."""
    dist.destroy_process_group()
    found = []
    with mock.patch.object(dist, "get_backend", return_value="nccl"):
        for run in range(2):
            dist.init_process_group(
                "gloo",
                store=dist.HashStore(),
                rank=0,
                world_size=1,
                timeout=timedelta(seconds=60),
            )
            hosts = batch._between_hosts(dist.new_group([0]))
            value = torch.tensor(run)
            dist.broadcast(value, 0, group=hosts)
            found.append(int(value))
            dist.destroy_process_group()
    return found


def test_a_second_run_of_a_process_has_a_group_of_its_own() -> None:
    assert run_ranks(broadcast_in_two_runs, 1) == [[0, 1]]
