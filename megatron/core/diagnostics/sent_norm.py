"""The gradient norm of a pass on its way to the host, with the ranks' requests after the pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.device.async_host_copy import AsyncHostCopy
from megatron.core.diagnostics.suspect_result import Request


class SentNorm(NamedTuple):
    """Squared gradient norm, and where the ranks agree their largest request, sent to the host."""

    accepted: Tensor  # truth value on the device: finite, and no rank asks for another pass
    values: AsyncHostCopy

    def read(self) -> tuple[float, int | None]:
        """Return squared norm and request; blocks the host until the device has computed them."""
        squares, *request = self.values.get_floats()
        return squares, int(request[0]) if request else None


def send_norm(squares: Tensor, own: Request, *, is_checked: bool, agrees: bool) -> SentNorm:
    """Start to copy ``squares`` (fp64 scalar) to the host.

    ``own``: what this rank asks for.  With ``agrees`` collective over all ranks, which agree on
    their largest request; a norm that is not finite on some rank then counts as a request if
    ``is_checked``.
    """
    values = squares.view(1)
    # Infinity minus infinity is NaN: fewer kernels than those of isfinite().
    is_finite = squares - squares == 0.0
    if not agrees:
        if own != Request.GO_ON:
            is_finite = torch.zeros_like(is_finite)
        return SentNorm(is_finite, AsyncHostCopy(values))
    requests = torch.full_like(squares, float(own))
    if is_checked:
        bad = max(own, float(Request.RERUN_SHARED))
        requests = torch.where(is_finite, requests, bad)
    dist.all_reduce(requests, dist.ReduceOp.MAX)
    accepted = is_finite & (requests == float(Request.GO_ON))
    return SentNorm(accepted, AsyncHostCopy(torch.cat([values, requests.view(1)])))
