"""Numbers that the host will want later: it does not wait for the device meanwhile."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.core import device


class AsyncHostCopy:
    """A copy of ``tensor`` as it is now, on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self._here = device.host_like(tensor, tensor.dtype, pin=True)
        self._here.copy_(tensor, non_blocking=True)
        self._arrived = device.record_event()

    def get(self) -> Any:
        """The number, or nested lists of them; waits for what was queued before it was made."""
        device.wait_for(self._arrived)
        # A number by itself the planner knows how to read.
        return self._here.tolist() if self._here.dim() else self._here.item()
