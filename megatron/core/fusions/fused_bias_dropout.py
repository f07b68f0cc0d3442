"""residual + dropout(x + bias), the addition to the residual stream after a sub-layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from megatron.core.fusions import kernels

BiasDropoutAdd = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def bias_dropout_add(
    x_with_bias: tuple[Tensor, Tensor | None],
    residual: Tensor,
    prob: float,
    training: bool,
    *,
    fused: bool = True,
) -> Tensor:
    """Compute [..., h] -> [..., h] in the dtype of ``residual``; fused on a GPU only."""
    x, bias = x_with_bias
    prob = prob if training else 0.0
    # Else it is one operation of torch too.
    is_several = prob > 0.0 or bias is not None or x.dtype != residual.dtype
    are_alike = x.shape == residual.shape and x.is_contiguous() and residual.is_contiguous()
    can = fused and is_several and are_alike
    if can and (found := kernels.find("bias_dropout_add", x, bias, residual)):
        out: Tensor = found.bias_dropout_add(x, bias, residual, prob)
        return out
    if bias is not None:
        x = x + bias
    if prob > 0.0:
        x = F.dropout(x, p=prob)
    return residual + x.to(residual.dtype)


def get_bias_dropout_add(training: bool, fused: bool) -> BiasDropoutAdd:
    """Return the function of (x, bias), residual and probability."""
    return partial(bias_dropout_add, training=training, fused=fused)
