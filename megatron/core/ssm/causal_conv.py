"""A convolution along the sequence, each channel by itself, that sees no later token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    before: Tensor | None = None,
    sequence: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x [s, b, c], weight [c, 1, w], bias [c] -> y [s, b, c] and the last w - 1 inputs.

    ``before`` [w - 1, b, c] are the inputs that came before (default: zeros).  Tokens of different
    packed sequences (``sequence`` [s], the index of each) do not see each other.
    """
    width, s = weight.shape[-1], x.shape[0]
    taps = weight.squeeze(1).unbind(1)
    if before is None:
        before = x.new_zeros(width - 1, *x.shape[1:])
    inputs = torch.cat([before.to(x.dtype), x])
    if sequence is not None:  # what came before belongs to the first sequence
        sequence = torch.cat([sequence[:1].expand(width - 1), sequence])
    y = torch.addcmul(bias, x, taps[-1])
    for back in range(1, width):
        at = slice(width - 1 - back, width - 1 - back + s)
        seen = inputs[at]
        if sequence is not None:
            seen = seen.masked_fill((sequence[at] != sequence[width - 1 :])[:, None, None], 0)
        y = torch.addcmul(y, seen, taps[-1 - back])
    return F.silu(y), inputs[s:]
