"""Numbers of 8 and 4 bits: quantising matrices, and products of quantised ones.

A matrix [r, c] becomes codes and scales; a value is its code times its scale.  One scale serves the
whole matrix, or each block of rows x columns has one of its own.  Scales are powers of two: then a
value below the largest is rounded alike whatever the largest is, until it is 2^-14 of that, and
every value is a bfloat16 number, so that a product of dequantised matrices has the same terms as
one in the format itself.  Those of e2m1 are such a power times a number of e4m3 (nvfp4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import device

Block = tuple[int, int]  # rows, columns
_SINGLE = torch.float32  # whose bits are put together and taken apart here
HADAMARD = 16  # tokens that `rotated` mixes


@dataclass(frozen=True)
class FloatFormat:
    """What a value is rounded to: ``dtype`` holds the codes, ``largest`` is the largest of them."""

    dtype: torch.dtype
    largest: float


E4M3 = FloatFormat(torch.float8_e4m3fn, 448.0)
E5M2 = FloatFormat(torch.float8_e5m2, 57344.0)
E2M1 = FloatFormat(torch.float8_e4m3fn, 6.0)  # its 15 numbers are among those of e4m3


@dataclass(frozen=True)
class Scaled:
    """A quantised matrix: codes [r, c], and fp32 scales, one [] or those of blocks [r/x, c/y]."""

    codes: Tensor
    scale: Tensor
    block: Block | None = None

    def t(self) -> Scaled:
        """Transposed: a view."""
        if self.block is None:
            return Scaled(self.codes.t(), self.scale)
        return Scaled(self.codes.t(), self.scale.t(), self.block[::-1])

    def values(self, dtype: torch.dtype) -> Tensor:
        """What the codes stand for: [r, c]; exact in bfloat16 and wider."""
        return self.codes.to(dtype) * _spread(self.scale, self.block, self.codes.shape).to(dtype)


def quantize(
    x: Tensor,
    to: FloatFormat,
    block: Block | None = None,
    *,
    amax: Tensor | None = None,
    margin: int = 0,
    at_random: bool = False,
) -> Scaled:
    """Round ``x`` [r, c]; what is not finite makes all values under its scale NaN.

    ``amax``: the largest value to make room for, where that is not the block's own; what lies
    above becomes the largest number.  ``margin``: powers of two to keep free above it.
    ``at_random`` (e2m1) rounds up as often as a value lies near the upper neighbour.
    """
    amax = largest(x, block) if amax is None else amax
    x = x if x.dtype != torch.float16 else x.float()
    if to is not E2M1:
        scale = power_of_two(amax, to.largest, margin)
        return Scaled(codes_of(x, to, _spread(scale, block, x.shape)), scale, block)
    whole = power_of_two(amax.amax() if amax.numel() else amax, to.largest * E4M3.largest)
    scale = (amax / to.largest / whole).to(E4M3.dtype).float() * whole
    scale = torch.where(scale == 0, whole, scale)
    codes = _to_e2m1(x.float() / _spread(scale, block, x.shape), at_random)
    return Scaled(codes.clamp(-to.largest, to.largest).to(to.dtype), scale, block)


def codes_of(x: Tensor, to: FloatFormat, scale: Tensor) -> Tensor:
    """``x`` over a power of two, rounded; what lies above the range becomes the largest number."""
    return (x * (1 / scale).to(x.dtype)).clamp(-to.largest, to.largest).to(to.dtype)


def largest(x: Tensor, block: Block | None = None) -> Tensor:
    """The largest magnitude in ``x`` [], or in each block of it; NaN where it holds one."""
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
    """The smallest power of two by which ``amax`` is at most ``top``, times 2^margin; or NaN."""
    mantissa, exponent = torch.frexp(amax.float())
    top_mantissa, top_exponent = math.frexp(top)
    exponent = exponent - top_exponent + (mantissa > top_mantissa) + margin
    bits = (exponent.clamp(-126, 126) + 127).to(torch.int32) << 23
    return torch.where(amax.isfinite(), bits.view(_SINGLE).to(mantissa.dtype), torch.nan)


def product(a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """a b^T: [m, k] and [n, k] -> [m, n].  ``fast`` lets a GPU keep fewer bits of partial sums.

    In the format itself where the device has that for one scale a matrix, else dequantised.
    """
    is_plain = a.block is None and b.block is None and dtype != torch.float64
    if is_plain and a.codes.numel() and device.multiplies_fp8(a.codes.device):
        return scaled_mm(a, b, dtype, fast=fast)
    wide = torch.float32 if dtype == torch.float16 else dtype
    return a.values(wide).matmul(b.values(wide).t()).to(dtype)


def scaled_mm(a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """`product` by torch's own operation, which wants 16 values of k at a time."""
    left, right = _in_sixteens(a.codes), _in_sixteens(b.codes)
    return torch._scaled_mm(
        left,
        right.t(),
        scale_a=a.scale,
        scale_b=b.scale,
        out_dtype=dtype,
        use_fast_accum=fast and device.is_cuda(left.device),
    )


def _in_sixteens(codes: Tensor) -> Tensor:
    """Contiguous, zeros behind each row."""
    codes, missing = codes.contiguous(), -codes.shape[1] % 16
    if not missing:
        return codes
    return F.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype)


def rotated(x: Tensor) -> Tensor:
    """Every 16 rows of ``x`` [t, c] mixed by an orthogonal matrix; rows of zeros fill up the last.

    A large value is spread over 16, while a product over the rows of two such matrices stays.
    """
    mix = torch.ones(1, 1, dtype=torch.float32, device=x.device)
    while len(mix) < HADAMARD:
        mix = torch.cat([torch.cat([mix, mix], 1), torch.cat([mix, -mix], 1)])
    # Any signs do; these have no pattern that a row of data would have.
    signs = torch.tensor([1.0, 1, -1, 1, 1, 1, -1, -1, 1, -1, 1, -1, -1, -1, -1, 1])
    mix = (mix * signs.to(x.device) / math.sqrt(HADAMARD)).to(x.dtype)
    blocks = F.pad(x, (0, 0, 0, -len(x) % HADAMARD)).view(-1, HADAMARD, x.shape[1])
    return torch.matmul(mix, blocks).flatten(0, 1)


def _spread(scale: Tensor, block: Block | None, shape: torch.Size) -> Tensor:
    """The scale of each value [r, c], or the one of all []."""
    if block is None:
        return scale
    rows, columns = (scale.repeat_interleave(block[0], 0), block[1])
    return rows.repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def _to_e2m1(x: Tensor, at_random: bool) -> Tensor:
    """0, 0.5, 1, 1.5, 2, 3, 4, 6 and so on: half of the power of two below, at least 0.5, apart."""
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    return (x / step + _chance(x)).floor() * step if at_random else (x / step).round() * step


def _chance(x: Tensor) -> Tensor:
    """Numbers in [0, 1) that value and place decide: no generator, so nothing to save or resume."""
    place = torch.arange(x.numel(), device=x.device).view_as(x)
    bits = x.to(_SINGLE).contiguous().view(torch.int32).long() * 0x9E3779B1 + place * 0x85EBCA77
    bits = ((bits ^ (bits >> 15)) * 0xC2B2AE3D) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 13)) * 0x27D4EB2F) >> 8
    return (bits & 0xFFFFFF).float() / 2**24
