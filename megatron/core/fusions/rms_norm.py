"""x / rms(x) * weight with float32 statistics; only the input is saved for backward.

``h`` is the width.  On a GPU torch has its own kernel, and ours adds to the residual stream before
the norm; on a CPU torch's formula saves three tensors of the input's size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import device
from megatron.core.autograd import Context, Function
from megatron.core.device import cpu_kernels
from megatron.core.fusions import kernels
from megatron.core.fusions.cpu import ops

# A program of a GPU has a row in its registers; a narrow one would leave it too little to do.
_WIDTHS = range(512, 8193)


class _RMSNorm(Function[Tensor]):
    @staticmethod
    def forward(ctx: Context[None], x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # Converted first: torch is several times slower where the operands' dtypes differ.
        dtype = torch.promote_types(x.dtype, torch.float32)
        wide = x.to(dtype)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.rsqrt(length.square_().div_(x.shape[-1]).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight.to(dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Context[None], grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        grad, wide_weight = grad.to(scale.dtype), weight.to(scale.dtype)
        normed = x.to(scale.dtype) * scale
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (normed * grad).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            through = grad * wide_weight
            along = (normed * through).mean(-1, keepdim=True)
            grad_x = torch.addcmul(through, normed, along, value=-1).mul_(scale).to(x.dtype)
        return grad_x, grad_weight, None


def norm_rows(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalize rows [..., h] with weight and bias [h]: LayerNorm with a bias, else RMSNorm."""
    # For other shapes torch reports the error; torch's LayerNorm is as fast in float32.
    fits = x.is_contiguous() and weight.shape == x.shape[-1:]
    is_wanted = bias is None or x.dtype == torch.bfloat16
    if fits and is_wanted and cpu_kernels.take(x, weight, bias):
        return ops.norm(x, weight, bias, eps)
    if bias is not None:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    if device.is_cuda(x.device):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return _RMSNorm.apply(x, weight, eps)


def adds_in_norm(x: Tensor, bias: Tensor | None, residual: Tensor) -> bool:
    """Return whether `norm_rows_of_sum` takes residual + x + bias: contiguous rows on a GPU."""
    shape = x.shape
    fits = shape == residual.shape and x.is_contiguous() and residual.is_contiguous()
    can = fits and shape[-1] in _WIDTHS
    return can and kernels.find("norm", x, bias, residual) is not None


def adds_bias_in_norm(width: int, like: Tensor) -> bool:
    """Return whether `norm_rows_of_sum` takes rows of ``width`` in the dtype of ``like``.

    A GEMM adds a bias for free, but the kernel of the norm also sums the gradient of the bias, for
    which torch reads the gradient of the GEMM's output again.
    """
    return width in _WIDTHS and kernels.is_available("norm", like)


def norm_rows_of_sum(
    x_with_bias: tuple[Tensor, Tensor | None],
    residual: Tensor,
    prob: float,
    parameters: tuple[Tensor | None, Tensor | None] = (None, None),
    eps: float = 0.0,
) -> tuple[Tensor, Any]:
    """Return residual + dropout(x + bias), and its norm in the dtype of ``parameters``.

    ``parameters``: weight and bias [h] as `norm_rows` takes them; without a weight the norm is
    None.  See `adds_in_norm`.
    """
    x, bias = x_with_bias
    fused = kernels.find("norm", x)
    assert fused is not None, "adds_in_norm tells whether there is a kernel"
    both: tuple[Tensor, Any] = fused.norm_of_sum(x, bias, residual, prob, parameters, eps)
    return both


def norm_rows_alike(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalize as `norm_rows` does, on a CPU always by the compiled kernel if there is one.

    So the bits of a row do not depend on the others, and a pass can be recorded.  In training
    torch's LayerNorm is as fast, and it needs no copy of rows that are not contiguous.
    """
    if weight.shape == x.shape[-1:] and cpu_kernels.take(x, weight, bias):
        return ops.norm(x.contiguous(), weight, bias, eps)
    return norm_rows(x, weight, bias, eps)
