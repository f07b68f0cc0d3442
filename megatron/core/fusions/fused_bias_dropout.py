"""residual + dropout(x + bias), the addition to the residual stream after a sub-layer.

On a GPU the norm that reads the sum computes it: `rms_norm.norm_rows_of_sum`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

BiasDropoutAdd = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def get_bias_dropout_add(training: bool, fused: bool) -> BiasDropoutAdd:
    """Return the function of (x, bias), residual and probability, in the dtype of the residual.

    ``fused`` is ignored: `ResidualLayer` decides whether a norm computes the sum.
    """
    del fused

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        x, bias = x_with_bias
        if bias is not None:
            x = x + bias
        if training and prob > 0.0:
            x = F.dropout(x, p=prob)
        return residual + x.to(residual.dtype)

    return add
