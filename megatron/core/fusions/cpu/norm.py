"""LayerNorm and RMSNorm over rows [..., h]; float32 statistics and x are saved for backward.

Gradients of weight and bias are summed within blocks of rows, then over the blocks in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.autograd import Context, Function
from megatron.core.device import cpu_kernels

_ROWS, _PIECES = 16, 64  # at least so many rows in a piece, at most so many pieces


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise [..., h], contiguous, with weight [h]; an RMSNorm if there is no bias."""
    return _Norm.apply(x, weight, bias, eps)


class _Norm(Function[Tensor]):
    @staticmethod
    def forward(
        ctx: Context[None], x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        out, width = torch.empty_like(x), x.shape[-1]
        rows = x.numel() // width
        scale = x.new_empty(rows, dtype=torch.float32)
        mean = None if bias is None else torch.empty_like(scale)
        cpu_kernels.run(
            "rms_norm" if bias is None else "layer_norm",
            [x, weight, bias, out, mean, scale],
            format=x.dtype,
            sizes=(width,),
            numbers=(eps,),
            count=rows,
            width=width,
        )
        ctx.save_for_backward(x, weight, scale, *([] if mean is None else [mean]))
        return out

    @staticmethod
    def backward(ctx: Context[None], grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, *means = ctx.saved_tensors
        mean = means[0] if means else None
        grad, rows, width = grad.contiguous(), len(scale), x.shape[-1]
        out = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        piece = max(_ROWS, -(-rows // _PIECES))
        pieces = -(-rows // piece)
        sums = [x.new_empty(pieces, width, dtype=torch.float32)]
        if mean is not None:
            sums.append(torch.empty_like(sums[0]))
        cpu_kernels.run(
            "rms_norm_backward" if mean is None else "layer_norm_backward",
            [x, weight, mean, scale, grad, out, *sums, *([None] if mean is None else [])],
            format=x.dtype,
            sizes=(width, piece),
            count=rows,
            grain=piece,
        )
        totals: list[Tensor | None] = [torch.empty_like(weight) for _ in sums]
        for part, total in zip(sums, totals, strict=True):
            tensors = [part, total]
            sizes = (width, pieces)
            cpu_kernels.run("sum_of_pieces", tensors, format=x.dtype, count=width, sizes=sizes)
        return out, totals[0], None if mean is None else totals[1], None
