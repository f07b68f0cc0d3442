"""Report what each rank was doing when a collective did not finish.

A rank reports on standard error the collective it waits in, or its last one, and its Python stack;
it also writes one line to the store.  It does so when no collective has progressed for 90 % of the
timeout, which on GPUs is before NCCL ends the process, and when another rank calls for reports.  No
function in this module is collective; each uses the store of the calling thread.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback

from megatron.core.diagnostics import collective_tracer
from megatron.core.parallel.run_store import RunStore

_CALLED_FOR = "stall_report/called_for"
_LINE = "stall_report/rank"  # + rank
_SHARE = 0.9  # of the timeout without progress, after which a rank reports
_SHOWN = 6  # different lines in a summary


def is_timeout(error: BaseException) -> bool:
    """Return whether ``error``, or its cause, reports a collective that timed out.

    It may be one of gloo, NCCL or the store.
    """
    return any(
        isinstance(e, RuntimeError) and any(words in str(e) for words in ("imed out", "imeout"))
        for e in (error, error.__cause__)
    )


class StallReport:
    """Watch this process's collectives, and the stack of the thread that creates the object."""

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._thread_id = threading.get_ident()
        self._moved_at_s, self._progress = time.monotonic(), -1
        self._has_reported = False

    def look(self, store: RunStore) -> None:
        """Report, once, if no collective has progressed for long; the run continues."""
        now_s = time.monotonic()
        record = collective_tracer.record
        if record.is_idle or record.progress != self._progress:
            self._progress, self._moved_at_s = record.progress, now_s
            self._has_reported = False
        elif now_s - self._moved_at_s > _SHARE * self._timeout_s:
            self._report(store, f"nothing has moved for {now_s - self._moved_at_s:.0f} s")

    def call_for_reports(self, store: RunStore) -> None:
        """Report, and request a report from every other rank (see `answer`)."""
        store.set(_CALLED_FOR, str(self._rank))
        self._report(store, "a collective timed out here")

    def answer(self, store: RunStore) -> None:
        """Report if another rank has requested it."""
        if (caller := store.get(_CALLED_FOR)) is not None:
            self._report(store, f"rank {caller} timed out")

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
        if self._has_reported:
            return
        self._has_reported = True
        frame = sys._current_frames().get(self._thread_id)
        stack = "".join(traceback.format_stack(frame)) if frame else "it has ended\n"
        me = f"rank {self._rank}"
        record = collective_tracer.record
        doing = str(record)
        lines = [f"{me} {doing} ({why})", f"{me} began {record.counts()}", f"{me} stands in", stack]
        print("\n".join(lines), file=sys.stderr, end="", flush=True)
        with contextlib.suppress(RuntimeError):  # the store may be gone with its rank
            store.set(f"{_LINE}{self._rank}", doing)
