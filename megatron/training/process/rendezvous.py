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
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch.distributed import Store

from megatron.core import device
from megatron.core.config.errors import LaunchError
from megatron.training.process.signals import StopSignal

_CONNECT_S = 1.0
_ANSWER_S = 60.0  # within which a server must answer as a store
_MAX_PAUSE_S = 0.5  # between two polls; each is a request to the store
_FIRST_REPORT_S = 10.0
_REPORT_S = 60.0
_SIGNAL_GRACE_S = 5.0  # for ranks that are still starting when the signal comes
_SHOWN_RANKS = 16


class _Patience:
    """Progress reports and time limit of a wait."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._began_s = time.monotonic()
        self._report_at_s = self._began_s + _FIRST_REPORT_S

    def spend(self, waits_for: Callable[[], str], *, is_reporter: bool = True) -> None:
        """Report from time to time that this rank waits for ``waits_for()``.

        Raises LaunchError after the time limit, or after SIGTERM.
        """
        now_s = time.monotonic()
        waited_s = now_s - self._began_s
        handler = signal.getsignal(signal.SIGTERM)
        if isinstance(handler, StopSignal) and handler.received_s() > _SIGNAL_GRACE_S:
            raise LaunchError(
                f"{handler.name} came while rank {self._rank} waited for {waits_for()}"
            )
        if waited_s > self._timeout_s:
            raise LaunchError(
                f"rank {self._rank} has waited {waited_s:.0f} s for {waits_for()}: look for the "
                "first error of that rank, or raise --distributed-timeout-minutes"
            )
        if is_reporter and now_s > self._report_at_s:
            self._report_at_s = now_s + _REPORT_S
            text = f"rank {self._rank} has waited {waited_s:.0f} s for {waits_for()}"
            print(text, file=sys.stderr, flush=True)


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
    while not is_server and (reason := why_not_reachable(host, port)) is not None:
        patience.spend(partial("the store at {} ({})".format, address, reason))
        time.sleep(_CONNECT_S)
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
    try:
        arrival = store.add("arrivals", 1)  # unique among the ranks of all starts
        if rank != 0:
            _wait_for(store, f"start_of/{arrival}", patience, lambda: "rank 0")
        start = f"start/{arrival}" if rank == 0 else store.get(f"start_of/{arrival}").decode()
        own = dist.PrefixStore(start, store)
        own.set(f"rank/{rank}", "")
        if own.add("ranks", 1) >= world_size:
            own.set("complete", "")
        absent = partial(_absent, own, world_size)
        if rank == 0:
            _wait_for(own, "complete", patience, absent, _answers(store, start))
        else:
            _wait_for(own, "complete", patience, absent)
    except dist.DistError as error:
        raise LaunchError(
            f"rank {rank} has lost the store while it waited for the other ranks: rank 0 or its "
            f"launcher has ended ({str(error).splitlines()[0]})"
        ) from error
    return own


def _wait_for(
    store: Store,
    key: str,
    patience: _Patience,
    waits_for: Callable[[], str],
    answers: Iterator[None] | None = None,
) -> None:
    """Return when ``key`` exists.

    Rank 0 passes ``answers``: it advances them at each poll, and is the only rank that reports.
    """
    pause_s = 0.01
    while not store.check([key]):
        if answers is not None:
            next(answers)
        patience.spend(waits_for, is_reporter=answers is not None)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def _answers(store: Store, start: str) -> Iterator[None]:
    """Publish ``start`` for all ranks that have registered, again at each step.

    Registrations of dead ranks are answered too, but nobody reads these keys.
    """
    answered = 0
    while True:
        arrived = store.add("arrivals", 0)
        for arrival in range(answered + 1, arrived + 1):
            store.set(f"start_of/{arrival}", start)
        answered = arrived
        yield


def _absent(store: Store, world_size: int) -> str:
    absent = [str(r) for r in range(world_size) if not store.check([f"rank/{r}"])]
    more = " ..." if len(absent) > _SHOWN_RANKS else ""
    return f"{'ranks' if len(absent) > 1 else 'rank'} {' '.join(absent[:_SHOWN_RANKS])}{more}"
