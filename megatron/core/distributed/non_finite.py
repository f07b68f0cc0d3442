"""Check losses and gradients for NaN and infinity; report the step, the rank and the tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.config.errors import NonFiniteError
from megatron.core.device.async_host_copy import AsyncHostCopy


@contextmanager
def naming_step(step: int) -> Iterator[None]:
    """Prefix the message of a NonFiniteError raised inside with the number of the step."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"step {step}: {error}") from error


class FiniteLosses:
    """Check of the losses of a step, called with one after the other; raises NonFiniteError.

    A call checks the loss of the previous call, so that the host does not wait for the device.
    """

    def __init__(self) -> None:
        self._last: tuple[AsyncHostCopy, int] | None = None

    def __call__(self, loss: Tensor, microbatch: int) -> None:
        self.check()
        self._last = AsyncHostCopy(loss.detach().float().sum()), microbatch

    def check(self) -> None:
        """Check the last loss.  Blocks the host until the device has computed it."""
        if self._last is not None:
            (read, microbatch), self._last = self._last, None
            value = read.get()
            if not math.isfinite(value):
                raise NonFiniteError(
                    f"rank {_rank()} has a loss of {value} in micro-batch {microbatch}"
                )


def non_finite_gradients(named_grads: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return a message that names this rank and its NaN or infinite gradients, or None."""
    names = [name for name, grad in named_grads if not torch.isfinite(grad).all()]
    if not names:
        return None
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"rank {_rank()} has a NaN or infinite gradient in {', '.join(names[:3])}{more}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
