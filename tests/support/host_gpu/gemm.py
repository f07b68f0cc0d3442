"""GEMMs of a GPU that the CPU does not have: fp8 with a scale per block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType


def register() -> torch.library.Library:
    """Register the GEMMs for the device, as long as the result is kept."""
    library = torch.library.Library("aten", "IMPL")
    for end in ("", ".out"):
        library.impl(f"_scaled_mm_v2{end}", _scaled_mm_of_hopper, "CUDA")
    return library


def _scaled_mm_of_hopper(*args: Any, **options: Any) -> Tensor:
    if int(ScalingType.BlockWise1x32.value) in args[3]:
        raise NotImplementedError("only a Blackwell GPU has scales of 1 x 32")
    return scaled_mm_v2(*args, **options)


def scaled_mm_v2(
    a: Tensor,
    b: Tensor,
    scale_a: list[Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    bias: None,
    out_dtype: torch.dtype,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Compute ``torch._scaled_mm_v2`` of fp8 matrices with a scale per block, [m, k] x [k, n].

    Sizes, strides and dtypes are checked by torch's own implementation for meta tensors.
    """
    meta = [[t.to("meta") for t in tensors] for tensors in ([a, b], scale_a, scale_b)]
    torch.ops.aten._scaled_mm_v2(
        *(*meta[0], meta[1], recipe_a, swizzle_a, meta[2], recipe_b, swizzle_b),
        *(bias, out_dtype, contraction_dim, use_fast_accum),
    )
    assert torch.float8_e4m3fn in (a.dtype, b.dtype), "cuBLAS has no product of e5m2 and e5m2"
    assert a.stride(1) == 1, "rows of adjacent values"
    assert b.stride(0) == 1, "columns of adjacent values"
    left = a.float() * _of_values(scale_a[0], recipe_a[0], *a.shape)
    right = b.t().float() * _of_values(scale_b[0], recipe_b[0], *b.t().shape)
    y = (left.double() @ right.double().t()).to(out_dtype)
    return y if out is None else out.copy_(y)


def _of_values(scale: Tensor, recipe: int, rows: int, columns: int) -> Tensor:
    """Return the scale of each value [rows, columns]."""
    r = torch.arange(rows, device=scale.device)[:, None]
    c = torch.arange(columns, device=scale.device)[None, :]
    if recipe == ScalingType.BlockWise1x128.value:
        return scale[r, c // 128]
    if recipe == ScalingType.BlockWise128x128.value:
        return scale[c // 128, r // 128]
    assert recipe == ScalingType.BlockWise1x32.value
    c = c // 32
    tiles = -(-columns // 128)  # of 4 scales, across
    place = (r // 128 * tiles + c // 4) * 512 + r % 32 * 16 + r // 32 % 4 * 4 + c % 4
    exponents = scale.flatten().view(torch.uint8)[place].to(torch.int32)
    return torch.where(exponents == 255, torch.nan, torch.exp2((exponents - 127).float()))
