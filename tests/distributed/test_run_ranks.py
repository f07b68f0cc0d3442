"""The helper that every multi-process test stands on."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks


def _sum_of_ranks(rank: int, world_size: int, offset: int) -> int:
    value = torch.tensor(rank + offset)
    dist.all_reduce(value)
    assert dist.get_world_size() == world_size
    return int(value)


def _own_tensor(rank: int, world_size: int, base: torch.Tensor) -> torch.Tensor:
    return base + rank


def _fail_in_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the reason")
    dist.barrier()


def _die_in_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _exit_in_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(0)
    dist.barrier()


def _never_done(rank: int, world_size: int) -> None:
    while True:
        signal.pause()


def _surroundings(rank: int, world_size: int) -> tuple[str, str, int]:
    return os.environ["RANK"], os.environ["A_TEST_SAYS"], torch.get_num_threads()


def _num_threads_of_server(rank: int, world_size: int) -> int:
    status = Path(f"/proc/{os.getppid()}/status").read_text()
    return int(status.split("Threads:")[1].split()[0])


def test_results_come_in_rank_order_and_ranks_can_talk():
    assert run_ranks(_sum_of_ranks, 4, 10, backend="gloo") == [46] * 4


def test_tensors_travel_both_ways():
    results = run_ranks(_own_tensor, 2, torch.zeros(3), backend="gloo")
    assert [r.tolist() for r in results] == [[0, 0, 0], [1, 1, 1]]


def test_a_failure_carries_its_traceback_and_names_its_rank():
    with pytest.raises(AssertionError, match=r"rank 1 of 3 failed:(.|\n)*ValueError: the reason"):
        run_ranks(_fail_in_rank_1, 3)


def test_a_killed_rank_is_named_first_with_its_signal_and_harms_no_later_ranks():
    with pytest.raises(AssertionError, match=r"^rank 1 of 3 was killed by signal 9 \(SIGKILL\)"):
        run_ranks(_die_in_rank_1, 3, backend="gloo")
    assert run_ranks(_sum_of_ranks, 2, 0) == [1, 1]


def test_a_rank_that_leaves_without_a_result_fails():
    with pytest.raises(AssertionError, match="rank 0 of 2 ended without a result, exit code 0"):
        run_ranks(_exit_in_rank_0, 2, backend="gloo")


def test_a_rank_that_hangs_shows_where():
    with pytest.raises(AssertionError, match=r"not done after 0.5 s:(.|\n)*_never_done"):
        run_ranks(_never_done, 1, timeout_s=0.5, backend="gloo")


def test_ranks_see_the_environment_of_the_caller(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A_TEST_SAYS", "so")
    assert run_ranks(_surroundings, 2, backend="gloo") == [("0", "so", 1), ("1", "so", 1)]


def test_the_fork_server_has_run_no_torch_operation():
    assert run_ranks(_num_threads_of_server, 1, backend="gloo") == [1]


def _crash_at_exit(rank: int, world_size: int) -> None:
    end = (os.getpid(), signal.SIGSEGV)
    multiprocessing.util.Finalize(None, os.kill, end, exitpriority=1)


def test_a_rank_that_crashes_after_its_result_fails():
    with pytest.raises(AssertionError, match=r"killed by signal 11 \(SIGSEGV\)"):
        run_ranks(_crash_at_exit, 1, backend="gloo")
