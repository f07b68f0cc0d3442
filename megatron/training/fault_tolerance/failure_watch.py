"""End all ranks within seconds when one rank fails or hangs, and report which rank failed first.

On every rank a thread polls the default store over a connection of its own, so it works while the
main thread is blocked in a collective that will never complete.  A rank fails by an exception
(`FailureWatch`), a collective that times out (`StallReport`), or the end of its process
(`PeerProcesses`: a neighbouring rank on its host detects it).  Its failure is written into the
store, under a key that only the ranks of the run can write (`RunStore`); every rank prints
``rank R failed: ...`` and ends.

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
import select
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
from megatron.core.diagnostics import collective_tracer
from megatron.core.parallel.run_store import LOST_RANKS, RunStore, agree_on_secret
from megatron.core.process_memory import boot_id
from megatron.core.virtual_ranks import BACKEND
from megatron.training.process import exit_report

# Keys of the store.  Text of the first failure, number of ranks that have printed it, number of
# ranks that have ended normally:
_FAILURE = "failure_watch/failure"
_ACKNOWLEDGED = "failure_watch/acknowledged"
_LEFT = "failure_watch/left"
# Rank and number of the last call for reports, and the answers by rank:
_CALLED_FOR = "stall_report/called_for"
_LINE = "stall_report/rank"
# By rank: kernel and process id; a key that exists once the rank has ended normally:
_PROCESS = "process/"
_HAS_LEFT = "left/"

_PATIENCE_S = 3.0  # for peers to acknowledge, beyond their polling interval
_LINGER_S = 1.0  # delay of a peer, so that the failing rank exits first
_STORE_LOST_S = 5.0  # tolerated: at a normal end the store may close before a rank
_FAREWELL_S = 60.0  # rank 0 serves the store while other ranks close their logs
_FEW_LINES = 10  # with torchrun's own lines, a message of so many fits into the last 20
_SHARE = 0.9  # of the timeout without progress, after which a rank reports
_SLACK = 10.0  # times the longest pause between collectives so far: no reason for a report
_SHOWN = 6  # different lines in a summary
_POLLS_FOR_SUMMARY = 3  # after a call for reports


def failure_watch(
    poll_s: float = 1.0,
    timeout_s: float = float("inf"),
    before_end: Callable[[RunStore], None] = lambda store: None,
    patience_s: float = float("inf"),
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
    """
    if not dist.is_initialized() or dist.get_backend() == BACKEND:
        return contextlib.nullcontext()
    store = RunStore(_get_default_store(), agree_on_secret())
    if dist.get_world_size() == 1:
        return _alone(store, before_end)
    collective_tracer.note_collectives()
    stall = StallReport(dist.get_rank(), dist.get_world_size(), timeout_s, patience_s)
    return FailureWatch(store, poll_s, stall, before_end)


