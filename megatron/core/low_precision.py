"""Quantize matrices to 8-bit and 4-bit floating-point formats.

A matrix [r, c] becomes codes and scales; a value is its code times its scale.  The matrix has one
scale, or one scale per block of rows x columns.  Scales are powers of two.  So the rounding of a
value does not depend on the largest value, unless it is below 2^-14 of that (a subnormal in e4m3);
and each dequantized value is exact in bfloat16, so that a matmul of dequantized matrices sums the
same products as a matmul in the format itself.  A scale of e2m1 (nvfp4) is a power of two times an
e4m3 value.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Block = tuple[int, int]  # rows, columns
_SINGLE = torch.float32  # this file reads and writes its bit patterns as int32
HADAMARD = 16  # number of rows (tokens) that `rotated` mixes


@dataclass(frozen=True)
class FloatFormat:
    """Floating-point format: ``dtype`` stores the codes, ``largest`` is the largest finite one."""

    dtype: torch.dtype
    largest: float


E4M3 = FloatFormat(torch.float8_e4m3fn, 448.0)
E5M2 = FloatFormat(torch.float8_e5m2, 57344.0)
E2M1 = FloatFormat(torch.float8_e4m3fn, 6.0)  # e4m3 represents all 15 values of e2m1 exactly


@dataclass(frozen=True)
class Scaled:
    """Quantized matrix: codes [r, c] and fp32 scales, one [] or one per block [r/x, c/y].

    ``turned``: the codes once more as [c, r], so that the rows of the transposed matrix are
    contiguous too.
    """

    codes: Tensor
    scale: Tensor
    block: Block | None = None
    turned: Tensor | None = None

    def t(self) -> Scaled:
        """Return the transposed matrix, a view."""
        if self.turned is not None:
            return Scaled(self.turned, self.scale, turned=self.codes)
        if self.block is None:
            return Scaled(self.codes.t(), self.scale)
        return Scaled(self.codes.t(), self.scale.t(), self.block[::-1])

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized values [r, c]; exact in bfloat16 and wider dtypes."""
        return self.codes.to(dtype) * _spread(self.scale, self.block, self.codes.shape).to(dtype)


def plain_quantize(
    x: Tensor,
    to: FloatFormat,
    block: Block | None = None,
    *,
    amax: Tensor | None = None,
    margin: int = 0,
    at_random: bool = False,
    top: Tensor | None = None,
) -> Scaled:
    """Quantize ``x`` [r, c] to the format ``to``, with one scale or one per ``block``.

    ``amax``: the magnitude that the scale must represent (default: the maximum of ``x`` or of each
    block); larger values are clamped.  ``margin``: headroom above ``amax``, in powers of two.
    ``top`` (e2m1 only): the maximum of the matrix of which ``x`` is a shard (default: of ``x``).
    ``at_random`` (e2m1 only): round stochastically.  Inf or NaN in ``x`` makes all values with the
    same scale NaN.
    """
    amax = largest(x, block) if amax is None else amax
    x = x if x.dtype != torch.float16 else x.float()
    if to is not E2M1:
        scale = power_of_two(amax, to.largest, margin)
        return Scaled(codes_of(x, to, _spread(scale, block, x.shape)), scale, block)
    top = (amax.amax() if amax.numel() else amax) if top is None else top
    whole = power_of_two(top, to.largest * E4M3.largest)
    scale = (amax / to.largest / whole).to(E4M3.dtype).float() * whole
    scale = torch.where(scale == 0, whole, scale)
    codes = to_e2m1(x.float() / _spread(scale, block, x.shape), at_random)
    return Scaled(codes.clamp(-to.largest, to.largest).to(to.dtype), scale, block)


def codes_of(x: Tensor, to: FloatFormat, scale: Tensor) -> Tensor:
    """Return ``x / scale`` rounded to the format and clamped; ``scale`` is a power of two."""
    return (x * (1 / scale).to(x.dtype)).clamp(-to.largest, to.largest).to(to.dtype)


def largest(x: Tensor, block: Block | None = None) -> Tensor:
    """Return the largest magnitude of ``x`` [], or of each block, in fp32; NaN if it has a NaN."""
    if block is None:
        if not x.numel():
            return torch.zeros((), device=x.device)
        norm: Tensor = torch.linalg.vector_norm(x, torch.inf)
        return norm.float()
    (rows, columns), (high, wide) = x.shape, block
    padded = F.pad(x.abs(), (0, -columns % wide, 0, -rows % high))
    cut = padded.view(len(padded) // high, high, padded.shape[1] // wide, wide)
    return cut.amax((1, 3)).float()


def power_of_two(amax: Tensor, top: float, margin: int = 0) -> Tensor:
    """Return 2^margin times the smallest power of two s with amax / s <= top.

    NaN if ``amax`` is not finite.
    """
    mantissa, exponent = torch.frexp(amax.float())
    top_mantissa, top_exponent = math.frexp(top)
    exponent = exponent - top_exponent + (mantissa > top_mantissa) + margin
    bits = (exponent.clamp(-126, 126) + 127).to(torch.int32) << 23
    return torch.where(amax.isfinite(), bits.view(_SINGLE).to(mantissa.dtype), torch.nan)


def rotated(x: Tensor) -> Tensor:
    """Multiply each block of 16 rows of ``x`` [t, c] by a fixed orthogonal (Hadamard) matrix.

    Pads t with zeros to a multiple of 16.  This spreads an outlier over 16 rows; a matmul that sums
    over the rows of two rotated matrices has the same result as without rotation.
    """
    mix = functools.reduce(torch.kron, [torch.tensor([[1.0, 1], [1, -1]])] * 4)
    # Any signs keep the matrix orthogonal; these are irregular, unlike structure in the data.
    signs = torch.tensor([1.0, 1, -1, 1, 1, 1, -1, -1, 1, -1, 1, -1, -1, -1, -1, 1])
    mix = (mix * signs / math.sqrt(HADAMARD)).to(x.device, x.dtype)
    blocks = F.pad(x, (0, 0, 0, -len(x) % HADAMARD)).view(-1, HADAMARD, x.shape[1])
    return torch.matmul(mix, blocks).flatten(0, 1)


def _spread(scale: Tensor, block: Block | None, shape: torch.Size) -> Tensor:
    """Return the scale of each value [r, c]; without blocks the single scale []."""
    if block is None:
        return scale
    spread = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return spread[: shape[0], : shape[1]]


def to_e2m1(x: Tensor, at_random: bool = False) -> Tensor:
    """Round to the values of e2m1, 0, 0.5, 1, 1.5, 2, 3, 4, 6; larger results are not clamped.

    The distance of neighbours is 0.5 below 2, 1 below 4, and 2 above.
    """
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    return (x / step + _chance(x)).floor() * step if at_random else (x / step).round() * step


def _chance(x: Tensor) -> Tensor:
    """Return pseudo-random values in [0, 1): a hash of each value and its position.

    A hash has no generator state, which a checkpoint would have to save.
    """
    place = torch.arange(x.numel(), device=x.device).view_as(x)
    bits = x.to(_SINGLE).contiguous().view(torch.int32).long() * 0x9E3779B1 + place * 0x85EBCA77
    bits = ((bits ^ (bits >> 15)) * 0xC2B2AE3D) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 13)) * 0x27D4EB2F) >> 8
    return (bits & 0xFFFFFF).float() / 2**24
