"""Codes and scales of quantized matrices, compared with torchao's and compressed-tensors'."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.quantization.formats import (
    FP8_TENSOR,
    INT4_GROUP,
    INT8_CHANNEL,
    NVFP4,
    RECIPES,
    NumberFormat,
    codes_of,
    pack_fp4,
    pack_int4,
    rounded_tokens,
    scale_shape,
    scales_of,
    unpack_fp4,
    unpack_int4,
    values_of,
)

FORMATS = {
    "int8 channel": INT8_CHANNEL,
    "int8 tensor": NumberFormat("int", 8),
    "int4 group": INT4_GROUP,
    "fp8 tensor": FP8_TENSOR,
    "fp8 token": NumberFormat("float", 8, (1, 0)),
    "fp8 square": NumberFormat("float", 8, (128, 128)),
    "nvfp4": NVFP4,
}


def weight(dtype: torch.dtype = torch.float32) -> Tensor:
    """A matrix with outliers, a row of zeros, and values that lie between two codes."""
    w = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    w[3] = 0
    w[5] = torch.linspace(-15, 15, 384).round() / 2
    w[:, 7] *= 20
    return w.to(dtype)


@pytest.mark.parametrize("to", FORMATS.values(), ids=FORMATS)
def test_values_are_near_and_rounding_them_again_changes_nothing(to: NumberFormat) -> None:
    w = weight()
    scale, scale_2 = scales_of(w, to)
    assert scale.shape == scale_shape(w.shape, to)
    codes = codes_of(w, scale, to, scale_2)
    values = values_of(codes, scale, to, scale_2, dtype=torch.float32)
    high, wide = (size // of for size, of in zip(w.shape, scale.shape, strict=True))
    amax = w.abs().view(scale.shape[0], high, scale.shape[1], wide).amax((1, 3))
    amax = amax.repeat_interleave(high, 0).repeat_interleave(wide, 1)
    step = {("int", 8): 1 / 250, ("int", 4): 1 / 14, ("float", 8): 1 / 25, ("float", 4): 0.2}
    assert ((values - w).abs() <= step[to.kind, to.bits] * amax).all()
    assert torch.equal(codes_of(values, scale, to, scale_2), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["int8 channel", "int8 tensor", "int4 group"])
def test_integers_and_scales_are_torchaos(name: str, dtype: torch.dtype) -> None:
    ao = pytest.importorskip("torchao.quantization.quant_primitives")
    to, w = FORMATS[name], weight(dtype).float()
    block = [to.block[0] or w.shape[0], to.block[1] or w.shape[1]]
    low, high = (int(limit) for limit in to.limits)
    expected, zero = ao.choose_qparams_affine(
        w, ao.MappingType.SYMMETRIC, block, torch.int8, low, high, keepdim=True
    )
    scale, _ = scales_of(w, to)
    assert torch.equal(scale, expected)
    codes = ao.quantize_affine(w, block, expected, zero, torch.int8, low, high)
    assert torch.equal(codes_of(w, scale, to), codes)
    values = ao.dequantize_affine(
        codes, block, expected, zero, torch.int8, low, high, output_dtype=torch.float32
    )
    assert torch.equal(values_of(codes, scale, to, dtype=torch.float32), values)


@pytest.mark.parametrize("name", ["fp8 tensor", "fp8 token", "fp8 square"])
def test_fp8_codes_and_scales_are_torchaos(name: str) -> None:
    ao = pytest.importorskip("torchao.quantization.quant_primitives")
    to, w = FORMATS[name], weight()
    w[3] = 1e-4  # torchao has no scale for a row of zeros
    block = [to.block[0] or w.shape[0], to.block[1] or w.shape[1]]
    expected = ao._choose_scale_float8(w, block)
    scale, _ = scales_of(w, to)
    assert torch.equal(scale, expected)
    codes = ao._quantize_affine_float8(w, expected, torch.float8_e4m3fn)
    assert torch.equal(codes_of(w, scale, to).float(), codes.float())


def test_nvfp4_codes_and_scales_are_torchaos() -> None:
    nvfp4_tensor = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    w = weight()
    scale, scale_2 = scales_of(w, NVFP4)
    assert scale_2 is not None
    expected = nvfp4_tensor.per_tensor_amax_to_scale(w.abs().amax())
    assert torch.equal(scale_2.view(()), expected)
    scales, packed = nvfp4_tensor.nvfp4_quantize(w, per_tensor_scale=expected)
    assert torch.equal(scale, scales.float().view_as(scale))
    codes = codes_of(w, scale, NVFP4, scale_2)
    ours = unpack_fp4(packed.view(torch.uint8).view(len(w), -1)).float()
    # torchao multiplies by the inverse of the scale: a tie may be rounded to its other side.
    assert (codes.float() != ours).float().mean() < 1e-4


@pytest.mark.parametrize("name", ["fp8_dynamic", "int8_dynamic"])
def test_tokens_are_rounded_as_compressed_tensors_does(name: str) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils")
    to = RECIPES[name].input
    assert to is not None
    args = quantization.QuantizationArgs(
        num_bits=8, type=to.kind, strategy="token", symmetric=to.is_symmetric, dynamic=True
    )
    x = weight()
    x[3] = 1e-4  # the scales of a row of zeros differ, and its values are zeros with both
    scale, zero = helpers.compute_dynamic_scales_and_zp(x[None], args, torch.nn.Linear(1, 1))
    (expected,) = forward.fake_quantize(x[None], scale, zero, args)
    if name == "int8_dynamic":
        assert torch.equal(rounded_tokens(x, to), expected)
        assert (rounded_tokens(x * (1 + 1e-6), to) - expected).abs().max() < 1e-3
        return
    ours, _ = scales_of(x, to)
    assert torch.equal(ours, scale.view_as(ours))
    values = values_of(codes_of(x, ours, to), ours, to, dtype=torch.float32)
    assert torch.equal(values, expected)


def test_int4_is_packed_as_compressed_tensors_does() -> None:
    codes = torch.randint(-8, 8, (6, 256), generator=torch.Generator().manual_seed(2))
    codes = codes.to(torch.int8)
    assert torch.equal(unpack_int4(pack_int4(codes)), codes)
    theirs = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    assert torch.equal(pack_int4(codes), theirs.pack_to_int32(codes, 4))


def test_fp4_is_packed_as_compressed_tensors_does() -> None:
    w = weight()
    scale, scale_2 = scales_of(w, NVFP4)
    codes = codes_of(w, scale, NVFP4, scale_2)
    assert torch.equal(unpack_fp4(pack_fp4(codes)).float(), codes.float())
    theirs = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    assert torch.equal(pack_fp4(codes), theirs.pack_fp4_to_uint8(codes.float()))
