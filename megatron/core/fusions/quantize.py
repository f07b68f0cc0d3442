"""`low_precision` with GPU kernels where they exist: quantization and matmuls."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from megatron.core import device, low_precision
from megatron.core.fusions import block_scaled_mm, kernels
from megatron.core.low_precision import E2M1, Block, FloatFormat, Scaled, largest


def quantize(
    x: Tensor,
    to: FloatFormat,
    block: Block | None = None,
    *,
    amax: Tensor | None = None,
    margin: int = 0,
    at_random: bool = False,
    turns: bool = False,
) -> Scaled:
    """Quantize ``x`` [r, c] to codes and scales, as `low_precision.quantize` does.

    ``turns``: the transposed matrix will be multiplied too, so a kernel also writes its codes; only
    with one scale.
    """
    if to is not E2M1 and (fused := _kernels(x)):
        if block is not None:
            codes, scale = fused.by_block(x, to.dtype, block)
            return Scaled(codes, scale, block)
        amax = largest(x) if amax is None else amax
        return _cast(fused, x, to, amax, margin, turns)[0]
    return low_precision.quantize(x, to, block, amax=amax, margin=margin, at_random=at_random)


def quantize_and_look(
    x: Tensor, to: FloatFormat, known: Tensor, margin: int, *, turns: bool = False
) -> tuple[Scaled, Tensor]:
    """Quantize ``x`` with the range of ``known``; return its true amax too, in one pass on a GPU.

    A value that is not finite makes all codes NaN, although ``known`` would clip it.
    """
    if fused := _kernels(x):
        scaled, amax = _cast(fused, x, to, known, margin, turns)
        return replace(scaled, scale=scaled.scale + 0 * amax), amax
    amax = largest(x)
    return low_precision.quantize(x, to, amax=known + 0 * amax, margin=margin), amax


def _cast(
    fused: ModuleType, x: Tensor, to: FloatFormat, amax: Tensor, margin: int, turns: bool
) -> tuple[Scaled, Tensor]:
    if turns and x.numel():
        codes, scale, found, turned = fused.cast_both(x, to.dtype, amax, margin)
        return Scaled(codes, scale, turned=turned), found
    codes, scale, found = fused.cast(x, to.dtype, amax, margin)
    return Scaled(codes, scale), found


def product(
    a: Scaled,
    b: Scaled,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Compute a b^T + bias: [m, k], [n, k] and [n] -> [m, n], as `low_precision.product` does."""
    takes_blocks = block_scaled_mm.takes(a, b, dtype)
    if takes_blocks or (a.block is None and b.block is None):  # torch's operations of 8 bits
        a = in_rows(a)
        b = in_rows(b)
    if takes_blocks:
        y = block_scaled_mm.product(a, b, dtype, out)
        return y if bias is None else y + bias
    return low_precision.product(a, b, dtype, bias=bias, fast=fast, out=out)


def in_rows(x: Scaled) -> Scaled:
    """Return ``x`` with contiguous codes, if a kernel can transpose them."""
    fused = None if x.codes.is_contiguous() else _kernels(x.codes.t())
    return Scaled(fused.transposed(x.codes.t()), x.scale, x.block) if fused else x


def _kernels(x: Tensor) -> ModuleType | None:
    can = x.dim() == 2 and x.is_contiguous() and device.multiplies_fp8(x.device)
    return kernels.find("quantize", x) if can else None
