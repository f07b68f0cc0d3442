"""residual + dropout(x + bias), the seam between a sub-layer and the residual stream."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

BiasDropoutAdd = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def bias_dropout_add(
    x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float, training: bool
) -> Tensor:
    """[..., h] -> [..., h] in the dtype of ``residual``."""
    x, bias = x_with_bias
    if bias is not None:
        x = x + bias
    if training and prob > 0.0:
        x = F.dropout(x, p=prob)
    return residual + x.to(residual.dtype)


def get_bias_dropout_add(training: bool, fused: bool) -> BiasDropoutAdd:
    """The function of (x, bias), residual and probability; ``fused`` has no faster form here."""
    del fused
    return lambda x_with_bias, residual, prob: bias_dropout_add(
        x_with_bias, residual, prob, training
    )
