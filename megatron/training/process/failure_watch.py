"""End all ranks within seconds when one rank fails, and report which rank failed first.

A collective that times out counts as a failure.  Every rank then also prints its last collective
and its stack, and the failing rank ends with a summary of the reports of all ranks.  A killed rank
counts too: a neighbouring rank on its host detects that its process has ended (`PeerProcesses`).

The failing rank writes its failure into the default store, under a key that only the ranks of the
run can write (`RunStore`).  On every rank a thread polls this key over a store connection of its
own, so it works while the main thread is blocked in a collective that will never complete; it
prints ``rank R failed: ...`` and ends the process.

Order of events: the failing rank sets the failure key and prints its traceback; its peers print the
failure and acknowledge; every rank calls ``before_end``; the failing rank exits first, then the
peers, so that the launcher notices the failing rank first.  A lost connection is usually the
consequence of another rank's exit, so that rank's failure is looked for first.  The only collective
is the agreement on the secret of the store, when the watch is created.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron.core.config.errors import MegatronError
from megatron.core.diagnostics.collective_tracer import note_collectives
from megatron.core.parallel.run_store import LOST_RANKS, RunStore, agree_on_secret
from megatron.core.virtual_ranks import BACKEND
from megatron.training.process import exit_report
from megatron.training.process.peer_processes import PeerProcesses
from megatron.training.process.stall_report import FindHang, StallReport, is_timeout

_FAILURE = "failure_watch/failure"  # text of the first failure
_ACKNOWLEDGED = "failure_watch/acknowledged"  # number of ranks that have printed it
_STOPPED = "failure_watch/stopped"  # rank whose process is stopped
_LEFT = "failure_watch/left"  # number of ranks that have ended normally
_PATIENCE_S = 3.0  # for peers to acknowledge, beyond their polling interval
_LINGER_S = 1.0  # delay of a peer, so that the failing rank exits first
_STORE_LOST_S = 5.0  # tolerated: at a normal end the store may close before a rank
_FEW_LINES = 10  # of a message: with torchrun's own lines it fits into the last 20
_FAREWELL_S = 60.0  # rank 0 serves the store while other ranks close their logs


def failure_watch(
    poll_s: float = 1.0,
    timeout_s: float = float("inf"),
    before_end: Callable[[RunStore], None] = lambda store: None,
    patience_s: float = float("inf"),
    find_hang: FindHang = lambda store: None,
) -> AbstractContextManager[object]:
    """Return a context manager that ends all ranks when one of them fails.  Collective.

    Enter it after the default group is created.  An exception that leaves the context ends the
    process with its exit status (`exit_report.exit_code`), and all other ranks with status 1.
    With a single rank, and among virtual ranks, which stop each other, the exception propagates
    instead.

    ``timeout_s`` is the timeout of collectives: shortly before it, a rank reports what the calling
    thread waits for.  After ``patience_s`` without progress all ranks report, and the run goes on;
    so a rank that has stopped is named long before the timeout.  ``before_end`` is called on every
    rank before its process ends, by the thread that ends it; not among virtual ranks.
    ``find_hang`` is called at each poll: the rank that it returns counts as failed.
    """
    if not dist.is_initialized() or dist.get_backend() == BACKEND:
        return contextlib.nullcontext()
    if dist.get_world_size() == 1:
        return _alone(before_end)
    store = RunStore(_get_default_store(), agree_on_secret())
    note_collectives()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    stall = StallReport(rank, world_size, timeout_s, patience_s, find_hang)
    return FailureWatch(store, rank, world_size, poll_s, stall, before_end)


@contextlib.contextmanager
def _alone(before_end: Callable[[RunStore], None]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        exit_report.write_error(error)
        before_end(RunStore(_get_default_store(), agree_on_secret()))
        raise


class FailureWatch:
    """The context manager that `failure_watch` returns.

    ``end(status)`` ends the process without running any other code in it.
    """

    def __init__(
        self,
        store: RunStore,
        rank: int,
        world_size: int,
        poll_s: float,
        stall: StallReport,
        before_end: Callable[[RunStore], None],
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._store = store.clone()
        self._rank = rank
        self._world_size = world_size
        self._poll_s = poll_s
        self._stall = stall
        self._before_end = before_end
        self._end = end
        self._peers = PeerProcesses(rank, world_size)
        self._stopped = threading.Event()
        # A store connection serves one thread at a time, so the thread gets its own.
        self._thread = threading.Thread(
            target=self._watch, args=(store.clone(),), name="failure watch", daemon=True
        )

    def __enter__(self) -> FailureWatch:
        self._peers.announce(self._store)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._leave()
        else:
            self._fail(error)

    def explain(self, error: BaseException) -> str:
        """Return the failure of another rank that has caused ``error``, or that of this rank.

        Call it in the thread of the context.  It waits for two polling intervals at most.
        """
        cause = self._cause() if is_lost_connection(error) else None
        return cause or self._failure_of(error)

    def _failure_of(self, error: BaseException) -> str:
        return f"rank {self._rank} failed: {type(error).__name__}: {in_few_lines(str(error))}"

    def _leave(self) -> None:
        """Stop watching at the normal end of a run.

        Rank 0 keeps serving the store until all ranks have left or a neighbour is lost.
        """
        self._thread.join()
        with contextlib.suppress(RuntimeError):  # the store may have closed already
            self._peers.leave(self._store)
            self._store.add(_LEFT, 1)
            if self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                self._wait_for(_LEFT, self._world_size, _FAREWELL_S, self._has_lost_a_neighbour)

    def _has_lost_a_neighbour(self) -> bool:
        return self._peers.lost(self._store) is not None

    def _fail(self, error: BaseException) -> None:
        """Report ``error`` to all ranks and end this process."""
        mine = self._failure_of(error)
        is_stall = is_timeout(error)
        first = mine
        self._thread.join()  # the thread ends the process if it has seen a failure
        with contextlib.suppress(RuntimeError):  # without a store only the launcher reports it
            if is_stall:
                self._stall.call_for_reports(self._store)
            cause = self._cause() if is_lost_connection(error) else None
            first = cause or self._store.set_first(_FAILURE, mine)
        if first == mine:
            if not isinstance(error, MegatronError | SystemExit):  # these need no traceback
                traceback.print_exception(error)
            elif in_few_lines(str(error)) != str(error):
                print(error, file=sys.stderr, flush=True)
        with contextlib.suppress(RuntimeError):
            self._store.add(_ACKNOWLEDGED, 1)
            living = self._world_size - self._store.add(LOST_RANKS, 0)
            self._wait_for(_ACKNOWLEDGED, living, _PATIENCE_S + self._poll_s)
            self._before_end(self._store)
            if is_stall and first == mine:
                first = f"{self._stall.summary(self._store)}\n{mine}"
        self._finish(first, exit_report.exit_code(error))

    def _cause(self) -> str | None:
        """Wait for the failure of another rank that has cut this rank's connection; return it."""
        deadline_s = time.monotonic() + 2 * self._poll_s
        found = None
        with contextlib.suppress(RuntimeError):  # the store may have ended with its rank
            while (found := self._failure(self._store)) is None and time.monotonic() < deadline_s:
                time.sleep(0.02)
        return found

    def _failure(self, store: RunStore) -> str | None:
        """Return the reported failure, None if there is none.

        Reports the failure of a neighbour whose process has ended without reporting it, and that of
        a rank that hangs.
        """
        text = store.get(_FAILURE)
        if text is None and (lost := self._peers.lost(store)) is not None:
            rank, process = lost
            mine = (
                f"rank {rank} failed: its process {process} has ended without a message; it may "
                "have been killed, for instance for lack of host memory"
            )
            text = store.set_first(_FAILURE, mine)
            if text == mine:
                store.add(LOST_RANKS, 1)
        if text is None and (hung := self._stall.find_hang(store)) is not None:
            self._stall.call_for_reports(store, f"rank {hung.rank} hangs")
            mine = f"rank {hung.rank} failed: {hung.why}"
            text = store.set_first(_FAILURE, mine)
            if text == mine and hung.is_stopped:
                store.add(LOST_RANKS, 1)
                store.set(_STOPPED, str(hung.rank))
        return text

    def _wait_for(
        self,
        counter: str,
        value: int,
        patience_s: float,
        is_hopeless: Callable[[], bool] = lambda: False,
    ) -> None:
        deadline_s = time.monotonic() + patience_s
        while self._store.add(counter, 0) < value and time.monotonic() < deadline_s:
            if is_hopeless():
                return
            time.sleep(0.02)

    def _watch(self, store: RunStore) -> None:
        """Poll for stalls and failures until the context exits (target of the thread)."""
        lost_at_s: float | None = None
        while not self._stopped.wait(self._poll_s):
            try:
                self._stall.look(store)
                text = self._failure(store)
                if text is not None:
                    self._stall.answer(store)
            except RuntimeError as error:
                lost_at_s = lost_at_s or time.monotonic()
                if time.monotonic() - lost_at_s > _STORE_LOST_S:
                    self._finish(f"rank {self._rank} lost the store of the process group: {error}")
                continue
            if text is not None and not self._stopped.is_set():
                _say(text)
                with contextlib.suppress(RuntimeError):
                    store.add(_ACKNOWLEDGED, 1)
                    self._before_end(store)
                time.sleep(_LINGER_S)
                self._kill_stopped(store)  # last: the launcher then ends all others
                self._finish(text, say=False)

    def _kill_stopped(self, store: RunStore) -> None:
        """Kill the rank that is stopped if it is a neighbour on this host."""
        with contextlib.suppress(RuntimeError):
            if (stopped := store.get(_STOPPED)) is not None:
                self._peers.kill(int(stopped))

    def _finish(self, text: str, code: int = 1, *, say: bool = True) -> None:
        if say:
            _say(text)
        exit_report.write(exit_report.kind_of(code), code, text)
        tell_launcher(text)
        sys.stdout.flush()
        self._end(code)


def _say(text: str) -> None:
    print(f"{text}\n", end="", file=sys.stderr, flush=True)  # one write: other ranks print too


def is_lost_connection(error: BaseException) -> bool:
    """Return whether ``error``, or its cause, reports a closed connection (gloo, NCCL, store)."""
    words = ("onnection closed", "onnection reset", "roken pipe", "remote process exited")
    return any(
        isinstance(e, RuntimeError) and any(text in str(e) for text in words)
        for e in (error, error.__cause__)
    )


def in_few_lines(text: str) -> str:
    """Return ``text`` without its middle lines, so that earlier output stays close above it.

    The exception of a data loader worker, for instance, has a complete traceback as its message.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) <= _FEW_LINES:
        return text
    return "\n".join([*lines[:4], "  ...", *lines[-4:]])


def tell_launcher(text: str) -> None:
    """Write ``text`` to the file whose content torchrun prints at the end of its output."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump({"message": {"message": text, "extraInfo": extra}}, file)
