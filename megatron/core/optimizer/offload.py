"""Parameters whose main values, state and update lie in host memory (--optimizer-cpu-offload).

Their summed gradients are copied there, the update runs on the CPU, and the result is copied back.
With --overlap-cpu-optimizer-d2h-h2d all copies go along a stream of their own: gradients travel
while the norm is taken, and while some parameters are updated, others are on their way.  On a CPU
there is no other memory, and nothing of this happens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from megatron.core import device
from megatron.core.optimizer.optimizer_config import OptimizerConfig

# Elements that are updated at once while others travel.
_BATCH = 2**24


def chosen(numels: Sequence[int], fraction: float) -> list[bool]:
    """Which of the parameters, in their order, lie on the host: as many as make up ``fraction``.

    >>> chosen([4, 4, 1, 1], 0.5)
    [True, False, True, False]
    """
    left, answers = sum(numels) * fraction, []
    for numel in numels:
        answers.append(numel <= left)
        left -= numel if numel <= left else 0
    return answers


class HostBufferSlot:
    """Host memory for one parameter: its main values, its gradient, what is copied back."""

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
        """Start to copy the gradient, on the present stream."""
        self.grad.copy_(grad, non_blocking=True)
        self.main.grad = self.grad
        self._has_come = device.record_event()

    def wait(self) -> None:
        """Until the gradient is here."""
        device.wait_for(self._has_come)

    def give_back(self, model: Tensor, *, is_rounded: bool) -> None:
        """Start to copy the updated values, ``is_rounded`` already, on the present stream."""
        if not is_rounded:
            self.result.copy_(self.main)
        model.copy_(self.result, non_blocking=True)


def batches(
    places: Sequence[HostBufferSlot], *, is_overlapped: bool
) -> Iterator[Sequence[HostBufferSlot]]:
    """What is updated at once."""
    begin = numel = 0
    for end, place in enumerate(places, start=1):
        numel += place.main.numel()
        if is_overlapped and numel >= _BATCH:
            yield places[begin:end]
            begin, numel = end, 0
    if begin < len(places):
        yield places[begin:]
