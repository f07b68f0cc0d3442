"""Keys and values in 8 bits: rows of int8 codes, each followed by its float32 scale.

``N`` tokens, ``g`` key/value heads, ``d`` head dimension.  A row is the key or value of one token
and head, its scale the largest absolute value / 127.  So the bits of a row depend on its values
alone.  A cache is int8 [num_pages, page_size, g, d + SCALE_BYTES]; d is a multiple of 4, so that
scales are aligned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.device import cpu_kernels

SCALE_BYTES = 4
_LARGEST = 127  # code
_KERNEL = "quantize_rows"


def store_rows(cache: Tensor, rows: Tensor, at: Tensor) -> None:
    """Write ``rows`` [N, g, d] into ``cache`` at page * page_size + offset ``at`` [N], int64."""
    _, groups, width = rows.shape
    has_kernel = cpu_kernels.take(rows) and cpu_kernels.has(_KERNEL, rows.dtype)
    if not has_kernel or rows.stride(-1) != 1:
        cache.flatten(0, 1).index_copy_(0, at, encode(rows))
        return
    cpu_kernels.run(
        _KERNEL,
        [rows, cache, at],
        format=rows.dtype,
        sizes=(groups, width, *rows.stride()[:2], *cache.stride()[1:3]),
        count=len(rows) * groups,
        width=width,
    )


def encode(rows: Tensor) -> Tensor:
    """Quantise rows [.., d] -> int8 [.., d + SCALE_BYTES].

    A row with NaN or infinity decodes to NaN.
    """
    wide = rows.float()
    amax = wide.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, amax / _LARGEST)
    scale = scale.masked_fill(~scale.isfinite(), torch.nan)
    codes = (wide / scale).round().nan_to_num(0).to(torch.int8)
    return torch.cat([codes, scale.view(torch.int8)], -1)


def decode(rows: Tensor) -> Tensor:
    """Return the values of encoded rows in float32: [.., d + SCALE_BYTES] -> [.., d]."""
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return rows[..., :-SCALE_BYTES].float() * scale
