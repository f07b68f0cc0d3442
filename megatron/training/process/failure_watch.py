"""When one rank fails, all ranks end within seconds and say which one it was.

A collective that times out is such a failure.  Then every rank also says what it was doing with
the others and shows its stack, and the failing rank ends with one line about each of them.  So is
the end of a rank that was killed: a neighbour on its host notices it (`PeerProcesses`).

The failing rank writes its failure into the default store, under a key that only the ranks of the
run can write (`RunStore`).  A thread on every rank looks there through a connection of its own,
also while the main thread waits in a collective that will never complete; it prints ``rank R
failed: ...`` and ends the process.

Order of an end: the failing rank prints its traceback and sets the failure key; its peers print
the line and acknowledge; all call ``before_end``; the failing rank ends, then the peers do.  So a
launcher notices the rank that matters first.  A lost connection is as a rule the echo of another
rank's end: that rank's failure is looked for first.  Collective is only the secret at the begin.
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
from megatron.training.process.peer_processes import PeerProcesses
from megatron.training.process.stall_report import StallReport, is_timeout

_FAILURE = "failure_watch/failure"  # text of the first failure
_ACKNOWLEDGED = "failure_watch/acknowledged"  # ranks that have printed it
_LEFT = "failure_watch/left"  # ranks that no longer look
_PATIENCE_S = 3.0  # for peers to acknowledge, beyond their polling interval
_LINGER_S = 1.0  # a peer lets the failing rank end first
_STORE_LOST_S = 5.0  # the store may go a little before a rank that ends in order
_FEW_LINES = 10  # of a message; with torchrun's own lines it stays among the last 20
_FAREWELL_S = 60.0  # rank 0 keeps the store for ranks that still close their logs


def failure_watch(
    poll_s: float = 1.0,
    timeout_s: float = float("inf"),
    before_end: Callable[[RunStore], None] = lambda store: None,
) -> AbstractContextManager[object]:
    """A context for everything that follows the creation of the default group.  Collective.

    ``timeout_s`` is that of collectives: the calling thread is reported on shortly before it.

    An exception that leaves it ends the process with status 1, and all other ranks with it.  In a
    world of one rank, and among virtual ranks, which stop each other, it passes through.
    ``before_end`` is called first, on every rank in some thread, but not among virtual ranks.
    """
    if not dist.is_initialized() or dist.get_backend() == BACKEND:
        return contextlib.nullcontext()
    if dist.get_world_size() == 1:
        return _alone(before_end)
    store = RunStore(_get_default_store(), agree_on_secret())
    note_collectives()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    stall = StallReport(rank, world_size, timeout_s)
    return FailureWatch(store, rank, world_size, poll_s, stall, before_end)


@contextlib.contextmanager
def _alone(before_end: Callable[[RunStore], None]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        before_end(RunStore(_get_default_store(), agree_on_secret()))
        raise


class FailureWatch:
    """See `failure_watch`.  ``end`` ends the process without running anything else in it."""

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
        # A store's connection serves one thread at a time, hence another one here.
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

    def _leave(self) -> None:
        """The end of a run in order: nobody looks for failures any more."""
        self._thread.join()
        with contextlib.suppress(RuntimeError):  # the store may be gone: nobody needs it then
            self._peers.leave(self._store)
            self._store.add(_LEFT, 1)
            if self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                self._wait_for(_LEFT, self._world_size, _FAREWELL_S, self._has_lost_a_neighbour)

    def _has_lost_a_neighbour(self) -> bool:
        return self._peers.lost(self._store) is not None

    def _fail(self, error: BaseException) -> None:
        """Tell all ranks of ``error`` and end this process."""
        mine = f"rank {self._rank} failed: {type(error).__name__}: {in_few_lines(str(error))}"
        is_stall = is_timeout(error)
        first = mine
        self._thread.join()  # which ends the process if it has seen a failure
        with contextlib.suppress(RuntimeError):  # without a store the launcher has to see it
            if is_stall:
                self._stall.call_for_reports(self._store)
            cause = self._cause() if is_lost_connection(error) else None
            first = cause or self._store.set_first(_FAILURE, mine)
        if first == mine:
            if not isinstance(error, MegatronError):  # whose message is a whole sentence
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
        self._finish(first)

    def _cause(self) -> str | None:
        """The failure of another rank, whose end has cut a connection of this one; waits for it."""
        deadline_s = time.monotonic() + 2 * self._poll_s
        while (found := self._failure(self._store)) is None and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return found

    def _failure(self, store: RunStore) -> str | None:
        """The failure that has been reported; a neighbour that has ended without one is one."""
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
        """Life of the thread."""
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
                self._finish(text, say=False)

    def _finish(self, text: str, *, say: bool = True) -> None:
        if say:
            _say(text)
        tell_launcher(text)
        sys.stdout.flush()
        self._end(1)


def _say(text: str) -> None:
    print(f"{text}\n", end="", file=sys.stderr, flush=True)  # one write: others print too


def is_lost_connection(error: BaseException) -> bool:
    """Whether ``error`` says that the other end of a connection is gone (gloo, NCCL, the store)."""
    words = ("onnection closed", "onnection reset", "roken pipe", "remote process exited")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in words)


def in_few_lines(text: str) -> str:
    """``text`` without its middle, so that what stands before it is not far above.

    An exception of a reading process, for instance, carries the whole traceback in its message.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) <= _FEW_LINES:
        return text
    return "\n".join([*lines[:4], "  ...", *lines[-4:]])


def tell_launcher(text: str) -> None:
    """Leave ``text`` where torchrun looks for the reason to print at the end of its output."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump({"message": {"message": text, "extraInfo": extra}}, file)
