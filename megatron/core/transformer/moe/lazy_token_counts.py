"""Token counts per expert that stay on the device until the host reads one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import overload

from torch import Tensor

from megatron.core.device.async_host_copy import AsyncHostCopy


class LazyTokenCounts(Sequence[int]):
    """Sequence of the counts [e] on the device; the first read by the host waits for the copy."""

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts
        self._late = AsyncHostCopy(counts)

    @cached_property
    def _numbers(self) -> list[int]:
        return self._late.get_ints()

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place: int | slice) -> int | list[int]:
        return self._numbers[place]

    def __len__(self) -> int:
        return len(self.counts)
