"""Rotary embedding of heads: one read with any strides, one write."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.device import cpu_kernels


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int) -> Tensor:
    """Rotate [s, b, n, d] (last dim contiguous) by angles [s, 1 or b, 1, r/2] -> [s, b, n, d]."""
    tokens, sequences, heads, width = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    angles, by_sequence = cos.shape[-1], cos.shape[1] > 1
    tables = [table.to(x.dtype).contiguous() for table in (cos, sin)]
    cpu_kernels.run(
        "rotate",
        [x, *tables, out],
        format=x.dtype,
        sizes=(sequences, heads, width, angles, *x.stride()[:3], by_sequence, interleaved),
        numbers=(sign,),
        count=tokens * sequences,
        width=heads * width,
    )
    return out
