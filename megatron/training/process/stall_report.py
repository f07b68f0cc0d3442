"""Report what each rank was doing when a collective did not finish.

A rank reports on standard error the collective it waits in, or its last one, and its Python stack;
it also writes one line to the store.  It does so when no collective has progressed for 90 % of the
timeout, which on GPUs is before NCCL ends the process, and when another rank calls for reports.  No
function in this module is collective; each uses the store of the calling thread.

With ``patience_s``, for programs whose steps are short, a rank without progress for so long calls
for the reports of all ranks, prints their summary, and goes on.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.core import device
from megatron.core.diagnostics import collective_tracer
from megatron.core.parallel.run_store import RunStore

_TRACE_FILE = "TORCH_FR_DUMP_TEMP_FILE", "/tmp/nccl_trace_rank_"  # torch's variable and default
_CALLED_FOR = "stall_report/called_for"
_LINE = "stall_report/rank"  # + rank
_SHARE = 0.9  # of the timeout without progress, after which a rank reports
_SHOWN = 6  # different lines in a summary
_SLACK = 10.0  # times the longest pause between collectives so far: no reason for a report
_LOOKS_FOR_ANSWERS = 3  # after a call for reports


@dataclass(frozen=True)
class HungRank:
    """A rank that others wait for, and why it is believed to hang."""

    rank: int
    why: str
    is_stopped: bool = False  # nothing in its process runs


FindHang = Callable[[RunStore], HungRank | None]  # called at each poll


def is_timeout(error: BaseException) -> bool:
    """Return whether ``error``, or its cause, reports a collective that timed out.

    It may be one of gloo, NCCL or the store.
    """
    return any(
        isinstance(e, RuntimeError) and any(words in str(e) for words in ("imed out", "imeout"))
        for e in (error, error.__cause__)
    )


def write_flight_recorder(rank: int) -> Path | None:
    """Write NCCL's record of this rank's last collectives where torch would; return the path.

    Torch writes it when NCCL's timeout expires, but a rank that hangs is ended before.  Returns
    None without NCCL, or if the file cannot be written.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    if dump is None or not device.is_cuda():
        return None
    path = Path(f"{os.environ.get(*_TRACE_FILE)}{rank}")
    try:
        # A new file that replaces another one: the name is known, and /tmp belongs to all users.
        number, new = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(number, "wb") as file:
            file.write(dump())
        os.replace(new, path)
    except (OSError, RuntimeError):
        return None
    return path


class StallReport:
    """Watch this process's collectives, and the stack of the thread that creates the object.

    ``find_hang`` finds a rank that hangs long before a collective times out.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_s: float,
        patience_s: float = float("inf"),
        find_hang: FindHang = lambda store: None,
    ) -> None:
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self._patience_s = patience_s
        self.find_hang = find_hang
        self._thread_id = threading.get_ident()
        self._moved_at_s, self._progress = time.monotonic(), -1
        self._longest_pause_s = 0.0
        self._has_reported = False
        self._answered: str | None = None  # the last call for reports
        self._looks_until_summary = 0

    def look(self, store: RunStore) -> None:
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
                self._call_all(store)
        if self._patience_s < self._timeout_s:
            self.answer(store)
            self._print_summary(store)

    def call_for_reports(self, store: RunStore, why: str = "a collective timed out here") -> None:
        """Report, and request a report from every other rank (see `answer`)."""
        store.set(_CALLED_FOR, f"{self._rank} 0")
        self._report(store, why)

    def answer(self, store: RunStore) -> None:
        """Report if another rank has requested it."""
        call = store.get(_CALLED_FOR)
        if call is not None and call != self._answered:
            self._answered = call
            self._report(store, f"rank {call.split()[0]} waits for another rank")

    def _call_all(self, store: RunStore) -> None:
        """Call for reports; of several ranks that do, the first one prints the summary."""
        number = int((store.get(_CALLED_FOR) or "0 0").split()[1]) + 1
        if store.set_first(f"{_CALLED_FOR}{number}", str(self._rank)) == str(self._rank):
            for rank in range(self._world_size):  # answers to earlier calls
                store.set(f"{_LINE}{rank}", "")
            store.set(_CALLED_FOR, f"{self._rank} {number}")
            self._looks_until_summary = _LOOKS_FOR_ANSWERS

    def _print_summary(self, store: RunStore) -> None:
        """Print the answers to this rank's call, some looks after it."""
        if self._looks_until_summary:
            self._looks_until_summary -= 1
            if self._looks_until_summary == 0:
                print(self.summary(store), file=sys.stderr, flush=True)

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
            if (path := write_flight_recorder(self._rank)) is not None:
                line = f"{me} wrote NCCL's last collectives to {path} (torchfrtrace reads it)"
                print(line, file=sys.stderr, flush=True)
        self._has_reported = True
        with contextlib.suppress(RuntimeError):  # the store may be gone with its rank
            store.set(f"{_LINE}{self._rank}", doing)
