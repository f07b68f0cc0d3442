"""Quantize matrices and multiply quantized ones, by kernels and GEMMs of a GPU where they exist.

Codes and scales are those of `low_precision.plain_quantize`.

torch's GEMM with typed scales multiplies a [m, k] and b [n, k] with scales along k: one per 128
values (b may have one per 128 x 128), or one per 32 values (mxfp8).  Layouts of its scales, from
the documentation of ``torch.nn.functional.scaled_mm`` and cuBLASLt:

    1 x 128     fp32 [rows, k/128], the rows adjacent
    128 x 128   fp32 [k/128, rows/128], k/128 padded to a multiple of 4, the blocks of k adjacent
    1 x 32      exponents (e8m0) [rows, k/32], padded to multiples of 128 and 4, in tiles of
                128 x 4, in which the rows r, r + 32, r + 64 and r + 96 are adjacent

Releases, GPUs and CUDA libraries differ in what they support.  The first call of each kind computes
a known product, and the GEMM is used only if that is right.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import device
from megatron.core.diagnostics.log_once import warn_once
from megatron.core.fusions import kernels
from megatron.core.low_precision import E2M1, Block, FloatFormat, Scaled, largest, plain_quantize

_ROW, _SQUARE, _MX = (1, 128), (128, 128), (1, 32)
_NAMES = {_ROW: "BlockWise1x128", _SQUARE: "BlockWise128x128", _MX: "BlockWise1x32"}
_PAIRS = ((_ROW, _SQUARE), (_ROW, _ROW), (_MX, _MX))
_FAILURES = (AttributeError, RuntimeError, TypeError, ValueError)


def quantize(
    x: Tensor,
    to: FloatFormat,
    block: Block | None = None,
    *,
    amax: Tensor | None = None,
    margin: int = 0,
    at_random: bool = False,
    top: Tensor | None = None,
    turns: bool = False,
) -> Scaled:
    """Quantize ``x`` [r, c] as `low_precision.plain_quantize` does.

    ``turns``: the transposed matrix will be multiplied too, so a kernel also writes its codes; only
    with one scale.
    """
    fused = None if to is E2M1 else _kernels(x)
    if fused is None:
        return plain_quantize(x, to, block, amax=amax, margin=margin, at_random=at_random, top=top)
    if block is not None:
        codes, scale = fused.by_block(x, to.dtype, block)
        return Scaled(codes, scale, block)
    return _cast(fused, x, to, largest(x) if amax is None else amax, margin, turns)[0]


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
    return plain_quantize(x, to, amax=known + 0 * amax, margin=margin), amax


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
    """Return a b^T + bias: [m, k], [n, k] and [n] -> [m, n]; written to ``out``, if given.

    ``out`` has ``dtype``, and comes without a bias.  Runs in fp8 if the device has such a GEMM for
    the scales; else on dequantized matrices.  ``fast`` lets a GPU accumulate with fewer bits.
    """
    assert bias is None or out is None, "no caller adds a bias to a matrix of its own"
    if a.block is None and b.block is None:
        a, b = in_rows(a), in_rows(b)
        is_fp8 = dtype != torch.float64 and device.multiplies_fp8(a.codes.device)
        if is_fp8 and a.codes.numel():
            return scaled_mm(a, b, dtype, bias=bias, fast=fast, out=out)
    elif multiplies_blocks(a, b, dtype):
        y = _product_of_blocks(in_rows(a), in_rows(b), dtype, out)
        return y if bias is None else y + bias
    return dequantized_product(a, b, dtype, bias=bias, out=out)


def dequantized_product(
    a: Scaled,
    b: Scaled,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `product` on the values of the matrices."""
    wide = torch.float32 if dtype == torch.float16 else dtype
    y = a.values(wide).matmul(b.values(wide).t()).to(dtype)
    y = y if bias is None else y + bias
    return y if out is None else out.copy_(y)


def in_rows(x: Scaled) -> Scaled:
    """Return ``x`` with contiguous codes, if a kernel can transpose them."""
    fused = None if x.codes.is_contiguous() else _kernels(x.codes.t())
    return Scaled(fused.transposed(x.codes.t()), x.scale, x.block) if fused else x


def _kernels(x: Tensor) -> ModuleType | None:
    can = x.dim() == 2 and x.is_contiguous() and device.multiplies_fp8(x.device)
    return kernels.find("quantize", x) if can else None


def scaled_mm(
    a: Scaled,
    b: Scaled,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `product` by ``torch._scaled_mm``; a GPU needs multiples of 16 for k and n."""
    left = _in_sixteens(a.codes)
    right = _in_sixteens(b.codes, rows=device.is_cuda(a.codes.device))
    fits = len(right) == len(b.codes)
    adds_bias = fits and is_added_by_gemm(bias, dtype)
    y: Tensor = torch._scaled_mm(
        left,
        right.t(),
        scale_a=a.scale,
        scale_b=b.scale,
        out_dtype=dtype,
        bias=bias if adds_bias else None,
        use_fast_accum=fast and device.is_cuda(left.device),
        **({"out": out} if fits and out is not None else {}),
    )
    if not fits:
        y = y[:, : len(b.codes)]
        y = y.contiguous() if out is None else out.copy_(y)
    return y if bias is None or adds_bias else y + bias


def is_added_by_gemm(bias: Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether ``torch._scaled_mm`` adds ``bias`` to a result of ``dtype``: in 16 bits."""
    return bias is not None and bias.dtype == dtype and dtype.itemsize == 2


def _in_sixteens(codes: Tensor, *, rows: bool = False) -> Tensor:
    """Return contiguous codes with columns, or ``rows`` too, padded to a multiple of 16."""
    codes = codes.contiguous()
    missing = -codes.shape[1] % 16, -codes.shape[0] % 16 if rows else 0
    if not any(missing):
        return codes
    return F.pad(codes.view(torch.uint8), (0, missing[0], 0, missing[1])).view(codes.dtype)


def multiplies_blocks(a: Scaled, b: Scaled, dtype: torch.dtype) -> bool:
    """Return whether torch's GEMM supports these matrices and is known to compute it right."""
    (m, k), n, where = a.codes.shape, len(b.codes), a.codes.device
    if a.block is None or b.block is None or dtype not in (torch.bfloat16, torch.float32):
        return False
    pair = a.block, b.block
    if pair not in _PAIRS or k % a.block[1] or m % 16 or n % max(16, b.block[0]):
        return False
    if not m * n * k or not device.multiplies_fp8(where):
        return False
    return _is_right(where, pair, (a.codes.dtype, b.codes.dtype), dtype)


def _product_of_blocks(
    a: Scaled, b: Scaled, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Compute `product` by torch's GEMM with typed scales."""
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
    expected = dequantized_product(a, b, torch.float32)
    try:
        found = _product_of_blocks(a, b, dtype).float()
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
    return Scaled(codes, torch.exp2((place * 5 % 7 - 3).float()), block)


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
