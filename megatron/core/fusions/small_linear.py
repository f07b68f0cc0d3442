"""Linear layers of generation, y = x W^T + b: few rows are limited by the bandwidth of memory.

``m`` rows, ``k`` inputs, ``n`` outputs.  W is float32, bfloat16, or int8 with a scale for each
`GROUP` columns of a row; activations and sums are float32.  With the compiled kernel of a CPU, and
with that of a GPU for a W of the dtype of x, the bits of a row do not depend on m; the plain form
does not promise that.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.device import cpu_kernels
from megatron.core.fusions import kernels
from megatron.core.low_precision import Scaled, largest

GROUP = 128  # columns that share a scale
_LARGEST = 127  # code
_TASK_BYTES = 1 << 18  # of W, per task of a thread
_TASKS = 4  # per thread, at most
_TILE = 4  # rows of W that the kernel reads at once
_DTYPES = (torch.float32, torch.bfloat16)

Weight: TypeAlias = Tensor | Scaled


def quantize_weight(weight: Tensor) -> Scaled:
    """Round a weight [n, k] to int8 codes with one float32 scale for each `GROUP` columns.

    A weight with NaN or infinity gives scales that are not finite.
    """
    block = (1, GROUP)
    amax = largest(weight.float(), block)
    scale = torch.where(amax == 0, 1.0, amax / _LARGEST)
    wide = scale.repeat_interleave(GROUP, 1)[:, : weight.shape[1]]
    return Scaled((weight.float() / wide).round().to(torch.int8), scale, block)


def small_linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Compute [..., k] -> [..., n] in the dtype of x.  No gradient."""
    codes = weight.codes if isinstance(weight, Scaled) else weight
    scales = weight.scale if isinstance(weight, Scaled) else None
    if not _has_kernel(x, codes):
        if (
            scales is None
            and x.dtype == codes.dtype
            and (fused := kernels.find("matmul", x, codes))
        ):
            y: Tensor = fused.linear(x.detach().flatten(0, -2), codes, bias)
            return y.view(*x.shape[:-1], len(codes))
        values = weight.values(torch.float32) if isinstance(weight, Scaled) else weight
        return F.linear(x, values.to(x.dtype), None if bias is None else bias.to(x.dtype))
    wide = x.to(torch.float32).contiguous()
    (outputs, width) = codes.shape
    out = wide.new_empty(*x.shape[:-1], outputs)
    rows = max(1, _TASK_BYTES // max(1, width * codes.element_size()) // _TILE) * _TILE
    # Each task copies its inputs, so at most a few tasks per thread.
    rows = max(rows, -(-outputs // (_TASKS * torch.get_num_threads() * _TILE)) * _TILE)
    cpu_kernels.run(
        "small_linear",
        [wide, codes, scales, None if bias is None else bias.to(torch.float32), out],
        format=codes.dtype,
        sizes=(out.numel() // outputs, outputs, width, max(1, width if scales is None else GROUP)),
        count=outputs,
        grain=rows,
    )
    return out.to(x.dtype)


def _has_kernel(x: Tensor, codes: Tensor) -> bool:
    return (
        x.dtype in _DTYPES
        and codes.is_contiguous()
        and x.shape[-1] == codes.shape[1]
        and cpu_kernels.take(x)
        and codes.device == x.device
        and cpu_kernels.has("small_linear", codes.dtype)
    )
