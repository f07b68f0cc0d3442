"""Copy device values to pinned host memory without blocking; read them later."""

from __future__ import annotations

from torch import Tensor

from megatron.core import device


class AsyncHostCopy:
    """A copy of ``tensor`` as it is now, on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self._here = device.host_like(tensor, tensor.dtype, pin=True)
        self._here.copy_(tensor, non_blocking=True)
        self._arrived = device.record_event()

    def get(self) -> float:
        """The value of a scalar; waits for what was queued before the copy was made."""
        device.wait_for(self._arrived)
        return self._here.item()

    def get_ints(self) -> list[int]:
        """The values of a vector of integers; waits as `get` does."""
        device.wait_for(self._arrived)
        values: list[int] = self._here.tolist()
        return values
