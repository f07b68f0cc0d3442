"""Tensors that are made in a thread, each while the one before it is checked and written."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from torch import Tensor

from megatron.core.dist_checkpointing.safetensors_file import LazyTensor


def made_ahead(tensors: Sequence[LazyTensor]) -> list[LazyTensor]:
    """``tensors``, to be made in this order.  Two are in memory at a time."""
    line = _Line(tensors)
    return [replace(tensor, make=partial(line.take, i)) for i, tensor in enumerate(tensors)]


class _Line:
    def __init__(self, tensors: Sequence[LazyTensor]) -> None:
        self._tensors = tensors
        self._thread = ThreadPoolExecutor(1, "tensor ahead")
        self._coming: dict[int, Future[Tensor]] = {}

    def take(self, index: int) -> Tensor:
        """Wait for a tensor, and begin with the next."""
        coming = self._coming.get(index) or self._begun(index)
        tensor = coming.result()
        is_last = index + 1 == len(self._tensors)
        self._coming = {} if is_last else {index + 1: self._begun(index + 1)}
        return tensor

    def _begun(self, index: int) -> Future[Tensor]:
        return self._thread.submit(self._tensors[index].make)
