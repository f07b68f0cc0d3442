"""Number formats of quantized matrices, and the recipes that name them.

A matrix [r, c] becomes codes [r, c] and fp32 scales, one for each block of rows x columns; a value
is its code times its scale.  Scales are stored as [r / rows, c / columns], also the single scale of
a matrix, [1, 1].  Like compressed-tensors and torchao for symmetric formats, divide the largest
magnitude by half the range of an integer, or by the largest float.

nvfp4 has two levels: its block scales are e4m3 values (held in fp32), and a second scale [1, 1]
multiplies them all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from megatron.core.low_precision import E2M1, E4M3, to_e2m1

Algorithm = Literal["max", "smoothquant", "awq", "gptq"]
_TINY = torch.finfo(torch.float32).smallest_normal  # scale of a block of zeros
_TINY_E4M3 = torch.finfo(E4M3.dtype).smallest_normal
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1 values in the order of their codes


@dataclass(frozen=True)
class NumberFormat:
    """Integers of ``bits`` bits, e4m3 (8 bits) or e2m1 (4 bits) floats.

    ``block``: rows and columns that share a scale; 0 stands for all.  (0, 0) is one scale for each
    tensor, (1, 0) one for each channel (row of a weight) or token, (1, 128) one for each group of
    columns.  ``is_dynamic``: each pass computes the scales of its inputs.  Integers that are
    dynamic have a zero point for each token too, see `rounded_tokens`; all others are symmetric.
    """

    kind: Literal["int", "float"]
    bits: int
    block: tuple[int, int] = (0, 0)
    is_dynamic: bool = False

    @property
    def is_symmetric(self) -> bool:
        """Whether the code 0 stands for the value 0."""
        return self.kind == "float" or not self.is_dynamic

    @property
    def has_two_levels(self) -> bool:
        """Whether a second scale multiplies the block scales (nvfp4)."""
        return self.kind == "float" and self.bits == 4

    @property
    def largest(self) -> float:
        """The magnitude, in codes, that the largest magnitude of a block maps to."""
        if self.kind == "int":
            return (2.0**self.bits - 1) / 2
        return E2M1.largest if self.bits == 4 else E4M3.largest

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest and the largest code."""
        if self.kind == "int":
            return -(2.0 ** (self.bits - 1)), 2.0 ** (self.bits - 1) - 1
        return -self.largest, self.largest

    def problem(self, shape: tuple[int, ...]) -> str | None:
        """Return why a matrix of this shape has no scales in this format; None if it has."""
        for size, block, what in zip(shape, self.block, ("rows", "columns"), strict=True):
            if block and size % block:
                return f"its {size} {what} are no multiple of {block}, which share a scale"
        return None


def scale_shape(shape: tuple[int, ...], to: NumberFormat) -> tuple[int, int]:
    """Return the shape of the scales of a matrix [r, c]."""
    (rows, columns), (high, wide) = shape, to.block
    return rows // high if high else 1, columns // wide if wide else 1


def amax_of(x: Tensor, to: NumberFormat) -> Tensor:
    """Return the largest magnitude of each block of ``x`` [r, c], in fp32."""
    return _blocks(x.detach().abs(), to).amax((1, 3)).float()


def scale_of(amax: Tensor, to: NumberFormat, scale_2: Tensor | None = None) -> Tensor:
    """Return the scales of blocks with these largest magnitudes."""
    scale = amax / to.largest
    if scale_2 is None:
        return scale.clamp(min=_TINY)
    return (scale / scale_2).clamp(_TINY_E4M3, E4M3.largest).to(E4M3.dtype).float()


def second_scale_of(amax: Tensor) -> Tensor:
    """Return the second scale of a matrix with this largest magnitude, for nvfp4."""
    return (amax / (E2M1.largest * E4M3.largest)).clamp(min=_TINY)


def scales_of(
    x: Tensor, to: NumberFormat, scale_2: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the scales of ``x`` [r, c], and its second scale for nvfp4 unless it is given."""
    amax = amax_of(x, to)
    if to.has_two_levels and scale_2 is None:
        scale_2 = second_scale_of(amax.amax().view(1, 1))
    return scale_of(amax, to, scale_2), scale_2


def codes_of(x: Tensor, scale: Tensor, to: NumberFormat, scale_2: Tensor | None = None) -> Tensor:
    """Round ``x`` [r, c] to codes [r, c]: int8, or e4m3, which represents all values of e2m1."""
    codes = _unclamped(x, scale, to, scale_2)
    codes = to_e2m1(codes) if to.has_two_levels else codes
    dtype = torch.int8 if to.kind == "int" else E4M3.dtype
    return codes.clamp(*to.limits).to(dtype)


def values_of(
    codes: Tensor,
    scale: Tensor,
    to: NumberFormat,
    scale_2: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Return the values of codes [r, c], computed in fp32."""
    scale = scale if scale_2 is None else scale * scale_2
    wide = _blocks(codes.float(), to) * scale[:, None, :, None]
    return wide.view(codes.shape).to(dtype)


def is_in_range(
    x: Tensor, scale: Tensor, to: NumberFormat, scale_2: Tensor | None = None
) -> Tensor:
    """Return whether each value of ``x`` [r, c] is rounded without being clamped."""
    low, high = to.limits
    codes = _unclamped(x, scale, to, scale_2)
    if to.kind == "float":  # magnitudes up to half a step above the largest are rounded to it
        half = 1.0 if to.bits == 4 else 16.0
        return codes.abs() <= high + half
    return (codes >= low) & (codes <= high)


def pack_int4(codes: Tensor) -> Tensor:
    """Pack int4 codes [r, c] into int32 [r, c/8], in the order of compressed-tensors."""
    nibbles = (codes + 8).to(torch.uint8)
    return (nibbles[:, ::2] | (nibbles[:, 1::2] << 4)).view(torch.int32)


def unpack_int4(packed: Tensor) -> Tensor:
    """Return the int8 codes [r, c] that `pack_int4` has packed."""
    pairs = packed.contiguous().view(torch.uint8)
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).to(torch.int8) - 8


