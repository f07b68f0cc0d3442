"""A convolution along the sequence, each channel by itself, that sees no later token."""

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
    """x [s, b, c], weight [c, 1, w], bias [c] -> silu(y) [s, b, c] and the last w - 1 inputs.

    ``before`` [w - 1, b, c] are the inputs that came before (default: zeros).  Tokens of different
    packed sequences (``sequence`` [s], the index of each) do not see each other.
    """
    width = weight.shape[-1]
    if before is None:
        before = x.new_zeros(width - 1, *x.shape[1:])
    inputs = torch.cat([before.to(x.dtype), x])
    if sequence is not None:  # what came before belongs to the first sequence
        sequence = torch.cat([sequence[:1].expand(width - 1), sequence])
    return F.silu(_Conv.apply(inputs, weight, bias, sequence)), inputs[x.shape[0] :]


class _Conv(Function[Tensor]):
    """Inputs [w - 1 + s, b, c] -> [s, b, c]: sums of shifted inputs, with no copy of a shift."""

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
    """``x`` [s, b, c], zero where input ``tap`` of a token belongs to another sequence than it."""
    if sequence is None or tap == last:
        return x
    return x.masked_fill((sequence[tap : tap + len(x)] != sequence[last:])[:, None, None], 0)
