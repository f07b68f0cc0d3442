"""A line on the terminal that follows a long job and disappears when the job ends.

    with Progress("encoding", total=len(rows), unit="rows") as progress:
        for row in rows:
            ...
            progress.add()

Only rank 0 draws it, on standard error, where that is a terminal, and only for a job that takes
longer than `_QUIET_S`.  Elsewhere nothing is printed: logs stay as they are.  A thread draws, so
that a job that cannot count (without ``total``) shows how long it has been running.  This module
does not import torch: programs that prepare data use it.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import TextIO

CLEAR = "\x1b[K"  # erases the rest of a terminal's line
_QUIET_S = 1.0
_EVERY_S = 0.3


class Progress:
    """Context manager: ``job`` as a phrase, the ``total`` to be counted, and what is counted."""

    def __init__(self, job: str, total: float | None = None, unit: str = "") -> None:
        self.job = job
        self.total = total
        self.unit = unit
        self._done: float = 0
        self._has_ended = threading.Event()
        self.num_drawn = 0
        self._thread: threading.Thread | None = None

    def add(self, count: float = 1) -> None:
        """Count finished work."""
        self._done += count

    def __enter__(self) -> Progress:
        if can_replace_lines(sys.stderr) and _is_rank0():
            self._thread = threading.Thread(target=self._draw, args=(sys.stderr,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        if self._thread is not None:
            self._thread.join()

    def line(self, elapsed_s: float) -> str:
        """Return the line after ``elapsed_s`` seconds."""
        if not self.total:
            return f"{self.job}, {timedelta(seconds=round(elapsed_s))}"
        share = min(1.0, self._done / self.total)
        digits = 0 if isinstance(self.total, int) else 1
        done, total = (f"{count:,.{digits}f}" for count in (self._done, self.total))
        text = f"{self.job}: {done}/{total} {self.unit}, {share:.0%}"
        if not share:
            return text
        left = timedelta(seconds=round(elapsed_s * (1 - share) / share))
        return f"{text}, {self._done / elapsed_s:,.1f} {self.unit}/s, {left} left"

    def _draw(self, terminal: TextIO) -> None:
        began_s = time.monotonic()
        wait_s = _QUIET_S
        while not self._has_ended.wait(wait_s):
            wait_s = _EVERY_S
            width = shutil.get_terminal_size().columns - 1
            self._write(terminal, f"{self.line(time.monotonic() - began_s)[:width]}{CLEAR}\r")
            self.num_drawn += 1
        if self.num_drawn:
            self._write(terminal, CLEAR)

    def _write(self, terminal: TextIO, text: str) -> None:
        with suppress(OSError, ValueError):  # the terminal was closed
            terminal.write(text)
            terminal.flush()


def can_replace_lines(stream: TextIO) -> bool:
    """Return whether ``stream`` is a terminal that knows `CLEAR`."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _is_rank0() -> bool:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    return os.environ.get("RANK", "0") in ("", "0")
