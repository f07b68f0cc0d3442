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
from megatron.core.rerun_state_machine import RerunStateMachine, get_rerun_state_machine

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
    so that the device has work while the host waits for it.  With ``defers`` the losses stay on the
    device, in ``losses``, and the host does not wait: see `MegatronOptimizer.queue_step`.
    """

    def __init__(
        self,
        machine: RerunStateMachine | None = None,
        *,
        for_nan: bool = True,
        for_spikes: bool = False,
        defers: bool = False,
    ) -> None:
        self._machine = machine or get_rerun_state_machine()
        self._defers = defers
        self.losses: list[Tensor] = []  # with ``defers``: one fp32 scalar per call
        self._microbatches: list[int] = []
        self._for_nan = for_nan
        self._for_spikes = for_spikes
        self._last: tuple[AsyncHostCopy, int] | None = None

    def __call__(self, loss: Tensor, microbatch: int) -> None:
        value = loss.detach().float().sum()
        if self._defers:
            self.losses.append(value)
            self._microbatches.append(microbatch)
            return
        self.check()
        self._last = AsyncHostCopy(value), microbatch

    def check(self) -> None:
        """Check the last loss.  Blocks the host until the device has computed it."""
        if self._last is None:
            return
        (read, microbatch) = self._last
        self._last = None
        self._validate(read.get(), microbatch)

    def forget(self) -> None:
        """Forget the losses, of a pass that does not count."""
        self.losses.clear()
        self._microbatches.clear()

    def check_deferred(self, values: Sequence[float]) -> None:
        """Check the values of ``losses``."""
        for value, microbatch in zip(values, self._microbatches, strict=True):
            self._validate(value, microbatch)

    def _validate(self, value: float, microbatch: int) -> None:
        # A deferred pass validates its losses at its end, others in between: a loss function that
        # validates too, with the same message, then has other numbers of calls before them.
        where = f" of micro-batch {microbatch}"
        validate = self._machine.validate_result
        if self._for_nan:
            validate(value, math.isnan, f"found NaN in {_LOSS}", where=where)
            validate(value, math.isinf, f"found Inf in {_LOSS}", where=where)
        if self._for_spikes:
            is_spike = partial(
                self._machine.is_unexpectedly_large, threshold=SPIKE_FACTOR, context="loss"
            )
            validate(value, is_spike, "Spiky loss", fatal=False, where=where)


class GradientCheck:
    """Check of this rank's gradients, before the reduction over data-parallel ranks.

    ``for_large``: also warn of a norm that is at least LARGE_GRADIENT_FACTOR times the largest of
    the first ones.  Collects one value per bucket, a norm or else a sum, without blocking the host.

    With ``defers`` a call of `validate` does nothing but keep the value for `check_deferred`.
    """

    def __init__(self, *, for_nan: bool, for_large: bool) -> None:
        self.for_nan = for_nan
        self.for_large = for_large
        self.defers = False
        self._unread: list[tuple[AsyncHostCopy, int]] = []

    def read(self, grads: Sequence[Tensor]) -> AsyncHostCopy | None:
        """Start to copy the value of ``grads`` to the host; it is not finite if any of them is."""
        if not grads or grads[0].is_meta:
            return None
        if not self.for_large:
            sums = [grad.sum(dtype=torch.float32) for grad in grads]
            return AsyncHostCopy(sums[0] if len(sums) == 1 else torch.stack(sums).sum())
        norms = torch._foreach_norm(list(grads), 2, torch.float32)
        return AsyncHostCopy(torch.linalg.vector_norm(torch.stack(norms)))

    def validate(
        self, read: AsyncHostCopy, bucket: int, named_grads: Iterable[tuple[str, Tensor]]
    ) -> None:
        """Validate the value of a bucket, whose gradients are ``named_grads``.

        Blocks the host until the device has computed the value.
        """
        if self.defers:
            self._unread.append((read, bucket))
            return
        value = read.get()
        machine = get_rerun_state_machine()
        where = _place(bucket)
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
            machine.validate_result(
                value, is_large, f"found unexpected large grads in {where}", fatal=False
            )

    def take_deferred(self) -> list[tuple[AsyncHostCopy, int]]:
        """Return the values and numbers of the buckets that are not validated yet; forget them."""
        unread = self._unread
        self._unread = []
        return unread

    @staticmethod
    def check_deferred(unread: Iterable[tuple[AsyncHostCopy, int]]) -> None:
        """Validate the values of `take_deferred`, of a step whose gradient norm is not finite.

        The gradients are gone, so that the message cannot name them.
        """
        machine = get_rerun_state_machine()
        for read, bucket in unread:
            machine.validate_result(
                read.get(),
                lambda value: not math.isfinite(value),
                f"{_GRADIENTS} {_place(bucket)}",
            )


def _place(bucket: int) -> str:
    return f"bucket #{bucket} in backward pass before data-parallel communication collective"


def non_finite_gradients(named_grads: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return a message that names this rank and its NaN or infinite gradients, or None."""
    names = [name for name, grad in named_grads if not torch.isfinite(grad).all()]
    if not names:
        return None
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"rank {_rank()} has a NaN or infinite gradient in {', '.join(names[:3])}{more}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
