"""When one rank fails, all ranks end within seconds and say which one it was.

A collective that times out is such a failure.  Then every rank also says what it was doing with
the others and shows its stack, and the failing rank ends with one line about each of them.

The failing rank writes its failure into the default store.  A thread on every rank looks there
through a connection of its own, also while the main thread waits in a collective that will never
complete; it prints ``rank R failed: ...`` and ends the process.

Order of an end: the failing rank prints its traceback and sets the failure key; its peers print
the line and acknowledge; all call ``before_end``; the failing rank ends, then the peers do.  So a
launcher notices the rank that matters first.  Nothing here is a collective operation.
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
from torch.distributed import Store
from torch.distributed.distributed_c10d import _get_default_store

from megatron.core.config.errors import MegatronError
from megatron.core.virtual_ranks import BACKEND
from megatron.core.waiting import note_collectives
from megatron.training.stall_report import StallReport, is_timeout

_FAILURE = "failure_watch/failure"  # text of the first failure
_ACKNOWLEDGED = "failure_watch/acknowledged"  # ranks that have printed it
_LEFT = "failure_watch/left"  # ranks that no longer look
_PATIENCE_S = 3.0  # for peers to acknowledge, beyond their polling interval
_LINGER_S = 1.0  # a peer lets the failing rank end first
_STORE_LOST_S = 10.0  # the store may go a little before a rank that ends in order
_FEW_LINES = 10  # of a message; with torchrun's own lines it stays among the last 20
_FAREWELL_S = 60.0  # rank 0 keeps the store for ranks that still close their logs


def failure_watch(
    poll_s: float = 1.0,
    timeout_s: float = float("inf"),
    before_end: Callable[[Store], None] = lambda store: None,
) -> AbstractContextManager[object]:
    """A context for everything that follows the creation of the process groups.

    ``timeout_s`` is that of collectives: the calling thread is reported on shortly before it.

    An exception that leaves it ends the process with status 1, and all other ranks with it.  In a
    world of one rank, and among virtual ranks, which stop each other, it passes through.
    ``before_end`` is called first, on every rank in some thread, but not among virtual ranks.
    """
    if not dist.is_initialized() or dist.get_backend() == BACKEND:
        return contextlib.nullcontext()
    if dist.get_world_size() == 1:
        return _alone(before_end)
    note_collectives()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    stall = StallReport(rank, world_size, timeout_s)
    return FailureWatch(_get_default_store(), rank, world_size, poll_s, stall, before_end)


@contextlib.contextmanager
def _alone(before_end: Callable[[Store], None]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        before_end(_get_default_store())
        raise


class FailureWatch:
    """See `failure_watch`.  ``end`` ends the process without running anything else in it."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        poll_s: float,
        stall: StallReport,
        before_end: Callable[[Store], None],
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._store = store.clone()
        self._rank = rank
        self._world_size = world_size
        self._poll_s = poll_s
        self._stall = stall
        self._before_end = before_end
        self._end = end
        self._stopped = threading.Event()
        # A store's connection serves one thread at a time, hence another one here.
        self._thread = threading.Thread(
            target=self._watch, args=(store.clone(),), name="failure watch", daemon=True
        )

    def __enter__(self) -> FailureWatch:
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
            self._store.add(_LEFT, 1)
            if self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                self._wait_for(_LEFT, self._world_size, _FAREWELL_S)

    def _fail(self, error: BaseException) -> None:
        """Tell all ranks of ``error`` and end this process."""
        mine = f"rank {self._rank} failed: {type(error).__name__}: {in_few_lines(str(error))}"
        is_stall = is_timeout(error)
        first = mine
        with contextlib.suppress(RuntimeError):  # without a store the launcher has to see it
            if is_stall:
                self._stall.call_for_reports(self._store)
            first = self._store.compare_set(_FAILURE, "", mine).decode()
        if first == mine:
            if not isinstance(error, MegatronError):  # whose message is a whole sentence
                traceback.print_exception(error)
            elif in_few_lines(str(error)) != str(error):
                print(error, file=sys.stderr, flush=True)
        else:  # ours is an echo: a connection that the other rank's end has closed
            self._thread.join()  # ends the process if it has seen the failure
        with contextlib.suppress(RuntimeError):
            self._store.add(_ACKNOWLEDGED, 1)
            self._wait_for(_ACKNOWLEDGED, self._world_size, _PATIENCE_S + self._poll_s)
            self._before_end(self._store)
            if is_stall and first == mine:
                first = f"{self._stall.summary(self._store)}\n{mine}"
        self._finish(first)

    def _wait_for(self, counter: str, value: int, patience_s: float) -> None:
        deadline_s = time.monotonic() + patience_s
        while self._store.add(counter, 0) < value and time.monotonic() < deadline_s:
            time.sleep(0.02)

    def _watch(self, store: Store) -> None:
        """Life of the thread."""
        lost_at_s: float | None = None
        while not self._stopped.wait(self._poll_s):
            try:
                self._stall.look(store)
                text = store.get(_FAILURE).decode() if store.check([_FAILURE]) else None
                if text is not None:
                    self._stall.answer(store)
            except RuntimeError as error:
                lost_at_s = lost_at_s or time.monotonic()
                if time.monotonic() - lost_at_s > _STORE_LOST_S:
                    self._finish(f"rank {self._rank} lost the store of the process group: {error}")
                continue
            if text is not None and not self._stopped.is_set():
                print(text, file=sys.stderr, flush=True)
                with contextlib.suppress(RuntimeError):
                    store.add(_ACKNOWLEDGED, 1)
                    self._before_end(store)
                time.sleep(_LINGER_S)
                self._finish(text, say=False)

    def _finish(self, text: str, *, say: bool = True) -> None:
        if say:
            print(text, file=sys.stderr, flush=True)
        tell_launcher(text)
        sys.stdout.flush()
        self._end(1)


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
