"""Matmuls of fp8 matrices with a scale per block, by torch's GEMM with typed scales.

a [m, k] and b [n, k] have scales along k: one per 128 values (b may have one per 128 x 128), or one
per 32 values (mxfp8).  Layouts of scales, from the documentation of ``torch.nn.functional.
scaled_mm`` and cuBLASLt:

    1 x 128     fp32 [rows, k/128], the rows adjacent
    128 x 128   fp32 [k/128, rows/128], k/128 padded to a multiple of 4, the blocks of k adjacent
    1 x 32      exponents (e8m0) [rows, k/32], padded to multiples of 128 and 4, in tiles of
                128 x 4, in which the rows r, r + 32, r + 64 and r + 96 are adjacent

Releases, GPUs and CUDA libraries differ in what they support.  The first call of each kind computes
a known product, and the GEMM is used only if that is right.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import device, low_precision
from megatron.core.diagnostics.log_once import warn_once
from megatron.core.low_precision import Block, Scaled

_ROW, _SQUARE, _MX = (1, 128), (128, 128), (1, 32)
_NAMES = {_ROW: "BlockWise1x128", _SQUARE: "BlockWise128x128", _MX: "BlockWise1x32"}
_PAIRS = ((_ROW, _SQUARE), (_ROW, _ROW), (_MX, _MX))
_FAILURES = (AttributeError, RuntimeError, TypeError, ValueError)


def takes(a: Scaled, b: Scaled, dtype: torch.dtype) -> bool:
    """Return whether `product` supports these matrices and is known to compute it right."""
    (m, k), n, where = a.codes.shape, len(b.codes), a.codes.device
    if a.block is None or b.block is None or dtype not in (torch.bfloat16, torch.float32):
        return False
    pair = a.block, b.block
    if pair not in _PAIRS or k % a.block[1] or m % 16 or n % max(16, b.block[0]):
        return False
    if not m * n * k or not device.multiplies_fp8(where):
        return False
    return _is_right(where, pair, (a.codes.dtype, b.codes.dtype), dtype)


def product(a: Scaled, b: Scaled, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return a b^T as `low_precision.product` does."""
    assert a.block is not None, "checked by the caller"
    assert b.block is not None, "checked by the caller"
    swizzle = F.SwizzleType.SWIZZLE_32_4_4 if a.block == _MX else F.SwizzleType.NO_SWIZZLE
    numbers = [int(swizzle.value)]
    options: dict[str, Any] = {} if out is None else {"out": out}
    y: Tensor = torch._scaled_mm_v2(
        a.codes.contiguous(),
        b.codes.contiguous().t(),
        [_scales(a.scale, a.block)],
        [_number(a.block)],
        numbers,
        [_scales(b.scale, b.block)],
        [_number(b.block)],
        numbers,
        None,
        dtype,
        [],
        False,
        **options,
    )
    return y


@functools.cache
def _is_right(
    where: torch.device,
    blocks: tuple[Block, Block],
    formats: tuple[torch.dtype, torch.dtype],
    dtype: torch.dtype,
) -> bool:
    """Multiply matrices whose blocks have different scales; return whether the result is right.

    Waits for the device, once for each kind of product.
    """
    a, b = (
        _example(rows, block, to, where)
        for rows, block, to in zip((160, 256), blocks, formats, strict=True)
    )
    expected = low_precision.product(a, b, torch.float32)
    try:
        found = product(a, b, dtype).float()
        is_right = bool((found - expected).abs().max() <= expected.abs().max() / 64)
        why = "its result is wrong"
    except _FAILURES as error:
        is_right = False
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if not is_right:
        sizes = " and ".join(f"{rows} x {columns}" for rows, columns in blocks)
        warn_once(
            f"fp8 GEMMs with scales for {sizes} values run on matrices converted to {dtype}, which "
            f"takes longer: torch's GEMM is not used ({why})"
        )
    return is_right


def _example(rows: int, block: Block, to: torch.dtype, where: torch.device) -> Scaled:
    """Return a matrix of ``rows`` rows and 3 blocks of columns, which need padding."""
    number = torch.arange(rows * 3 * block[1], device=where).view(rows, -1)
    codes = ((number * number) % 7 - 3).float().to(to)
    place = torch.arange(rows // block[0] * 3, device=where).view(-1, 3)
    scale = torch.exp2((place * 5 % 7 - 3).float())
    return Scaled(codes, scale, block)


def _number(block: Block) -> int:
    return int(getattr(F.ScalingType, _NAMES[block]).value)


def _scales(scale: Tensor, block: Block) -> Tensor:
    """Return scales [rows, k/x] in the layout of the GEMM."""
    if block == _ROW:
        return scale.t().contiguous().t()
    if block == _SQUARE:
        return F.pad(scale, (0, -scale.shape[1] % 4)).contiguous().t()
    # A scale is a power of two or NaN: its exponent is the byte of e8m0, 255 for NaN.
    exponents = (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    padded = F.pad(exponents, (0, -scale.shape[1] % 4, 0, -len(scale) % 128))
    tiles = padded.view(len(padded) // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(torch.float8_e8m0fnu)
