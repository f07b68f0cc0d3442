"""Rows of each expert, where the device knows them and the host may never ask."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import overload

from torch import Tensor

from megatron.core.device.async_host_copy import AsyncHostCopy


class LateCounts(Sequence[int]):
    """``counts`` [e] beside the rows; the first number that the host asks for waits for all."""

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
