"""How the ranks of a run find each other, and what is said while they do not.

Order: every rank connects to the store at MASTER_ADDR:MASTER_PORT (rank 0 or torchrun serves it),
says that it is there, and waits until all are.  Only then do the collective libraries connect: they
would wait for an absent rank in silence, and deaf to signals.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch.distributed import Store

from megatron.core.config.errors import LaunchError
from megatron.training.signals import StopSignal

_CONNECT_S = 1.0
_ANSWER_S = 60.0  # for what listens there to answer as a store does
_MAX_PAUSE_S = 0.5  # between two looks; each is a request to the store
_FIRST_REPORT_S = 10.0
_REPORT_S = 60.0
_SIGNAL_GRACE_S = 5.0  # for ranks that are on their way when the signal comes
_SHOWN_RANKS = 16


class _Patience:
    """Reports and ends a wait."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._began_s = time.monotonic()
        self._report_at_s = self._began_s + _FIRST_REPORT_S

    def spend(self, waits_for: Callable[[], str], *, is_reporter: bool = True) -> None:
        """Say, from time to time, what this rank ``waits_for``.  Raises LaunchError at the end."""
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
    """The store of all ranks, once all are there.  Raises LaunchError."""
    patience = _Patience(rank, timeout.total_seconds())
    store = _connect(rank, patience)
    store.set_timeout(timeout)
    if world_size > 1:
        wait_for_all(dist.PrefixStore("meet", store), rank, world_size, patience)
    return store


def _connect(rank: int, patience: _Patience) -> Store:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    address = f"MASTER_ADDR {host}, MASTER_PORT {port}"
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    while not is_server and (reason := _why_not_reachable(host, port)) is not None:
        patience.spend(partial("the store at {} ({})".format, address, reason))
        time.sleep(_CONNECT_S)
    try:  # as torch's rendezvous does, which would let rank 0 wait in silence for all others
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


def _why_not_reachable(host: str, port: int) -> str | None:
    """A plain socket asks, because torch's own attempts write a page of log each."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def wait_for_all(store: Store, rank: int, world_size: int, patience: _Patience) -> None:
    """Return when every rank has called this.

    Counters only grow: where torchrun restarts ranks with the store of the ranks before, this
    returns at once.
    """
    store.set(f"rank/{rank}", "")
    if store.add("ranks", 1) >= world_size:
        store.set("complete", "")
    pause_s = 0.01
    try:
        while not store.check(["complete"]):
            patience.spend(partial(_absent, store, world_size), is_reporter=rank == 0)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
    except dist.DistError as error:
        raise LaunchError(
            f"rank {rank} has lost the store while it waited for the other ranks: rank 0 or its "
            f"launcher has ended ({str(error).splitlines()[0]})"
        ) from error


def _absent(store: Store, world_size: int) -> str:
    absent = [str(r) for r in range(world_size) if not store.check([f"rank/{r}"])]
    more = " ..." if len(absent) > _SHOWN_RANKS else ""
    return f"{'ranks' if len(absent) > 1 else 'rank'} {' '.join(absent[:_SHOWN_RANKS])}{more}"
