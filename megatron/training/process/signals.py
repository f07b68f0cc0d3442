"""SIGTERM as a wish: the first one is remembered until a step is done, the second ends at once.

The handler is installed at the begin of start-up, so that a signal that comes while the model is
built or loaded is kept for the loop; `megatron.training.process.early_sigterm` installs it before
the imports that take seconds, so nothing heavy is imported here.
"""

from __future__ import annotations

import signal
import time
from types import FrameType

# A launcher that ends with its process group passes on what the ranks have received already.
ECHO_S = 5.0


class StopSignal:
    """A signal handler that remembers."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        self.received = False
        self._received_at_s = 0.0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if not self.received:
            self.received, self._received_at_s = True, now_s
        elif now_s - self._received_at_s > ECHO_S:  # asked twice: no time for a checkpoint
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)

    def received_s(self) -> float:
        """Seconds since the first signal; 0 if there was none."""
        return time.monotonic() - self._received_at_s if self.received else 0.0

    @property
    def name(self) -> str:
        """SIGTERM, for instance."""
        return signal.Signals(self.signum).name


def catch_stop_signal(signum: int = signal.SIGTERM) -> StopSignal:
    """Install the handler, or return the one that is installed.  In the main thread only."""
    installed = signal.getsignal(signum)
    if isinstance(installed, StopSignal):
        return installed
    handler = StopSignal(signum)
    signal.signal(signum, handler)
    return handler
