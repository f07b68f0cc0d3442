"""What the first layers of a stack keep for backward waits in host memory (--cpu-offloading).

A layer's saved tensors are copied out while it computes, on a stream of their own; their memory on
the device is free once the layer behind it has run.  They come back while backward is in the layer
behind it.  So the device holds those of two layers at a time, and waits for a copy only where a
layer computes for a shorter time than its tensors travel.

Parameters, what all layers share, and small tensors stay.  A storage that is saved twice, under
several shapes or by two layers in a row, travels once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core import device
from megatron.core.transformer.cuda_graphs.capture import Shared, shared_tensors

MIN_BYTES = 1 << 20  # smaller storages are not worth a copy


class _Away:
    """The bytes of a storage: on the device until `leave`, and from `come_back` on."""

    def __init__(self, tensor: Tensor, stream: device.Stream | None) -> None:
        self._stream = stream
        self._came: device.Event | None = None
        self._here: Tensor | None = _bytes_of(tensor)
        self.num_bytes = self._here.numel()
        self._there: Tensor | None = None
        if not tensor.is_meta:  # a plan counts what the device holds
            device.wait_stream(stream)
            with device.on_stream(stream):
                self._there = device.host_like(self._here, torch.uint8, pin=True)
                self._there.copy_(self._here, non_blocking=True)
                self._left = device.record_event()

    def leave(self) -> None:
        """Let the device's memory be used again, by what is queued from now on."""
        if self._there is not None:
            device.wait_event(self._left)
        self._here = None

    def come_back(self) -> None:
        """Start to copy, unless it has been started."""
        if self._here is not None:
            return
        # Allocated on the stream that uses and frees it.
        here = torch.empty(self.num_bytes, dtype=torch.uint8, device=device.current())
        if self._there is not None:
            device.wait_stream(self._stream)
            with device.on_stream(self._stream):
                here.copy_(self._there, non_blocking=True)
                self._came = device.record_event()
        self._here = here

    def storage(self) -> torch.UntypedStorage:
        """Where the bytes are once the present stream is here."""
        self.come_back()
        device.wait_event(self._came)
        assert self._here is not None, "it has come back"
        return self._here.untyped_storage()


class _Saved(NamedTuple):
    """A tensor whose storage is away."""

    away: _Away
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        """As it was saved."""
        storage = self.away.storage()
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.size, self.stride
        )


class _Pass:
    """One micro-batch on its way through a stack."""

    def __init__(self, staying: Iterable[Tensor], stream: device.Stream | None) -> None:
        self._staying = {t.untyped_storage()._cdata for t in staying}
        self._stream = stream
        self._layers: list[list[_Away]] = []
        self._leaving: dict[tuple[int, int], _Away] = {}  # by storage, which it keeps alive
        self.num_bytes = 0

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The context in which the next layer runs."""
        self._layers.append([])
        return torch.autograd.graph.saved_tensors_hooks(self._hold, _give)

    def leave(self, layer: int) -> None:
        """What ``layer`` has saved leaves the device."""
        gone = set(self._layers[layer])
        self._leaving = {k: away for k, away in self._leaving.items() if away not in gone}
        for away in gone:
            away.leave()

    def come_back(self, layers: Sequence[int], _: Tensor) -> None:
        """What ``layers`` have saved will be needed soon."""
        for layer in layers:
            for away in self._layers[layer]:
                away.come_back()
            self._layers[layer] = []  # autograd frees it once it is used

    def _hold(self, tensor: Tensor) -> Tensor | _Saved:
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < MIN_BYTES or storage._cdata in self._staying:
            return tensor
        key = storage._cdata, tensor._version  # bytes that were written to since are others
        away = self._leaving.get(key)
        if away is None:
            with torch.no_grad():
                away = self._leaving[key] = _Away(tensor, self._stream)
            self.num_bytes += away.num_bytes
        if away not in self._layers[-1]:
            self._layers[-1].append(away)
        offset = int(tensor.storage_offset())
        return _Saved(away, tensor.dtype, offset, tensor.shape, tensor.stride())


class ActivationOffload:
    """Runs a stack whose first ``num_layers`` layers keep nothing large on the device."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.num_bytes = 0  # that the last micro-batch sent away
        self._stream: device.Stream | None = None

    def run(self, layers: Iterable[nn.Module], hidden_states: Tensor, shared: Shared) -> Tensor:
        """All layers: [s, b, h] -> [s, b, h]."""
        self._stream = self._stream or device.side_stream()
        layers = list(layers)
        params = (p for layer in layers for p in layer.parameters())
        going = _Pass([*params, *shared_tensors(shared).values()], self._stream)
        last = len(layers) - 1
        for i, layer in enumerate(layers):
            if i < self.num_layers:
                with going.saving():
                    hidden_states, _ = layer(hidden_states, **shared)
            else:
                hidden_states, _ = layer(hidden_states, **shared)
            due = [j for j in ((i, i - 1) if i == last else (i - 1,)) if 0 <= j < self.num_layers]
            for j in reversed(due):
                going.leave(j)
            if due and hidden_states.requires_grad:
                hidden_states.register_hook(partial(going.come_back, due))
        self.num_bytes = going.num_bytes
        return hidden_states


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of ``tensor``."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _give(saved: Tensor | _Saved) -> Tensor:
    return saved.tensor() if isinstance(saved, _Saved) else saved
