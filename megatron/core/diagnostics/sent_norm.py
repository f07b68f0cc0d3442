"""The gradient norm of a pass on its way to the host, with the ranks' requests after the pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.device.async_host_copy import AsyncHostCopy
from megatron.core.diagnostics.suspect_result import Request


class ReadNorm(NamedTuple):
    """Values of a `SentNorm` on the host."""

    squares: float
    request: int | None  # the largest one of all ranks, where they have agreed
    losses: list[float]


class SentNorm(NamedTuple):
    """Squared gradient norm, the ranks' largest request and losses, on their way to the host."""

    accepted: Tensor  # truth value on the device: finite, and no rank asks for another pass
    values: AsyncHostCopy
    is_agreed: bool  # whether the values contain the largest request

    def read(self) -> ReadNorm:
        """Return the values; blocks the host until the device has computed them."""
        squares, *losses = self.values.get_floats()
        request = int(losses.pop()) if self.is_agreed else None
        return ReadNorm(squares, request, losses)


def send_norm(
    squares: Tensor, losses: Sequence[Tensor], own: Request, *, is_checked: bool, agrees: bool
) -> SentNorm:
    """Start to copy ``squares`` (fp64 scalar) and ``losses`` (scalars) to the host.

    ``own``: what this rank asks for.  With ``agrees`` collective over all ranks, which agree on
    their largest request; a value that is not finite on some rank then counts as a request if
    ``is_checked``.
    """
    values = torch.cat([v.view(1) for v in (squares, *losses)]) if losses else squares.view(1)
    # Infinity minus infinity is NaN: fewer kernels than those of isfinite().
    is_finite = (values - values).sum() == 0.0
    if not agrees:
        if own != Request.GO_ON:
            is_finite = torch.zeros_like(is_finite)
        return SentNorm(is_finite, AsyncHostCopy(values), is_agreed=False)
    requests = torch.full_like(squares, float(own))
    if is_checked:
        bad = max(own, float(Request.RERUN_SHARED))
        requests = torch.where(is_finite, requests, bad)
    dist.all_reduce(requests, dist.ReduceOp.MAX)
    accepted = is_finite & (requests == float(Request.GO_ON))
    sent = torch.cat([values, requests.view(1)])
    return SentNorm(accepted, AsyncHostCopy(sent), is_agreed=True)
