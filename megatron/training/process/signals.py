"""Stop requests to a rank, and the end of its launcher.

The first SIGTERM is remembered: the train loop stops after the current step.  A second one ends the
process.  The handler is installed at the beginning of start-up, so that a signal during setup or
loading also stops the loop; `megatron.training.process.early_sigterm` installs it before the slow
imports, so this module imports nothing heavy.

A killed launcher cannot end its ranks: they would continue to train unnoticed and keep their GPUs.
Under torchrun a thread therefore polls the parent process id, from the first import on, and reports
the end of the launcher before it ends the process.  PR_SET_PDEATHSIG could not report it: Python
handles signals only between instructions of the main thread, and the kernel sends that signal when
the *thread* that started this process ends.

The supervisor (tools/launch.py) starts ranks in its main thread.  Its ranks do set
PR_SET_PDEATHSIG, to SIGKILL, because a rank that is stopped or blocked polls nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from megatron.training.process import exit_report

_LAUNCHED = "TORCHELASTIC_RUN_ID"  # torchrun sets it
SUPERVISOR = "MEGATRON_SUPERVISOR"  # process id of the supervisor
_PR_SET_PDEATHSIG = 1
_NAME = "launcher watch"
_POLL_S = 0.5
# A signal to the process group also reaches the launcher, which then sends it to the ranks again:
# within this time a second signal is not a second request.
ECHO_S = 5.0


class StopSignal:
    """A signal handler that remembers the first signal; a second one ends the process."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        self.received = False
        self._received_at_s = 0.0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if not self.received:
            self.received, self._received_at_s = True, now_s
        elif now_s - self._received_at_s > ECHO_S:  # second request: no time for a checkpoint
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)

    def received_s(self) -> float:
        """Seconds since the first signal; 0 if there was none."""
        return time.monotonic() - self._received_at_s if self.received else 0.0

    @property
    def name(self) -> str:
        """Name of the signal, for instance SIGTERM."""
        return signal.Signals(self.signum).name


def catch_stop_signal(signum: int = signal.SIGTERM) -> StopSignal:
    """Install the handler, or return the installed one.  Call it in the main thread."""
    installed = signal.getsignal(signum)
    if isinstance(installed, StopSignal):
        return installed
    handler = StopSignal(signum)
    signal.signal(signum, handler)
    return handler


def end_with_launcher(end: Callable[[int], object] = os._exit) -> None:
    """Start the watching thread, once; do nothing in a process that torchrun has not started.

    ``end(status)`` ends the process without running any other code in it.
    """
    if _LAUNCHED not in os.environ or any(t.name == _NAME for t in threading.enumerate()):
        return
    if os.environ.get(SUPERVISOR) == str(os.getppid()):
        # The kernel ends this process with the supervisor; not on other systems than Linux.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    threading.Thread(target=_watch, args=(os.getppid(), end), name=_NAME, daemon=True).start()


def _watch(launcher: int, end: Callable[[int], object]) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_S)
    rank = os.environ.get("RANK", "?")
    text = f"rank {rank} ends: its launcher, process {launcher}, has ended\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode())  # not through sys.stderr, whose lock the main thread may hold
    exit_report.write("failed", 1, text.strip())
    end(1)
