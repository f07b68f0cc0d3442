"""Prefetch micro-batches of the next step to the device while the current step computes.

Between two steps the host may wait for the gradient norm, and the device would then idle until the
next micro-batch has arrived.  Within a step the host runs ahead of the device, so reading costs no
time.  A step captured as one CUDA graph needs all its micro-batches at its start.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from megatron.core import device
from megatron.core.rerun.state_machine import RerunDataIterator


class ReadAhead(RerunDataIterator):
    """Iterator over ``batches`` that can read and copy some of them to the device in advance.

    It keeps micro-batches from the first `advance` on, so that an evaluation keeps none.
    """

    def __init__(self, batches: Iterator[Any], prefetches: bool = True) -> None:
        super().__init__(batches)
        self.prefetches = prefetches  # obeyed by `read_ahead`, which reads for the next step
        self._keeps = False
        self._batches = batches
        self._ahead: list[Any] = []
        self._stream: Any = None
        self._arrived: Any = None

    def _read_next(self) -> Any:
        if not self._ahead:
            return next(self._batches)
        device.wait_event(self._arrived)
        return self._ahead.pop(0)

    def first(self) -> Any:
        """Return the batch that `next` will return, without consuming it."""
        self.read()
        device.wait_event(self._arrived)
        return self._ahead[0]

    def read(self, count: int = 1) -> None:
        """Prefetch until ``count`` batches wait, or fewer at the end of the data.

        The copies to the device are asynchronous, on a side stream.
        """
        for batch in itertools.islice(self._batches, max(0, count - len(self._ahead))):
            self._ahead.append(self._sent(batch) if isinstance(batch, dict) else batch)

    def _sent(self, batch: dict[str, Any]) -> dict[str, Any]:
        self._stream = self._stream or device.side_stream()
        if self._stream is None:
            return batch
        # Allocate on the compute stream, which also uses and frees these tensors.
        tensors = {name: t for name, t in batch.items() if torch.is_tensor(t)}
        sent = {n: torch.empty_like(t, device=device.current()) for n, t in tensors.items()}
        device.wait_stream(self._stream)
        with device.on_stream(self._stream):
            for name, tensor in tensors.items():
                sent[name].copy_(tensor, non_blocking=True)
            self._arrived = device.record_event()
        return batch | sent


def read_ahead(data: Any, count: int = 1) -> None:
    """Prefetch ``count`` batches of the iterator of each model chunk.

    Iterators of any other type, which a user script supplied, are left alone.
    """
    for batches in data if isinstance(data, list) else [data]:
        if isinstance(batches, ReadAhead) and batches.prefetches:
            batches.read(count)
