"""Ranks that are threads of one process get from every collective what processes get."""

from __future__ import annotations

import os
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.diagnostics import fault_injection
from megatron.core.parallel import parallel_state
from megatron.core.virtual_ranks.threads import DeadlockError
from tests.support.ranks import run_ranks, run_virtual_ranks

WORLD = 3
OPERATIONS = ("SUM", "PRODUCT", "MIN", "MAX")


def numbers(rank: int, count: int = 6) -> Tensor:
    """Small whole numbers, whose sums and products are exact in any order."""
    return torch.arange(1.0, count + 1).roll(rank) + rank


def every_collective(rank: int, world_size: int) -> dict[str, Any]:
    """What each function of torch.distributed gives this rank, by name."""
    got: dict[str, Any] = {}

    def collect(name: str, *tensors: Tensor) -> None:
        got[name] = [t.tolist() for t in tensors]

    for name in OPERATIONS:
        op = getattr(dist.ReduceOp, name)
        everywhere, at_one = numbers(rank), numbers(rank)
        dist.all_reduce(everywhere, op)
        dist.reduce(at_one, 1, op)
        collect(f"all_reduce {name}", everywhere)
        if rank == 1:
            collect(f"reduce {name}", at_one)
    gathered, together = [torch.empty(6) for _ in range(world_size)], torch.empty(18)
    dist.all_gather(gathered, numbers(rank))
    dist.all_gather_into_tensor(together, numbers(rank))
    collect("all_gather", *gathered, together)
    own, part = torch.empty(2), torch.empty(2)
    dist.reduce_scatter(own, list(numbers(rank).chunk(world_size)))
    dist.reduce_scatter_tensor(part, numbers(rank))
    collect("reduce_scatter", own, part)
    told = numbers(rank)
    dist.broadcast(told, 2)
    collect("broadcast", told)
    dist.scatter(own, list(numbers(rank).chunk(world_size)) if rank == 1 else None, src=1)
    dist.gather(numbers(rank), gathered if rank == 2 else None, dst=2)
    collect("scatter and gather", own, *gathered)
    dist.all_to_all_single(together[:6], numbers(rank))
    rows = [1, 2, 3]
    uneven = torch.empty(world_size * rows[rank], 2)
    dist.all_to_all_single(uneven, numbers(rank, 12).view(6, 2), [rows[rank]] * world_size, rows)
    collect("all_to_all", together[:6], uneven)
    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    one = [rank]
    dist.broadcast_object_list(one, src=1)
    got["objects"] = [objects, one]
    _in_a_part_of_the_world(rank, collect)
    return got


def _in_a_part_of_the_world(rank: int, collect: Any) -> None:
    pair = dist.new_group([0, 2])
    if rank == 1:
        return
    value, received = numbers(rank), torch.empty(6)
    work = dist.all_reduce(value, group=pair, async_op=True)
    transfers = [
        dist.P2POp(dist.isend, numbers(rank) * 10, 2 - rank, pair),
        dist.P2POp(dist.irecv, received, 2 - rank, pair),
    ]
    for begun in [work, *dist.batch_isend_irecv(transfers)]:
        begun.wait()
    dist.barrier(group=pair)
    collect("group of two", value, received)


@pytest.mark.feature("Layouts: --virtual-ranks N, all ranks of a layout in one process")
def test_every_collective_gives_what_gloo_gives() -> None:
    assert run_virtual_ranks(every_collective, WORLD) == run_ranks(every_collective, WORLD)


def average(rank: int, world_size: int) -> list[float]:
    value = numbers(rank)
    dist.all_reduce(value, dist.ReduceOp.AVG)
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, numbers(rank), dist.ReduceOp.AVG)
    return [*value.tolist(), *part.tolist()]


def test_gradients_can_be_averaged_in_the_collective_as_with_nccl() -> None:
    mean = torch.stack([numbers(rank) for rank in range(WORLD)]).mean(0).tolist()
    for rank, got in enumerate(run_virtual_ranks(average, WORLD)):
        assert got == [*mean, *mean[2 * rank : 2 * rank + 2]]


class _WhichThread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        dist.all_reduce(grad)  # waits for the other ranks inside their backward passes
        return grad * threading.get_ident()


