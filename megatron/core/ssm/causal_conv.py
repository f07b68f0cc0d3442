"""Causal depthwise convolution along the sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.autograd import Context, Function


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    before: Tensor | None = None,
    sequence: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve x [s, b, c] with weight [c, 1, w], add bias [c] and apply SiLU.

    Returns [s, b, c] and the last w - 1 inputs, which are ``before`` [w - 1, b, c] (default: zeros)
    of the next call in generation.  ``sequence`` [s]: index of each token's packed sequence; the
    convolution does not mix sequences.
    """
    width = weight.shape[-1]
    if before is None:
        before = x.new_zeros(width - 1, *x.shape[1:])
    inputs = torch.cat([before.to(x.dtype), x])
    if sequence is not None:  # the inputs in ``before`` belong to the first sequence
        sequence = torch.cat([sequence[:1].expand(width - 1), sequence])
    return F.silu(_Conv.apply(inputs, weight, bias, sequence)), inputs[x.shape[0] :]


class _Conv(Function[Tensor]):
    """Convolution [w - 1 + s, b, c] -> [s, b, c]: sums shifted views of the inputs, no copies."""

    @staticmethod
    def forward(
        ctx: Context[None], inputs: Tensor, weight: Tensor, bias: Tensor, sequence: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight, sequence)
        last = weight.shape[-1] - 1
        y = torch.addcmul(bias, inputs[last:], weight[:, 0, last])
        for tap in range(last):
            seen = inputs[tap : tap + len(y)]
            y.addcmul_(_visible(seen, sequence, tap, last), weight[:, 0, tap])
        return y

    @staticmethod
    def backward(ctx: Context[None], grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, sequence = ctx.saved_tensors
        last = weight.shape[-1] - 1
        d_inputs, d_weight = torch.zeros_like(inputs), torch.empty_like(weight)
        for tap in range(last + 1):
            at, arrived = slice(tap, tap + len(grad)), _visible(grad, sequence, tap, last)
            d_inputs[at].addcmul_(arrived, weight[:, 0, tap])
            d_weight[:, 0, tap] = (arrived * inputs[at]).flatten(0, 1).sum(0)
        return d_inputs, d_weight, grad.flatten(0, 1).sum(0), None


def _visible(x: Tensor, sequence: Tensor | None, tap: int, last: int) -> Tensor:
    """Return ``x`` [s, b, c] with zeros where a token's input ``tap`` is of another sequence."""
    if sequence is None or tap == last:
        return x
    return x.masked_fill((sequence[tap : tap + len(x)] != sequence[last:])[:, None, None], 0)
