"""End this process when the launcher that started it has ended.

A launcher that is killed cannot end its ranks: they would train on, unseen, and keep their GPUs.
Under torchrun a thread looks for the process that started this one, from the first import on.  It
reports the end before it ends the process; a signal at the parent's death (PR_SET_PDEATHSIG) could
not, as Python handles signals only between instructions of the main thread, and it would come
when the *thread* that started this process ends.  Nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

_LAUNCHED = "TORCHELASTIC_RUN_ID"  # torchrun sets it
_NAME = "launcher watch"
_POLL_S = 0.5


def end_with_launcher(end: Callable[[int], object] = os._exit) -> None:
    """Start the watch, once; does nothing in a process that torchrun has not started.

    ``end`` ends the process without running anything else in it.
    """
    if _LAUNCHED not in os.environ or any(t.name == _NAME for t in threading.enumerate()):
        return
    threading.Thread(target=_watch, args=(os.getppid(), end), name=_NAME, daemon=True).start()


def _watch(launcher: int, end: Callable[[int], object]) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_S)
    rank = os.environ.get("RANK", "?")
    text = f"rank {rank} ends: its launcher, process {launcher}, has ended\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode())  # not through sys.stderr, whose lock the main thread may hold
    end(1)
