"""NCCL groups are created without a bound device, see `initialize._init_default_group`."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore


class _Nccl:
    """Stands for the NCCL backend of the default group."""

    supports_splitting = True

    def __init__(self) -> None:
        self.splits = 0

    def perform_nocolor_split(self, device: torch.device) -> None:
        self.splits += 1


@pytest.mark.feature("Communication: groups of NCCL are connected at their first collective")
@pytest.mark.parametrize(("bound", "splits"), [(None, 0), (torch.device("cuda", 0), 1)])
def test_a_rank_outside_of_a_gloo_group_splits_a_bound_communicator(
    monkeypatch: pytest.MonkeyPatch, bound: torch.device | None, splits: int
) -> None:
    """Ranks inside do not, so a run whose default group is bound would hang."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    nccl = _Nccl()
    default: Any = dist.group.WORLD
    helper = inspect.unwrap(distributed_c10d._new_process_group_helper)
    try:
        monkeypatch.setattr(distributed_c10d, "_get_split_source", lambda group: nccl)
        monkeypatch.setattr(distributed_c10d, "_get_default_group", lambda: _Bound(default, bound))
        group, _ = helper(2, -1, [0, 1], "gloo", FakeStore(), "hosts", timeout=timedelta(minutes=1))
        assert group is dist.GroupMember.NON_GROUP_MEMBER
        assert nccl.splits == splits
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()


class _Bound:
    """The default group with another ``bound_device_id``."""

    def __init__(self, group: Any, bound: torch.device | None) -> None:
        self._group, self.bound_device_id = group, bound

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)
