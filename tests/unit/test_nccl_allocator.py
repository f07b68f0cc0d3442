"""--use-nccl-ub: what is asked of torch and NCCL, noted by stand-ins with torch's signatures."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.device import nccl_allocator
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from tests.support.one_rank_training import ModelConfig


class Backend:
    """What of ``ProcessGroupNCCL`` is used; an operation before it would raise, as there."""

    mem_allocator = "ncclMemAlloc"

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def register_mem_pool(self, pool: Any) -> None:
        self.calls.append(("register", self, pool))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Calls in their order; this process is one of 4 ranks whose backend says it is NCCL."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    noted: list[Any] = []
    backends: dict[Any, Backend] = {}

    @contextlib.contextmanager
    def allocating_from(pool: Any) -> Iterator[None]:
        noted.append(("enter", pool))
        yield
        noted.append(("leave", pool))

    def all_reduce(tensor: Any, group: Any) -> None:
        noted.append(("all-reduce", group))

    monkeypatch.setattr(device, "memory_pool", lambda allocator: f"pool of {allocator}")
    monkeypatch.setattr(device, "allocating_from", allocating_from)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(
        nccl_allocator, "_backend", lambda group: backends.setdefault(group, Backend(noted))
    )
    yield noted
    dist.destroy_process_group()


@pytest.mark.feature("Communication: buffers registered with NCCL (--use-nccl-ub)")
def test_buffers_lie_in_a_pool_that_their_groups_register(calls: list[Any]) -> None:
    groups = create_process_groups(*make_grids(4, tp=2))
    config = DistributedDataParallelConfig(nccl_ub=True, use_distributed_optimizer=True)
    zeros, pool = torch.zeros, "pool of ncclMemAlloc"
    allocated: list[bool] = []

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        allocated.append(bool(calls) and calls[-1] == ("enter", pool))
        return zeros(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "zeros", noted)
        DistributedDataParallel(ModelConfig(), config, torch.nn.Linear(4, 4), pg_collection=groups)
    assert allocated[:2] == [True, True]  # gradients, parameters
    wide = groups.intra_dp_cp
    assert [call[:2] for call in calls[:3]] == [
        ("enter", pool),
        ("leave", pool),
        ("all-reduce", wide),  # a communicator exists from its first collective on
    ]
    assert calls[3] == ("register", nccl_allocator._backend(wide), pool)
    assert len(calls) == 4  # one group, however many names it has; none of a single rank


def test_other_libraries_get_ordinary_memory(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "gloo")
    group = dist.group.WORLD
    assert group is not None
    with nccl_allocator.registered_memory([group]):
        pass
    assert calls == []


def test_the_stand_ins_have_the_signatures_of_torch() -> None:
    stub = (Path(torch.__file__).parent / "_C/_distributed_c10d.pyi").read_text()
    of_nccl = stub.split("class ProcessGroupNCCL(Backend):")[1].split("\nclass ")[0]
    assert "def register_mem_pool(self, pool: torch.cuda.MemPool) -> None" in of_nccl
    assert "def mem_allocator(self)" in stub.split("class Backend:")[1].split("\nclass ")[0]
    assert next(iter(inspect.signature(torch.cuda.MemPool).parameters)) == "allocator"
    assert next(iter(inspect.signature(torch.cuda.use_mem_pool).parameters)) == "pool"


def test_the_environment_is_set_and_movable_memory_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in nccl_allocator._ENVIRONMENT:
        monkeypatch.setenv(name, "7")
    nccl_allocator.init()
    assert {name: os.environ[name] for name in nccl_allocator._ENVIRONMENT} == {
        "NCCL_NVLS_ENABLE": "1",
        "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "0",
    }
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ConfigError, match="--use-nccl-ub: PYTORCH_CUDA_ALLOC_CONF has expandable"):
        nccl_allocator.init()
