"""Check losses and gradients for NaN, infinity and large values; report step, rank and tensor.

The rerun state machine of the rank decides what a rejected value causes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.config.errors import NonFiniteError
from megatron.core.device.async_host_copy import AsyncHostCopy
from megatron.core.rerun.state_machine import RerunStateMachine, get_rerun_state_machine

SPIKE_FACTOR = LARGE_GRADIENT_FACTOR = 10.0  # as in Megatron-LM
_LOSS = "local forward loss calculation"
_GRADIENTS = "found NaN in local grad norm for"


@contextmanager
def naming_step(step: int) -> Iterator[None]:
    """Prefix the message of a NonFiniteError raised inside with the number of the step."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"step {step}: {error}") from error


class LossCheck:
    """Check of the losses of a step, called with one after the other.

    ``for_nan``: reject a NaN or infinite loss; ``for_spikes``: warn of a loss that is at least
    SPIKE_FACTOR times the largest of the first ones.  A call checks the loss of the previous call,
    so that the device has work while the host waits for it.
    """

    def __init__(
        self,
        machine: RerunStateMachine | None = None,
        *,
        for_nan: bool = True,
        for_spikes: bool = False,
    ) -> None:
        self._machine = machine or get_rerun_state_machine()
        self._for_nan = for_nan
        self._for_spikes = for_spikes
        self._last: tuple[AsyncHostCopy, int] | None = None

    def __call__(self, loss: Tensor, microbatch: int) -> None:
        value = loss.detach().float().sum()
        self.check()
        self._last = AsyncHostCopy(value), microbatch

    def check(self) -> None:
        """Check the last loss.  Blocks the host until the device has computed it."""
        if self._last is None:
            return
        read, microbatch = self._last
        self._last = None
        value = read.get()
        validate = partial(
            self._machine.validate_result, value, where=f" of micro-batch {microbatch}"
        )
        if self._for_nan:
            validate(math.isnan, f"found NaN in {_LOSS}")
            validate(math.isinf, f"found Inf in {_LOSS}")
        if self._for_spikes:
            is_large = self._machine.is_unexpectedly_large
            is_spike = partial(is_large, threshold=SPIKE_FACTOR, context="loss")
            validate(is_spike, "Spiky loss", fatal=False)


class GradientCheck:
    """Check of this rank's gradients, before the reduction over data-parallel ranks.

    ``for_large``: also warn of a norm that is at least LARGE_GRADIENT_FACTOR times the largest of
    the first ones.  Collects one value per bucket, without blocking the host: its norm, or else the
    sum of its buffer.
    """

    def __init__(self, *, for_nan: bool, for_large: bool) -> None:
        self.for_nan = for_nan
        self.for_large = for_large

    def read(self, grads: Sequence[Tensor]) -> AsyncHostCopy | None:
        """Start to copy the value of ``grads`` to the host; it is not finite if any of them is."""
        if not grads or grads[0].is_meta:
            return None
        if not self.for_large:
            (buffer,) = grads
            return AsyncHostCopy(buffer.sum(dtype=torch.float32))
        norms = torch._foreach_norm(list(grads), 2, torch.float32)
        return AsyncHostCopy(torch.linalg.vector_norm(torch.stack(norms)))

    def validate(
        self, read: AsyncHostCopy, bucket: int, named_grads: Iterable[tuple[str, Tensor]]
    ) -> None:
        """Validate the value of a bucket, whose gradients are ``named_grads``.

        Blocks the host until the device has computed the value.
        """
        value = read.get()
        machine = get_rerun_state_machine()
        where = f"bucket #{bucket} in backward pass before data-parallel communication collective"
        culprits: str | None = None
        if not math.isfinite(value):
            culprits = non_finite_gradients(named_grads)
        if self.for_nan:
            machine.validate_result(
                value,
                lambda _: culprits is not None,  # None: only the sum of finite values overflows
                f"{_GRADIENTS} {where}",
                detail=lambda: f"; {culprits}",
            )
        if self.for_large:
            is_large = partial(
                machine.is_unexpectedly_large, threshold=LARGE_GRADIENT_FACTOR, context="grads"
            )
            message = f"found unexpected large grads in {where}"
            machine.validate_result(value, is_large, message, fatal=False)


def non_finite_gradients(named_grads: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return a message that names this rank and its NaN or infinite gradients, or None."""
    names = [name for name, grad in named_grads if not torch.isfinite(grad).all()]
    if not names:
        return None
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return f"rank {rank} has a NaN or infinite gradient in {', '.join(names[:3])}{more}"
