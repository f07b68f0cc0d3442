"""Offload main parameters, optimizer state and the update to the host (--optimizer-cpu-offload).

A step copies the reduced gradients to the host, updates there on the CPU, and copies the result
back into the model.  With --overlap-cpu-optimizer-d2h-h2d a side stream makes all copies: gradients
are copied while the device computes the gradient norm, and one batch of parameters is copied back
while the next one is updated.  On a CPU device nothing is offloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from megatron.core import device
from megatron.core.optimizer.optimizer_config import OptimizerConfig

# Elements per batch: one batch is updated while the previous one is copied back.
_BATCH = 2**24


def chosen(numels: Sequence[int], fraction: float) -> list[bool]:
    """Return for each parameter whether it is offloaded, given their numbers of elements.

    Goes through the parameters in order and offloads those that still fit into ``fraction`` of all
    elements.

    >>> chosen([4, 4, 1, 1], 0.5)
    [True, False, True, False]
    """
    left, answers = sum(numels) * fraction, []
    for numel in numels:
        answers.append(numel <= left)
        left -= numel if numel <= left else 0
    return answers


class HostBufferSlot:
    """Host buffers of one offloaded parameter.

    ``main``: the main parameter; ``grad``: the copy of its gradient; ``result``: the updated values
    in the model's dtype, which are copied back (``main`` itself if the dtypes are equal).
    """

    def __init__(self, model: Tensor, grad_dtype: torch.dtype, config: OptimizerConfig) -> None:
        dtype = torch.promote_types(model.dtype, torch.float32)
        self.main = nn.Parameter(device.host_like(model, dtype, pin=config.pin_cpu_params))
        self.main.grad_dtype = None
        self.main.data.copy_(model)
        self.grad = device.host_like(model, grad_dtype, pin=config.pin_cpu_grads)
        self.result = self.main.data
        if model.dtype != dtype:
            self.result = device.host_like(model, model.dtype, pin=config.pin_cpu_params)
        self._has_come: device.Event | None = None

    def fetch(self, grad: Tensor) -> None:
        """Start to copy the gradient to the host, on the current stream."""
        self.grad.copy_(grad, non_blocking=True)
        self.main.grad = self.grad
        self._has_come = device.record_event()

    def wait(self) -> None:
        """Block the host until the gradient has been copied."""
        device.wait_for(self._has_come)

    def give_back(self, model: Tensor, *, is_rounded: bool) -> None:
        """Start to copy the updated values into ``model``, on the current stream.

        ``is_rounded``: the update kernel has already written ``result`` in the model's dtype.
        """
        if not is_rounded:
            self.result.copy_(self.main)
        model.copy_(self.result, non_blocking=True)


def batches(
    places: Sequence[HostBufferSlot], *, is_overlapped: bool
) -> Iterator[Sequence[HostBufferSlot]]:
    """Yield the parameters in batches that are updated at once; one batch without overlap."""
    begin = numel = 0
    for end, place in enumerate(places, start=1):
        numel += place.main.numel()
        if is_overlapped and numel >= _BATCH:
            yield places[begin:end]
            begin, numel = end, 0
    if begin < len(places):
        yield places[begin:]
