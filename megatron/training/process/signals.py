"""SIGTERM as a stop request: the first signal is remembered, a second one ends the process.

The train loop stops after the current step.  The handler is installed at the beginning of start-up,
so that a signal during setup or loading also stops the loop;
`megatron.training.process.early_sigterm` installs it before the slow imports, so this module
imports nothing heavy.
"""

from __future__ import annotations

import signal
import time
from types import FrameType

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
