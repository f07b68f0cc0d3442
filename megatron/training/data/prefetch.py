"""The first micro-batch of the next step, read and sent to the device while this one computes.

Between two steps the host waits for the gradient norm; the device then has nothing to do until
the next micro-batch is there.  Inside a step reading is hidden: the host is ahead of the device.
A step that is one graph needs all of them at its begin.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from megatron.core import device


class ReadAhead:
    """``batches``, some of them taken before they are asked for."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._ahead: list[Any] = []
        self._stream: Any = None
        self._arrived: Any = None

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Any:
        if not self._ahead:
            return next(self._batches)
        device.wait_event(self._arrived)
        return self._ahead.pop(0)

    def first(self) -> Any:
        """What `next` will return, and still has to."""
        self.read()
        device.wait_event(self._arrived)
        return self._ahead[0]

    def read(self, count: int = 1) -> None:
        """Take the next ``count``, if there are so many, and start to copy them to the device."""
        for batch in itertools.islice(self._batches, max(0, count - len(self._ahead))):
            self._ahead.append(self._sent(batch) if isinstance(batch, dict) else batch)

    def _sent(self, batch: dict[str, Any]) -> dict[str, Any]:
        self._stream = self._stream or device.side_stream()
        if self._stream is None:
            return batch
        # Allocated on the stream that uses and frees them.
        tensors = {name: t for name, t in batch.items() if torch.is_tensor(t)}
        sent = {n: torch.empty_like(t, device=device.current()) for n, t in tensors.items()}
        device.wait_stream(self._stream)
        with device.on_stream(self._stream):
            for name, tensor in tensors.items():
                sent[name].copy_(tensor, non_blocking=True)
            self._arrived = device.record_event()
        return batch | sent


def read_ahead(data: Any, count: int = 1) -> None:
    """Of each model chunk's iterator; not of iterators that a script has brought along."""
    for batches in data if isinstance(data, list) else [data]:
        if isinstance(batches, ReadAhead):
            batches.read(count)
