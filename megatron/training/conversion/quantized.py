"""Quantized weights of Hugging Face folders, read as plain tensors that are dequantized on use.

A quantized layer ``x`` has a weight [o, i] as codes, and scales beside them:

    quant_method        codes                             beside them
    gptq                x.qweight int32 [i*bits/32, o]    scales [g, o], qzeros, g_idx [i]
    awq                 x.qweight int32 [i, o/8]          scales [g, o], qzeros
    compressed-tensors  x.weight_packed int32, dense      weight_scale, weight_shape,
                                                          weight_zero_point, weight_g_idx
                        x.weight_packed uint8, e2m1       weight_scale, weight_global_scale
                        x.weight int8 or float8           weight_scale, weight_zero_point
    modelopt            x.weight float8, or uint8 (e2m1)  weight_scale, weight_scale_2,
                                                          pre_quant_scale
    fp8 (DeepSeek V3)   x.weight float8                   weight_scale_inv
    mxfp4 (gpt-oss)     x_blocks.3 uint8 [o, g, 16]       x_scales.3 [o, g]; x.3 is transposed

A value is (code - zero point) * scale.  A scale belongs to the tensor [1], a row [o, 1], a group of
columns of a row [o, g], or a square; one in uint8 is an exponent of 2, plus 127.  Codes fill a word
or byte from its lowest bit.  Scales of activations and of the KV cache are not read: the model
computes in the dtype of its other weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import Shape
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.quantization.formats import unpack_fp4

_Parts: TypeAlias = Mapping[str, LazyTensor]
_Decoded: TypeAlias = tuple[Shape, Callable[[], Tensor]]
_METHODS = ("gptq", "awq", "compressed-tensors", "modelopt", "fp8", "mxfp4")
_CODES = ("blocks", "qweight", "weight_packed", "weight")
_SCALES = ("weight_scale", "weight_scale_inv")
_USED = {
    *_CODES,
    *_SCALES,
    *("scales", "qzeros", "g_idx", "weight_shape", "weight_zero_point", "weight_g_idx"),
    *("weight_global_scale", "weight_scale_2", "pre_quant_scale"),
}
_UNUSED = {
    *("input_scale", "input_global_scale", "input_zero_point", "output_scale"),
    *("output_zero_point", "q_scale", "k_scale", "v_scale", "prob_output_scale"),
}
_OF_STACK = re.compile(r"(.*)_(blocks|scales)(\.\d+)")
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_EXPONENT_OF_ONE = 127
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # place in a word of each of 8 columns


def plain_numbers(
    weights: Mapping[str, LazyTensor], config: Mapping[str, Any]
) -> dict[str, LazyTensor]:
    """Return unstacked ``weights``, quantized ones as plain tensors that are dequantized on use.

    They get the dtype of the first matrix that is not quantized, else bf16.  Raises
    CheckpointError for another quantization, and if codes and scales do not match.
    """
    settings = config.get("quantization_config") or {}
    method = settings.get("quant_method", "")
    if not settings:
        return dict(weights)
    if method not in _METHODS:
        raise CheckpointError(
            f"config.json has quant_method {str(method)[:80]}: read are {', '.join(_METHODS)}, or "
            "plain weights"
        )
    list(_squares(settings))  # raises for blocks that are no pair of sizes
    out: dict[str, LazyTensor] = {}
    layers: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in weights.items():
        layer, own = _layer_and_own(name)
        is_plain = own == "weight" and tensor.dtype in _PLAIN
        if own in _USED and not is_plain:
            layers.setdefault(layer, {})[own] = tensor
        elif own not in _UNUSED:
            out[name] = tensor
    matrices = (t.dtype for t in out.values() if len(t.shape) > 1 and t.dtype in _PLAIN)
    dtype = next(matrices, torch.bfloat16)
    for layer, parts in layers.items():
        name = layer if "blocks" in parts else f"{layer}.weight"
        if name in out:  # rounded, and stored as plain values
            continue
        shape, make = _decoder(layer, parts, method)(parts, settings)
        out[name] = LazyTensor(name, dtype, shape, partial(_cast, make, dtype))
    return out


def _cast(make: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
    return make().to(dtype)


def _layer_and_own(name: str) -> tuple[str, str]:
    if found := _OF_STACK.fullmatch(name):
        return found[1] + found[3], found[2]
    layer, _, own = name.rpartition(".")
    return layer, own


def _decoder(
    layer: str, parts: _Parts, method: str
) -> Callable[[_Parts, Mapping[str, Any]], _Decoded]:
    codes = next((own for own in _CODES if own in parts), None)
    if codes is None:
        raise _incomplete(next(iter(parts.values())).name, f"codes of {layer}")
    if codes == "blocks":
        return _from_mxfp4
    if codes == "qweight":
        return _from_awq if method == "awq" else _from_gptq
    return _from_codes


def _from_gptq(parts: _Parts, settings: Mapping[str, Any]) -> _Decoded:
    """Decode rows [i] of packed columns [o]; zero points of version 1 are stored less 1."""
    words, scales, zeros = (_part(parts, own) for own in ("qweight", "scales", "qzeros"))
    is_first = settings.get("checkpoint_format", "gptq") != "gptq_v2"
    bits = _choice(settings, "bits", (2, 3, 4, 8))
    groups, rows = _matrix(scales)
    index = parts.get("g_idx")
    columns = index.shape[0] if index else words.shape[0] * 32 // bits
    _check(words, torch.int32, (-(-columns * bits // 32), rows))
    _check(zeros, torch.int32, (groups, -(-rows * bits // 32)))
    size = columns if index else _group_size(settings, columns, scales)

    def make() -> Tensor:
        zero_words = zeros.make()
        if is_first and bits != 3:  # a carry undoes the borrow of the writer
            zero_words = zero_words + sum(1 << at for at in range(0, 32, bits))
        zero_points = unpack_bits(zero_words, bits, rows)
        if is_first and bits == 3:
            zero_points = (zero_points + 1) & 7
        codes = unpack_bits(words.make().t(), bits, columns)
        chosen = _group_of_column(index, groups)
        return _scaled(codes, _float_scales(scales).t(), (1, size), zero_points.t(), chosen)

    return (rows, columns), make


def _from_awq(parts: _Parts, settings: Mapping[str, Any]) -> _Decoded:
    """Decode 4-bit rows [i] of columns [o], of which a word holds eight in another order."""
    words, scales, zeros = (_part(parts, own) for own in ("qweight", "scales", "qzeros"))
    _choice(settings, "bits", (4,))
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise CheckpointError(f"config.json has AWQ's version {version[:80]}: only gemm is read")
    groups, rows = _matrix(scales)
    columns = words.shape[0]
    _check(words, torch.int32, (columns, rows // 8))
    _check(zeros, torch.int32, (groups, rows // 8))
    size = _group_size(settings, columns, scales)

    def unpacked(tensor: LazyTensor) -> Tensor:
        numbers: Tensor = unpack_bits(tensor.make(), 4, rows).unflatten(1, (-1, 8))
        return numbers[..., _AWQ_ORDER].flatten(1)

    def make() -> Tensor:
        codes = unpacked(words).t()
        zero_points = unpacked(zeros).t()
        return _scaled(codes, _float_scales(scales).t(), (1, size), zero_points)

    return (rows, columns), make


def _from_codes(parts: _Parts, settings: Mapping[str, Any]) -> _Decoded:
    """Decode a row-major matrix of packed integers, e2m1 pairs, int8 or float8."""
    stored = parts.get("weight_packed") or parts["weight"]
    rows, columns = _matrix(stored)
    bits = 0
    if stored.dtype == torch.int32:
        size = _part(parts, "weight_shape")
        _check(size, size.dtype, (2,))
        named, columns = size.make().tolist()
        if named != rows:
            raise CheckpointError(f"{size.place} has {named} rows, {stored.name} has {rows}")
        bits = stored.shape[1] * 32 // columns if columns > 0 else 0
        if not 1 <= bits <= 8:
            raise CheckpointError(
                f"{size.place} has {columns} columns, which {stored.name} has not"
            )
        _check(stored, torch.int32, (rows, -(-columns * bits // 32)))
    elif stored.dtype == torch.uint8:
        columns = 2 * columns
        if _part(parts, *_SCALES).dtype in _FLOAT8:
            _part(parts, "weight_global_scale", "weight_scale_2")
    elif stored.dtype != torch.int8 and stored.dtype not in _FLOAT8:
        raise CheckpointError(f"{stored.place} is {stored.dtype}: no known codes are")
    scale = _part(parts, *_SCALES)
    index = parts.get("weight_g_idx")
    zeros = parts.get("weight_zero_point")
    block = _block_of((rows, columns), scale, settings)
    if zeros and zeros.dtype == torch.int32:
        _check(zeros, torch.int32, (-(-rows * bits // 32), scale.shape[-1]))
    elif zeros:
        _check(zeros, zeros.dtype, scale.shape)
    for own, count in (("pre_quant_scale", columns), ("weight_g_idx", columns)):
        if own in parts:
            _check(parts[own], parts[own].dtype, (count,))

    def make() -> Tensor:
        factors = _float_scales(scale)
        for own in ("weight_global_scale", "weight_scale_2"):
            if own in parts:
                factor = _float_scales(parts[own]).flatten()[0]
                factors = factors / factor if own == "weight_global_scale" else factors * factor
                _check_finite(factors, parts[own])
        codes = stored.make()
        points = zeros.make() if zeros else None
        if stored.dtype == torch.int32:
            offset = 1 << (bits - 1)
            codes = unpack_bits(codes, bits, columns).to(torch.int16) - offset
            if points is not None and points.dtype == torch.int32:
                points = unpack_bits(points.t(), bits, rows).t().to(torch.int16) - offset
        elif stored.dtype == torch.uint8:
            codes = unpack_fp4(codes)
        chosen = _group_of_column(index, factors.shape[1])
        values = _scaled(codes, factors, block, points, chosen)
        if "pre_quant_scale" in parts:
            values = values * parts["pre_quant_scale"].make().float()
        return values

    return (rows, columns), make


def _from_mxfp4(parts: _Parts, settings: Mapping[str, Any]) -> _Decoded:
    blocks = parts["blocks"]
    scales = _part(parts, "scales")
    _check(blocks, torch.uint8, (*blocks.shape[:2], 16))
    _check(scales, torch.uint8, blocks.shape[:2])

    def make() -> Tensor:
        codes = unpack_fp4(blocks.make().flatten(1))
        return _scaled(codes, _float_scales(scales), (1, 32)).t()

    return (32 * blocks.shape[1], blocks.shape[0]), make


def unpack_bits(words: Tensor, bits: int, count: int) -> Tensor:
    """Return ``count`` unsigned numbers of ``bits`` <= 8 bits in int32 words [.., n], as uint8.

    Numbers follow each other without spare bits, from the lowest bit of the first word.
    """
    words = words.contiguous()
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        numbers = words.view(torch.uint8).unsqueeze(-1) >> shifts
    else:
        spare = -words.shape[-1] % bits
        both = torch.nn.functional.pad(words, (0, spare)).unflatten(-1, (-1, bits)).long()
        first = torch.arange(32) * bits
        following = (both & 0xFFFFFFFF).roll(-1, -1)[..., first // 32] << 32
        numbers = (both[..., first // 32] & 0xFFFFFFFF | following) >> first % 32
        numbers = numbers.to(torch.uint8)
    return (numbers & ((1 << bits) - 1)).flatten(-2)[..., :count]


def _scaled(
    codes: Tensor,
    scales: Tensor,
    block: Sequence[int],
    zeros: Tensor | None = None,
    groups: Tensor | None = None,
) -> Tensor:
    """Return (codes - zeros) * scales in fp32; ``groups``: of each column, in place of blocks."""

    def spread(factors: Tensor) -> Tensor:
        factors = factors.float()
        if groups is not None:
            return factors[:, groups]
        for dim, count in enumerate(block):
            factors = factors.repeat_interleave(count, dim).narrow(dim, 0, codes.shape[dim])
        return factors

    values = codes.float()
    if zeros is not None:
        values = values - spread(zeros)
    return values * spread(scales)


def _float_scales(stored: LazyTensor) -> Tensor:
    """Return scales as an fp32 matrix; uint8 ones are exponents.  Raises CheckpointError."""
    scales = stored.make()
    if scales.dtype == torch.uint8:
        exponents = scales.to(torch.int32) - _EXPONENT_OF_ONE
        scales = torch.ldexp(torch.ones(exponents.shape), exponents)
    _check_finite(scales.float(), stored)
    return scales.float().reshape(scales.shape[0] if scales.dim() else 1, -1)


def _check_finite(factors: Tensor, stored: LazyTensor) -> None:
    if not factors.isfinite().all():
        raise CheckpointError(
            f"{stored.place} gives scales that are not finite: the file is damaged, get it again"
        )


def _group_of_column(index: LazyTensor | None, groups: int) -> Tensor | None:
    if index is None:
        return None
    chosen = index.make().long()
    if int(chosen.min()) < 0 or int(chosen.max()) >= groups:
        raise CheckpointError(f"{index.place} names groups beyond 0 to {groups - 1}")
    return chosen


def _block_of(shape: Shape, scale: LazyTensor, settings: Mapping[str, Any]) -> Shape:
    """Return rows and columns that share a scale.  Raises CheckpointError for unknown blocks."""
    rows, columns = shape
    sizes = [size for size in scale.shape if size != 1]
    if not sizes:
        return shape
    if scale.shape[0] == rows and len(sizes) < 3:
        per_row = sizes[-1] if len(sizes) == 2 or rows == 1 else 1
        if columns % per_row == 0:
            return 1, columns // per_row
    squares = list(_squares(settings))
    for square in squares:
        found = [-(-count // size) for count, size in zip(shape, square, strict=True)]
        if [size for size in found if size != 1] == sizes:
            return square
    expected = [-(-count // size) for count, size in zip(shape, squares[0], strict=True)]
    _check(scale, scale.dtype, expected)
    return squares[0]


def _squares(settings: Mapping[str, Any]) -> Iterator[Shape]:
    """Yield the blocks that ``settings`` name, else DeepSeek V3's and ModelOpt's."""
    named = [("weight_block_size", settings.get("weight_block_size"))]
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            named.append(("block_structure", weights.get("block_structure")))
    for name, block in named:
        if block is None:
            continue
        if not isinstance(block, list) or [type(n) is int and n > 0 for n in block] != [True, True]:
            raise CheckpointError(
                f"config.json has {name} {str(block)[:80]}: two integers above 0 are needed"
            )
        yield block[0], block[1]
    yield 128, 128


def _group_size(settings: Mapping[str, Any], columns: int, scales: LazyTensor) -> int:
    size = settings.get("group_size", -1)
    if type(size) is not int or size == 0 or size < -1:
        raise CheckpointError(
            f"config.json has group_size {str(size)[:80]}: an integer above 0 is needed, or -1"
        )
    size = columns if size == -1 else size
    _check(scales, scales.dtype, (-(-columns // size), scales.shape[1]))
    return size


def _choice(settings: Mapping[str, Any], name: str, choices: tuple[int, ...]) -> int:
    found = settings.get(name)
    if type(found) is not int or found not in choices:
        raise CheckpointError(
            f"config.json has {name} {str(found)[:80]}: {' or '.join(map(str, choices))} is needed"
        )
    return found


def _part(parts: _Parts, *names: str) -> LazyTensor:
    for name in names:
        if name in parts:
            return parts[name]
    raise _incomplete(next(iter(parts.values())).name, names[0])


def _incomplete(name: str, other: str) -> CheckpointError:
    return CheckpointError(
        f"the weights have {name} and no {other}, which belongs to it: a file is missing or "
        "config.json is of another model; get the whole folder again"
    )


def _matrix(tensor: LazyTensor) -> tuple[int, int]:
    if len(tensor.shape) != 2:
        raise CheckpointError(f"{tensor.place} has shape {list(tensor.shape)}: a matrix is needed")
    return tensor.shape[0], tensor.shape[1]


def _check(tensor: LazyTensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    if tensor.dtype != dtype or list(tensor.shape) != list(shape):
        raise CheckpointError(
            f"{tensor.place} is {tensor.dtype} {list(tensor.shape)}: quantization_config in "
            f"config.json asks for {dtype} {list(shape)}; get the whole folder again"
        )
