"""Run a function in several ranks, each a process of its own with a default process group.

One fork server per test process, itself forked (`tests.support.forked`), has imported torch and
megatron but run no operation (`tests/support/preload.py`); every call forks fresh ranks from it, so
a rank that was killed, or that left state behind, harms no other test, and 8 ranks start in a
fraction of a second.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver, resource_tracker, spawn
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import device, virtual_ranks
from tests.support import forked, host_gpu

# After the first failure the other ranks have this long to report theirs: often the first one
# heard is only the echo ("connection closed by peer") of the one that matters.
GRACE_S = 0.3

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class _Job:
    """What one rank is told; pickled plainly, so that tensors travel by value."""

    rank: int
    world_size: int
    store_file: str
    backend: str
    timeout_s: float
    stack_file: str
    environ: dict[str, str]
    payload: bytes  # pickled (fn, args)


@dataclass
class _Rank:
    process: BaseProcess
    receiver: Connection
    stack_file: Path
    result: bytes | None = None
    error: str | None = None
    has_ended: bool = False


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60,
    backend: str | None = None,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` in ``world_size`` ranks; their results in rank order.

    ``fn`` stands at the top level of a module; arguments and results are pickled.  The default
    backend is gloo, with nccl beside it where every rank finds a GPU of its own.  If a rank
    raises, is killed or is not done after ``timeout_s``, all ranks are ended and AssertionError
    carries the traceback, signal or stack of those that failed.
    """
    payload = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        ranks = [
            _start(
                _Job(
                    rank=rank,
                    world_size=world_size,
                    store_file=f"{scratch}/store",
                    backend=backend or default_backend(world_size),
                    timeout_s=timeout_s,
                    stack_file=f"{scratch}/rank{rank}.stack",
                    environ=dict(os.environ),
                    payload=payload,
                )
            )
            for rank in range(world_size)
        ]
        try:
            _collect(ranks, timeout_s)
        finally:
            for rank in ranks:
                rank.process.kill()
            for rank in ranks:
                rank.process.join()
                rank.receiver.close()
        errors = [f"rank {i} of {world_size} {r.error}" for i, r in enumerate(ranks) if r.error]
        assert not errors, "\n".join(sorted(errors, key=_importance))
    return [pickle.loads(rank.result) for rank in ranks]


def run_virtual_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """As `run_ranks`, with ranks that are threads of this process: ``fn`` may stop in a debugger.

    What a rank raises is raised here.
    """
    return virtual_ranks.run(fn, world_size, *args)


def default_backend(world_size: int) -> str:
    """nccl beside gloo where every rank has a GPU of its own, else gloo."""
    if host_gpu.is_asked():
        return host_gpu.LIKE_BOTH
    return "cpu:gloo,cuda:nccl" if torch.cuda.device_count() >= world_size else "gloo"


