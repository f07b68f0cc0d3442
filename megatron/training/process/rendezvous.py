"""Connect all ranks of a run to one store, and report the ranks that are missing.

Order: every rank connects to the store at MASTER_ADDR:MASTER_PORT (served by rank 0 or torchrun),
registers in it, and waits until all ranks have.  Only then do the collective libraries connect:
they would wait for an absent rank silently, without handling signals.

torchrun keeps its store when it restarts ranks, with the addresses of the ranks that have ended.
So the ranks of one start write their keys under a prefix that rank 0 of this start publishes.  The
number of the restart (TORCHELASTIC_RESTART_COUNT) cannot be the prefix: it may differ between the
launchers of two hosts.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store

from megatron.core import device
from megatron.core.config.errors import LaunchError
from megatron.training.process.signals import StopSignal

_CONNECT_S = 1.0
_ANSWER_S = 60.0  # within which a server must answer as a store
_MAX_PAUSE_S = 0.5  # between two polls
_FIRST_REPORT_S = 10.0
_REPORT_S = 60.0
_SIGNAL_GRACE_S = 5.0  # for ranks that are still starting when the signal comes
_SHOWN_RANKS = 16


class _Patience:
    """Waits with progress reports and a time limit."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._began_s = time.monotonic()
        self._report_at_s = self._began_s + _FIRST_REPORT_S

    def wait_until(
        self, is_ready: Callable[[], bool], waits_for: Callable[[], str], *, reports: bool = True
    ) -> None:
        """Return when ``is_ready()``; report from time to time that this rank waits.

        Raises LaunchError after the time limit, or after SIGTERM.
        """
        pause_s = 0.01
        while not is_ready():
            now_s = time.monotonic()
            waited_s = now_s - self._began_s
            handler = signal.getsignal(signal.SIGTERM)
            if isinstance(handler, StopSignal) and handler.received_s() > _SIGNAL_GRACE_S:
                raise LaunchError(
                    f"{handler.name} came while rank {self._rank} waited for {waits_for()}"
                )
            if waited_s > self._timeout_s:
                raise LaunchError(
                    f"rank {self._rank} has waited {waited_s:.0f} s for {waits_for()}: look for "
                    "the first error of that rank, or raise --distributed-timeout-minutes"
                )
            if reports and now_s > self._report_at_s:
                self._report_at_s = now_s + _REPORT_S
                text = f"rank {self._rank} has waited {waited_s:.0f} s for {waits_for()}"
                print(text, file=sys.stderr, flush=True)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def meet(rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return the store of this start once all ranks have registered.  Raises LaunchError."""
    patience = _Patience(rank, timeout.total_seconds())
    store = _connect(rank, patience)
    store.set_timeout(timeout)
    return wait_for_all(dist.PrefixStore("meet", store), rank, world_size, patience)


def claim_gpu(store: Store, rank: int) -> None:
    """Record in the store of `meet` that ``rank`` uses this process's GPU.

    Raises LaunchError if another rank does: NCCL would fail later, with a message about neither.
    """
    gpu = device.uuid()
    owner = store.compare_set(f"gpu/{gpu}", "", str(rank)).decode()
    if owner != str(rank):
        raise LaunchError(
            f"ranks {owner} and {rank} are both on {gpu}: NCCL needs a GPU for each rank, so start "
            "at most as many processes per host (--nproc-per-node) as it has GPUs, and make them "
            "all visible (CUDA_VISIBLE_DEVICES)"
        )


def _connect(rank: int, patience: _Patience) -> Store:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    address = f"MASTER_ADDR {host}, MASTER_PORT {port}"
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    patience.wait_until(
        lambda: is_server or why_not_reachable(host, port) is None,
        lambda: f"the store at {address} ({why_not_reachable(host, port)})",
    )
    try:  # not by torch's rendezvous, where rank 0 would wait silently for all others
        store = dist.TCPStore(
            host,
            port,
            is_master=is_server,
            timeout=timedelta(seconds=_ANSWER_S),
            wait_for_workers=False,
            multi_tenant=True,
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )
    except (dist.DistError, OSError) as error:
        verb = "listen" if is_server else "connect"
        reason = str(error).splitlines()[0]
        raise LaunchError(f"rank {rank} cannot {verb} at {address}: {reason}") from error
    return store


def why_not_reachable(host: str, port: int) -> str | None:
    """Return why the address refuses connections, or None.

    Connects with a plain socket, because each attempt of torch's own client logs a page.
    """
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def wait_for_all(store: Store, rank: int, world_size: int, patience: _Patience) -> Store:
    """Wait until every rank of this start has called this; return a store for this start alone.

    Raises LaunchError.
    """
    answered = 0

    def is_complete() -> bool:
        nonlocal answered
        if rank == 0:  # registrations of dead ranks too, but nobody reads these keys
            arrived = store.add("arrivals", 0)
            for other in range(answered + 1, arrived + 1):
                store.set(f"start_of/{other}", start)
            answered = arrived
        return own.check(["complete"])

    def absent() -> str:
        absent = [str(r) for r in range(world_size) if not own.check([f"rank/{r}"])]
        more = " ..." if len(absent) > _SHOWN_RANKS else ""
        return f"{'ranks' if len(absent) > 1 else 'rank'} {' '.join(absent[:_SHOWN_RANKS])}{more}"

    try:
        start = f"start/{store.add('arrivals', 1)}"  # unique among the ranks of all starts
        if rank != 0:
            key = start.replace("start", "start_of")
            patience.wait_until(lambda: store.check([key]), lambda: "rank 0", reports=False)
            start = store.get(key).decode()
        own = dist.PrefixStore(start, store)
        own.set(f"rank/{rank}", "")
        if own.add("ranks", 1) >= world_size:
            own.set("complete", "")
        patience.wait_until(is_complete, absent, reports=rank == 0)
    except dist.DistError as error:
        raise LaunchError(
            f"rank {rank} has lost the store while it waited for the other ranks: rank 0 or its "
            f"launcher has ended ({str(error).splitlines()[0]})"
        ) from error
    return own
