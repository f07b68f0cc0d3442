"""The backward pass of RMSNorm, which only a torch built with CUDA asks of the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def register() -> torch.library.Library:
    """Register the operation for the device, as long as the result is kept."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm_backward", _backward, "CUDA")
    return library


def _backward(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of rows [..., h] and of the weight [h], computed in fp32."""
    assert len(normalized_shape) == 1, "only rows are normalized"
    normed = x.float() * rstd.float()
    grad = grad_out.float()
    scaled = grad if weight is None else grad * weight.float()
    along = (scaled * normed).mean(-1, keepdim=True)
    grad_x = ((scaled - normed * along) * rstd.float()).to(x.dtype)
    if weight is None:
        return grad_x, None
    return grad_x, (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
