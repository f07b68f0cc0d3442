"""Copy device values to pinned host memory without blocking; read them later."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.core import device


class AsyncHostCopy:
    """Asynchronous copy to the host of the value that ``tensor`` has at construction."""

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self._here = device.host_like(tensor, tensor.dtype, pin=True)
        self._here.copy_(tensor, non_blocking=True)
        self._arrived = device.record_event()

    def get(self) -> float:
        """Return the value of a scalar; blocks until the copy is complete."""
        device.wait_for(self._arrived)
        return self._here.item()

    def get_list(self) -> list[Any]:
        """Return the values of a vector or a scalar; blocks until the copy is complete."""
        device.wait_for(self._arrived)
        # Not tolist(): the planner gives a value to item() of a tensor without memory.
        return [value.item() for value in self._here.view(-1)]
