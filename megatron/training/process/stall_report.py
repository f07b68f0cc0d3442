"""What each rank was doing when a collective did not end.

A rank reports on standard error: what it waits in, or was in last, and its Python stack; and it
leaves one line in the store.  It does so when nothing has moved for nine tenths of the time-out,
which on GPUs is before NCCL ends the process, and when another rank calls for reports.
Nothing here is a collective operation; the store is that of the thread which calls.
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
_LINE = "stall_report/rank"  # + number
_SHARE = 0.9  # of the time-out
_SHOWN = 6  # different lines in a summary


def is_timeout(error: BaseException) -> bool:
    """Whether ``error`` says that a collective took too long (gloo, NCCL and the store)."""
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ("imed out", "imeout")
    )


class StallReport:
    """Watches the thread that makes it."""

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._thread_id = threading.get_ident()
        self._moved_at_s, self._progress = time.monotonic(), -1
        self._has_reported = False

    def look(self, store: RunStore) -> None:
        """Report, once, if nothing has moved for long; the run goes on."""
        now_s = time.monotonic()
        if collective_tracer.record.progress != self._progress:
            self._progress, self._moved_at_s = collective_tracer.record.progress, now_s
            self._has_reported = False
        elif now_s - self._moved_at_s > _SHARE * self._timeout_s:
            self._report(store, f"nothing has moved for {now_s - self._moved_at_s:.0f} s")

    def call_for_reports(self, store: RunStore) -> None:
        """Report, and have all others do so when they `answer`."""
        store.set(_CALLED_FOR, str(self._rank))
        self._report(store, "a collective timed out here")

    def answer(self, store: RunStore) -> None:
        """Report if another rank has called for it."""
        if (caller := store.get(_CALLED_FOR)) is not None:
            self._report(store, f"rank {caller} timed out")

    def summary(self, store: RunStore) -> str:
        """One line about all ranks that said the same, the fewest last."""
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
