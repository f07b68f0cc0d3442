"""SIGTERM as a wish: the first one is remembered until a step is done, the second ends at once.

The handler is installed at the begin of start-up, so that a signal that comes while the model is
built or loaded is kept for the loop.
"""

from __future__ import annotations

import signal
from types import FrameType

import torch
import torch.distributed as dist

from megatron.core import device


class StopSignal:
    """A signal handler that remembers."""

    def __init__(self, signum: int) -> None:
        self.signum = signum
        self.received = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.received:  # asked twice: no time for a checkpoint
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        self.received = True

    @property
    def name(self) -> str:
        """SIGTERM, for instance."""
        return signal.Signals(self.signum).name

    def received_anywhere(self) -> bool:
        """Whether any rank has received it.  Collective over all ranks."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self.received
        flag = torch.tensor([int(self.received)], device=device.current())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


def catch_stop_signal(signum: int = signal.SIGTERM) -> StopSignal:
    """Install the handler, or return the one that is installed.  In the main thread only."""
    installed = signal.getsignal(signum)
    if isinstance(installed, StopSignal):
        return installed
    handler = StopSignal(signum)
    signal.signal(signum, handler)
    return handler
