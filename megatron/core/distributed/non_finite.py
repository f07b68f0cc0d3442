"""Where a NaN or an infinity was met: which step, which rank, which tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.config.errors import NonFiniteError


@contextmanager
def naming_step(step: int) -> Iterator[None]:
    """Prefix the message of a NonFiniteError raised inside with the number of the step."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"step {step}: {error}") from error


def require_finite_loss(loss: Tensor, microbatch: int) -> None:
    """Raise NonFiniteError when ``loss`` is not finite.  Waits for the device."""
    if not torch.isfinite(loss).all():
        raise NonFiniteError(
            f"rank {_rank()} has a loss of {loss.detach().float().sum().item()} "
            f"in micro-batch {microbatch}"
        )


def non_finite_gradients(named_grads: Iterable[tuple[str, Tensor]]) -> str | None:
    """A sentence that names this rank and its NaN or infinite gradients; None if it has none."""
    names = [name for name, grad in named_grads if not torch.isfinite(grad).all()]
    if not names:
        return None
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"rank {_rank()} has a NaN or infinite gradient in {', '.join(names[:3])}{more}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