@cache
def _fork_server() -> multiprocessing.context.ForkServerContext:
    """The context whose server is running and has imported all it should."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    resource_tracker.ensure_running()  # with Python itself
    # Forked too: to import torch and megatron takes seconds.
    device = os.environ.get(host_gpu.ASKED)
    program = forked.python_on_host_gpu(Path(device)) if device else forked.python()
    spawn.set_executable(program)
    try:
        forkserver.ensure_running()
    finally:
        spawn.set_executable(sys.executable)
    return context


def _start(job: _Job) -> _Rank:
    context = _fork_server()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_rank_main, args=(job, sender), daemon=True)
    process.start()
    sender.close()
    return _Rank(process, receiver, Path(job.stack_file))


def _rank_main(job: _Job, sender: Connection) -> None:
    """Life of one rank: join the default group, call the function, report, leave."""
    _prepare_process(job)
    try:
        # A file, as a TCPStore asks the name server for the name of its peer: seconds at times.
        store = dist.FileStore(job.store_file, job.world_size)
        dist.init_process_group(
            job.backend,
            store=store,
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.timeout_s),
        )
        _meet(store, job, "connected")
        fn, args = pickle.loads(job.payload)
        report = (True, pickle.dumps(fn(job.rank, job.world_size, *args)))
    except BaseException:  # also SystemExit, and errors torch derives from BaseException
        report = (False, traceback.format_exc())
    sender.send(report)
    if not report[0]:
        os._exit(1)  # no farewell to peers that may be stuck
    _meet(store, job, "done")
    if dist.is_initialized():
        dist.destroy_process_group()


def _meet(store: dist.Store, job: _Job, where: str) -> None:
    """Wait for all ranks: one that leaves early cuts the connections of those still connecting."""
    if store.add(f"{where}/count", 1) == job.world_size:
        store.set(where, "all")
    store.wait([where], timedelta(seconds=job.timeout_s))


def _prepare_process(job: _Job) -> None:
    os.environ.clear()
    os.environ.update(
        job.environ,
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        OMP_NUM_THREADS="1",  # bitwise tests: the order of a sum depends on the threads
        GLOO_SOCKET_IFNAME="lo",  # the machine's host name may not resolve
    )
    torch.set_num_threads(1)
    device.choose("cuda" if "nccl" in job.backend else "cpu", job.rank)
    # The file stays open for the life of the process: the watchdog writes to it.
    stack_file = open(job.stack_file, "w")  # noqa: SIM115
    faulthandler.dump_traceback_later(job.timeout_s, exit=True, file=stack_file)


def _collect(ranks: list[_Rank], timeout_s: float) -> None:
    """Wait until every rank has ended, or the grace after the first failure is over."""
    deadline_s = time.monotonic() + timeout_s + 5  # ranks end themselves before that
    while not all(rank.has_ended for rank in ranks):
        # A report wakes us by the pipe, an end by the process's sentinel.
        waiting: dict[Any, _Rank] = {r.process.sentinel: r for r in ranks if not r.has_ended}
        waiting |= {r.receiver: r for r in ranks if r.result is None and r.error is None}
        ready = wait(list(waiting), timeout=max(0, deadline_s - time.monotonic()))
        if not ready:
            if not any(rank.error for rank in ranks):
                for rank in waiting.values():
                    rank.error = f"was not done after {timeout_s} s"
            return
        for item in ready:
            if isinstance(item, Connection):
                _receive(waiting[item])
        for item in ready:
            if not isinstance(item, Connection):
                _bury(waiting[item], timeout_s)
        if any(rank.error for rank in ranks):
            deadline_s = min(deadline_s, time.monotonic() + GRACE_S)


def _receive(rank: _Rank) -> None:
    """Take the rank's report, if it sent a whole one."""
    try:
        is_result, report = rank.receiver.recv()
    except (EOFError, OSError):
        rank.process.join()
        return
    if is_result:
        rank.result = report
    else:
        rank.error = f"failed:\n{report}"


def _bury(rank: _Rank, timeout_s: float) -> None:
    """Note that the process has ended, and how if it was not the end of a good rank."""
    if rank.result is None and rank.error is None and rank.receiver.poll():
        _receive(rank)
    rank.process.join()
    rank.has_ended = True
    if rank.error is None and (rank.result is None or rank.process.exitcode != 0):
        rank.error = _cause_of_death(rank, timeout_s)


def _cause_of_death(rank: _Rank, timeout_s: float) -> str:
    code = rank.process.exitcode or 0
    if code < 0:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    stack = rank.stack_file.read_text() if rank.stack_file.exists() else ""
    if stack:
        return f"was not done after {timeout_s} s:\n{stack}"
    return f"ended {'after' if rank.result else 'without'} a result, exit code {code}"


def _importance(error: str) -> tuple[bool, str]:
    """Sort key: a lost connection is the echo of another rank's end, so it comes last."""
    is_echo = "onnection" in error and "killed by signal" not in error
    return is_echo, error