def own_things(rank: int, world_size: int) -> dict[str, Any]:
    """What a rank has for itself, looked at after other ranks have had their turns."""
    parallel_state.initialize_model_parallel(world_size)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(rank)
    dist.barrier()
    drawn = [random.random(), np.random.rand(), torch.rand(1).item()]
    dist.barrier()
    x = torch.ones(1, dtype=torch.float64, requires_grad=True)
    _WhichThread.apply(x).backward()
    return {
        "drawn": [*drawn, random.random(), np.random.rand(), torch.rand(1).item()],
        "rank": (os.environ["RANK"], parallel_state.get_tensor_model_parallel_rank()),
        "backward stays": x.grad.item() == world_size * threading.get_ident(),
        "fired": fault_injection.fault_point("here"),
    }


def drawn_alone(seed: int) -> list[float]:
    """Two draws from each generator of a process that was seeded alike."""
    plain, of_numpy = random.Random(seed), np.random.RandomState(seed)
    generator = torch.Generator().manual_seed(seed)
    rounds = [
        (plain.random(), of_numpy.rand(), torch.rand(1, generator=generator).item())
        for _ in range(2)
    ]
    return [number for numbers in rounds for number in numbers]


def test_each_rank_has_its_own_state_and_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTS", "here:nan:times1")
    before = torch.get_rng_state()
    ranks = run_virtual_ranks(own_things, WORLD)
    assert torch.equal(torch.get_rng_state(), before)
    assert "RANK" not in os.environ
    assert not parallel_state.is_initialized()
    for rank, own in enumerate(ranks):
        assert own["drawn"] == drawn_alone(rank)
        assert own["rank"] == (str(rank), rank)
        assert own["backward stays"]
        assert own["fired"] == "nan", "times1 is once in every rank"


def wait_for_each_other(rank: int, world_size: int) -> None:
    pair = dist.new_group([0, 1], group_desc="pair")
    if rank == 0:
        dist.recv(torch.empty(2), 1, group=pair, tag=7)
    elif rank == 1:
        dist.all_reduce(torch.ones(4), group=pair)


def test_a_deadlock_is_found_at_once_and_says_what_each_rank_waits_in() -> None:
    with pytest.raises(DeadlockError) as caught:
        run_virtual_ranks(wait_for_each_other, WORLD)
    lines = str(caught.value).splitlines()
    assert "rank 0: pair recv 1->0 float32[2], tag 7, at" in lines[1]
    assert "rank 1: pair all_reduce(SUM) float32[4], call 1, without [0], at" in lines[2]
    assert f"{__file__}:" in lines[2]
    assert lines[3].strip() == "rank 2: has ended"


def ask_for_different_things(rank: int, world_size: int, what: str) -> None:
    if what == "operation":
        dist.all_reduce(torch.ones(2)) if rank else dist.broadcast(torch.ones(2), 0)
    elif what == "shape":
        dist.all_reduce(torch.ones(2 + rank))
    elif rank == 0:
        dist.send(torch.ones(2), 1, tag=1)
    else:
        dist.recv(torch.ones(2 if what == "tag" else 3), 0, tag=2 if what == "tag" else 1)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("operation", r"rank 0 broadcast from rank 0; rank 1 all_reduce\(SUM\)"),
        ("shape", r"reduction of float32\[2\] with float32\[3\]"),
        ("tag", "0->1: tag 1 meets a receive of 2"),
        ("size", r"0->1: float32\[2\] for float32\[3\]"),
    ],
)
def test_ranks_that_ask_for_different_things_are_told_so(what: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        run_virtual_ranks(ask_for_different_things, 2, what)


def fail_on_rank_1(rank: int, world_size: int) -> None:
    dist.barrier()
    if rank == 1:
        raise ValueError("boom")
    dist.barrier()


def test_one_failure_stops_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="boom"):
        run_virtual_ranks(fail_on_rank_1, WORLD)
    assert "virtual rank 1 failed: ValueError: boom" in capsys.readouterr().err
    assert not [t for t in threading.enumerate() if t.name.startswith("rank ")]


def start_virtual_ranks(rank: int, world_size: int) -> None:
    run_virtual_ranks(average, 2)


def test_a_rank_of_a_launcher_starts_no_virtual_ones() -> None:
    with pytest.raises(AssertionError, match=f"{ConfigError.__name__}: 2 virtual ranks"):
        run_ranks(start_virtual_ranks, 1)