@contextlib.contextmanager
def _alone(store: RunStore, before_end: Callable[[RunStore], None]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        exit_report.write_error(error)
        before_end(store)
        raise


class FailureWatch:
    """The context manager that `failure_watch` returns."""

    def __init__(
        self,
        store: RunStore,
        poll_s: float,
        stall: StallReport,
        before_end: Callable[[RunStore], None],
    ) -> None:
        self._store = store.clone()
        self._poll_s = poll_s
        self._stall = stall
        self._before_end = before_end
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._peers = PeerProcesses(self._rank, self._world_size)
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
        self._thread.join()  # it ends the process if it has seen a failure
        if error is None or (isinstance(error, SystemExit) and not error.code):
            with contextlib.suppress(RuntimeError):  # the store may have closed already
                self._leave()
        else:
            self._fail(error)

    def explain(self, error: BaseException) -> str:
        """Return the failure of another rank that has caused ``error``, or that of this rank.

        Call it in the thread of the context.  It waits for two polling intervals at most.
        """
        deadline_s = time.monotonic() + 2 * self._poll_s
        # A lost connection is usually the consequence of another rank's exit.
        while _reports(error, *_LOST_CONNECTION) and time.monotonic() < deadline_s:
            with contextlib.suppress(RuntimeError):  # the store may have ended with its rank
                if (found := self._failure(self._store)) is not None:
                    return found
            time.sleep(0.02)
        return self._failure_of(error)

    def _failure_of(self, error: BaseException) -> str:
        return f"rank {self._rank} failed: {type(error).__name__}: {in_few_lines(str(error))}"

    def _leave(self) -> None:
        """Record the normal end of this rank.

        Rank 0 keeps serving the store until all ranks have left or a neighbour is lost.
        """
        self._peers.leave(self._store)
        self._store.add(_LEFT, 1)
        if self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            deadline_s = time.monotonic() + _FAREWELL_S
            while self._store.add(_LEFT, 0) < self._world_size:
                if time.monotonic() > deadline_s or self._peers.lost(self._store) is not None:
                    return
                time.sleep(0.02)

    def _fail(self, error: BaseException) -> None:
        """Report ``error`` to all ranks and end this process."""
        is_stall = _reports(error, *_TIMED_OUT)
        mine = self._failure_of(error)
        first = mine
        with contextlib.suppress(RuntimeError):  # without a store only the launcher reports it
            if is_stall:
                self._stall.call_for_reports(self._store)
            first = self._store.set_first(_FAILURE, self.explain(error))
        if first == mine:
            if not isinstance(error, MegatronError | SystemExit):  # these need no traceback
                traceback.print_exception(error)
            elif in_few_lines(str(error)) != str(error):
                print(error, file=sys.stderr, flush=True)
        with contextlib.suppress(RuntimeError):
            self._store.add(_ACKNOWLEDGED, 1)
            living = self._world_size - self._store.add(LOST_RANKS, 0)
            deadline_s = time.monotonic() + _PATIENCE_S + self._poll_s
            while self._store.add(_ACKNOWLEDGED, 0) < living and time.monotonic() < deadline_s:
                time.sleep(0.02)
            self._before_end(self._store)
            if is_stall and first == mine:
                first = f"{self._stall.summary(self._store)}\n{mine}"
        _say(first)
        _end(first, exit_report.exit_code(error))

    def _failure(self, store: RunStore) -> str | None:
        """Return the reported failure, None if there is none.

        Reports the failure of a neighbour whose process has ended without reporting it.
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
        return text

    def _watch(self, store: RunStore) -> None:
        """Poll for stalls and failures until the context exits (target of the thread)."""
        lost_at_s: float | None = None
        while not self._stopped.wait(self._poll_s):
            try:
                self._stall.poll(store)
                text = self._failure(store)
                if text is not None:
                    self._stall.answer(store)
            except RuntimeError as error:
                lost_at_s = lost_at_s or time.monotonic()
                if time.monotonic() - lost_at_s > _STORE_LOST_S:
                    text = f"rank {self._rank} lost the store of the process group: {error}"
                    _say(text)
                    _end(text)
                continue
            if text is not None and not self._stopped.is_set():
                _say(text)
                with contextlib.suppress(RuntimeError):
                    store.add(_ACKNOWLEDGED, 1)
                    self._before_end(store)
                time.sleep(_LINGER_S)
                _end(text)


def _say(text: str) -> None:
    print(f"{text}\n", end="", file=sys.stderr, flush=True)  # one write: other ranks print too


def _end(text: str, code: int = 1, end: Callable[[int], None] = os._exit) -> None:
    """End the process without running any other code in it; report ``text`` as the cause."""
    exit_report.write(exit_report.kind_of(code), code, text)
    notify_launcher(text)
    sys.stdout.flush()
    end(code)


# Words of errors of gloo, NCCL and the store: a closed connection; a collective that timed out.
_LOST_CONNECTION = ("onnection closed", "onnection reset", "roken pipe", "remote process exited")
_TIMED_OUT = ("imed out", "imeout")


def _reports(error: BaseException, *words: str) -> bool:
    """Return whether ``error``, or its cause, is a RuntimeError with one of ``words``."""
    return any(
        isinstance(e, RuntimeError) and any(word in str(e) for word in words)
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


def notify_launcher(text: str) -> None:
    """Write ``text`` to the file whose content torchrun prints at the end of its output."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump({"message": {"message": text, "extraInfo": extra}}, file)


class StallReport:
    """Watches this process's collectives, and reports what each rank does when one does not finish.

    A rank reports on standard error the collective it waits in, or its last one, and the stack of
    the thread that has created this object; it also writes one line to the store.  It does so when
    no collective has progressed for 90 % of the timeout, which on GPUs is before NCCL ends the
    process, and when another rank calls for reports.  No method is collective; each uses the store
    of the calling thread.

    With ``patience_s``, for programs whose steps are short, a rank without progress for so long
    calls for the reports of all ranks, prints their summary, and goes on.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_s: float,
        patience_s: float = float("inf"),
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._thread_id = threading.get_ident()
        self._moved_at_s = time.monotonic()
        self._progress = -1
        self._longest_pause_s = 0.0
        self._has_reported = False
        self._answered: str | None = None  # the last call for reports
        self._polls_until_summary = 0

    def poll(self, store: RunStore) -> None:
        """Report, once, if no collective has progressed for long; the run continues."""
        now_s = time.monotonic()
        record = collective_tracer.record
        pause_s = now_s - self._moved_at_s
        patience_s = max(self._patience_s, _SLACK * self._longest_pause_s)
        if record.progress != self._progress:
            self._longest_pause_s = max(self._longest_pause_s, pause_s)
            self._progress = record.progress
            self._moved_at_s = now_s
            self._has_reported = False
        elif record.is_idle:
            self._moved_at_s = now_s
        elif pause_s > min(_SHARE * self._timeout_s, patience_s) and not self._has_reported:
            self._report(store, f"nothing has moved for {pause_s:.0f} s")
            if self._patience_s < self._timeout_s:
                # Call for reports; of several ranks that do, the first one prints the summary.
                number = int((store.get(_CALLED_FOR) or "0 0").split()[1]) + 1
                me = str(self._rank)
                if store.set_first(f"{_CALLED_FOR}{number}", me) == me:
                    for rank in range(self._world_size):  # answers to earlier calls
                        store.set(f"{_LINE}{rank}", "")
                    store.set(_CALLED_FOR, f"{me} {number}")
                    self._polls_until_summary = _POLLS_FOR_SUMMARY
        if self._patience_s < self._timeout_s:
            self.answer(store)
            if self._polls_until_summary:  # this rank has called for reports
                self._polls_until_summary -= 1
                if self._polls_until_summary == 0:
                    print(self.summary(store), file=sys.stderr, flush=True)

    def call_for_reports(self, store: RunStore) -> None:
        """Report, and request a report from every other rank (see `answer`)."""
        store.set(_CALLED_FOR, f"{self._rank} 0")
        self._report(store, "a collective timed out here")

    def answer(self, store: RunStore) -> None:
        """Report if another rank has requested it."""
        call = store.get(_CALLED_FOR)
        if call is not None and call != self._answered:
            self._answered = call
            self._report(store, f"rank {call.split()[0]} waits for another rank")

    def summary(self, store: RunStore) -> str:
        """Return one line per group of ranks with equal reports, the smallest group last."""
        said: dict[str, list[int]] = {}
        for rank in range(self._world_size):
            line = store.get(f"{_LINE}{rank}") or "does not answer"
            said.setdefault(line, []).append(rank)
        ordered = sorted(said.items(), key=lambda item: -len(item[1]))
        return "\n".join(
            f"{'ranks' if len(ranks) > 1 else 'rank'} {' '.join(map(str, ranks))}: {line}"
            for line, ranks in ordered[-_SHOWN:]
        )

    def _report(self, store: RunStore, why: str) -> None:
        """Write what this rank does to the store, and once for each stall to standard error."""
        record = collective_tracer.record
        doing = str(record)
        if not self._has_reported:
            frame = sys._current_frames().get(self._thread_id)
            stack = "".join(traceback.format_stack(frame)) if frame else "it has ended\n"
            me = f"rank {self._rank}"
            said = f"{me} {doing} ({why})\n{me} began {record.counts()}\n{me} stands in\n{stack}"
            print(said, file=sys.stderr, end="", flush=True)
        self._has_reported = True
        with contextlib.suppress(RuntimeError):  # the store may be gone with its rank
            store.set(f"{_LINE}{self._rank}", doing)


class PeerProcesses:
    """Watches the processes of the previous and the next rank.

    A killed process reports nothing, so each rank publishes its process id.  Its neighbours watch
    the process if they run under the same kernel, so that each of several ranks on a host is
    watched; none is watched where the system has no process file descriptors.  Such a descriptor
    also shows an end that the launcher has not yet noticed.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._unknown = {(rank - 1) % world_size, (rank + 1) % world_size} - {rank}
        self._open: dict[int, int] = {}  # rank -> process file descriptor
        self._processes: dict[int, int] = {}  # rank -> process id
        self._place = _place()

    def announce(self, store: RunStore) -> None:
        """Publish this rank's `_place` and process id in the store."""
        store.set(f"{_PROCESS}{self._rank}", f"{self._place} {os.getpid()}")

    def leave(self, store: RunStore) -> None:
        """Record in the store that this rank ends normally."""
        store.set(f"{_HAS_LEFT}{self._rank}", "")

    def lost(self, store: RunStore) -> tuple[int, int] | None:
        """Return rank and process id of a neighbour that ended without `leave`, or None."""
        for rank in sorted(self._unknown):
            self._begin_to_watch(rank, store.get(f"{_PROCESS}{rank}"))
        for rank in tuple(self._processes):
            if self._has_ended(rank) and store.get(f"{_HAS_LEFT}{rank}") is None:
                return rank, self._processes[rank]
        return None

    def _begin_to_watch(self, rank: int, announced: str | None) -> None:
        if announced is None:
            return
        self._unknown.discard(rank)  # two threads may look
        place, process = announced.rsplit(" ", 1)
        if place != self._place or place == "":
            return
        try:
            self._open[rank] = os.pidfd_open(int(process))
        except ProcessLookupError:  # it has ended since
            pass
        except OSError:  # an older kernel, or a limit on descriptors
            return
        self._processes[rank] = int(process)

    def _has_ended(self, rank: int) -> bool:
        if rank not in self._open:
            return True
        poll = select.poll()
        poll.register(self._open[rank], select.POLLIN)
        return bool(poll.poll(0))


def _place() -> str:
    """Return an id of this kernel and process namespace; empty if it cannot be determined.

    Processes with equal ids can open file descriptors of each other.
    """
    if not hasattr(os, "pidfd_open"):
        return ""
    try:
        boot = boot_id()
        return boot and f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