def pack_fp4(codes: Tensor) -> Tensor:
    """Pack e2m1 values [r, c] into bytes [r, c/2], the even column in the low bits."""
    values = codes.float()
    table = torch.tensor(_MAGNITUDES, device=codes.device)
    nibbles = torch.bucketize(values.abs(), table) + 8 * values.signbit()
    nibbles = nibbles.to(torch.uint8)
    return nibbles[:, ::2] | (nibbles[:, 1::2] << 4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """Return the e4m3 codes [r, c] that `pack_fp4` has packed."""
    signed = [*_MAGNITUDES, *(-value for value in _MAGNITUDES)]
    table = torch.tensor(signed, device=packed.device)
    nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return table[nibbles.int()].to(E4M3.dtype)


def _blocks(x: Tensor, to: NumberFormat) -> Tensor:
    """Return ``x`` [r, c] as [r / rows, rows, c / columns, columns]."""
    rows, columns = scale_shape(x.shape, to)
    return x.reshape(rows, to.block[0] or x.shape[0], columns, to.block[1] or x.shape[1])


def _unclamped(x: Tensor, scale: Tensor, to: NumberFormat, scale_2: Tensor | None) -> Tensor:
    """Return ``x / scale``, rounded for an integer format.

    The largest magnitude of a block of integers lies on a tie, whose side depends on the last bit:
    as torchao does, multiply by the inverse.
    """
    scale = (scale if scale_2 is None else scale * scale_2)[:, None, :, None]
    wide = _blocks(x.detach().float(), to)
    codes = (wide * (1.0 / scale) if to.kind == "int" else wide / scale).view(x.shape)
    return codes.round() if to.kind == "int" else codes


def rounded_tokens(x: Tensor, to: NumberFormat) -> Tensor:
    """Round each token of ``x`` [t, i] to dynamic integers between its extremes, as vLLM does.

    A symmetric scale would put the largest magnitude on a tie: the last bit of a sum of another
    kernel would move it by a code, about 1 % of the logits.
    """
    low, high = to.limits
    wide = x.detach().float()
    smallest = wide.clamp(max=0).amin(1, True)
    largest = wide.clamp(min=0).amax(1, True)
    scale = ((largest - smallest) / (high - low)).clamp(min=_TINY)
    zero = (low - smallest / scale).round()
    return (((wide / scale + zero).round().clamp(low, high) - zero) * scale).to(x.dtype)


@dataclass(frozen=True)
class Recipe:
    """Formats of the weights and inputs of linear layers, and how calibration finds the scales.

    ``input``: None leaves inputs in the precision of the run.  ``skipped``: globs of layers that
    are not quantized.
    """

    name: str
    weight: NumberFormat
    input: NumberFormat | None = None
    algorithm: Algorithm = "max"
    skipped: tuple[str, ...] = (
        *("*output_layer*", "*router*", "*embedding*", "mtp.*"),
        *("lm_head.*", "pooler.*", "binary_head*", "score*"),  # heads of BERT and reward models
    )


INT8_CHANNEL = NumberFormat("int", 8, (1, 0))
INT8_TOKEN = NumberFormat("int", 8, (1, 0), is_dynamic=True)
INT4_GROUP = NumberFormat("int", 4, (1, 128))
FP8_TENSOR = NumberFormat("float", 8)
NVFP4 = NumberFormat("float", 4, (1, 16))
_FP8 = Recipe("fp8", FP8_TENSOR, FP8_TENSOR)
_FP8_SQUARE = Recipe("fp8_blockwise", NumberFormat("float", 8, (128, 128)))
_ALL = (
    Recipe("int8_sq", INT8_CHANNEL, NumberFormat("int", 8), "smoothquant"),
    _FP8,
    replace(_FP8, name="fp8_real_quant"),
    _FP8_SQUARE,
    replace(_FP8_SQUARE, name="fp8_blockwise_real_quant"),
    Recipe("fp8_blockwise_32", NumberFormat("float", 8, (32, 32))),
    Recipe("int4_awq", INT4_GROUP, algorithm="awq"),
    Recipe("w4a8_awq", INT4_GROUP, FP8_TENSOR, "awq"),
    Recipe("nvfp4", NVFP4, replace(NVFP4, is_dynamic=True)),
    # Not in ModelOpt's list:
    Recipe("int4_gptq", INT4_GROUP, algorithm="gptq"),
    Recipe("int4", INT4_GROUP),
    Recipe("int8", INT8_CHANNEL),
    Recipe("int8_dynamic", INT8_CHANNEL, INT8_TOKEN),
    Recipe(
        "fp8_dynamic",
        NumberFormat("float", 8, (1, 0)),
        NumberFormat("float", 8, (1, 0), is_dynamic=True),
    ),
)
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
