"""Lazy tensors: computed one ahead of their use, split into entries, stacked from entries.

A stacked tensor ``name`` [E, ..] has one entry per expert of a layer: ``name.3`` is expert 3's.

Quantized weights are read as bf16.  mxfp4 (gpt-oss): ``name_blocks.3`` [rows, groups, 16] uint8
has two 4-bit values per byte, the low half first; ``name_scales.3`` [rows, groups] uint8 has the
exponent of a power of two, plus 127, for each 32 values.  ``name.3`` is the transpose of these
matrices: [32 groups, rows].  fp8 (DeepSeek V3): ``name`` [o, i] is in float8_e4m3;
``name_scale_inv`` in float32 has a factor for each block of it (weight_block_size).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.progress import Progress


def as_lazy(tensors: Mapping[str, Tensor]) -> dict[str, LazyTensor]:
    """Return tensors in memory as lazy ones."""
    return {n: LazyTensor(n, t.dtype, tuple(t.shape), t.detach) for n, t in tensors.items()}


def zeros(name: str, shape: Sequence[int], dtype: torch.dtype) -> LazyTensor:
    """Return a tensor of zeros."""
    return LazyTensor(name, dtype, tuple(shape), partial(torch.zeros, shape, dtype=dtype))


def reshaped(tensor: LazyTensor, shape: tuple[int, ...]) -> LazyTensor:
    """Return a tensor with another shape."""
    return replace(tensor, shape=shape, make=lambda: tensor.make().reshape(shape))


def first_rows(tensor: LazyTensor, count: int) -> LazyTensor:
    """Return at most ``count`` rows of a tensor."""
    if tensor.shape[0] <= count:
        return tensor
    return replace(tensor, shape=(count, *tensor.shape[1:]), make=lambda: tensor.make()[:count])


def made_ahead(tensors: Sequence[LazyTensor]) -> list[LazyTensor]:
    """Return ``tensors`` such that a thread computes each while the previous one is in use.

    Make them in this order.  Two are in memory at a time.
    """
    thread = ThreadPoolExecutor(1, "tensor ahead")
    coming: dict[int, Future[Tensor]] = {}

    def take(index: int) -> Tensor:
        """Wait for tensor ``index`` and start to compute the next."""
        made = coming.pop(index, None) or thread.submit(tensors[index].make)
        tensor = made.result()
        if index + 1 < len(tensors):
            coming[index + 1] = thread.submit(tensors[index + 1].make)
        return tensor

    return [replace(tensor, make=partial(take, i)) for i, tensor in enumerate(tensors)]


def counted(tensors: Sequence[LazyTensor], progress: Progress) -> list[LazyTensor]:
    """Return ``tensors`` that add their GB to ``progress`` when they have been computed."""

    def make(tensor: LazyTensor) -> Tensor:
        made = tensor.make()
        progress.add(tensor.num_bytes / 1e9)
        return made

    return [replace(tensor, make=partial(make, tensor)) for tensor in tensors]


def unstacked(weights: Mapping[str, LazyTensor], ends: tuple[str, ...]) -> dict[str, LazyTensor]:
    """Split tensors whose names end with one of ``ends`` into one tensor per entry."""
    out: dict[str, LazyTensor] = {}
    for name, tensor in weights.items():
        if not name.endswith(ends) or not tensor.shape:
            out[name] = tensor
            continue
        for number in range(tensor.shape[0]):
            own = f"{name}.{number}"
            make = partial(_entry_of, tensor, number)
            out[own] = LazyTensor(own, tensor.dtype, tensor.shape[1:], make)
    return out


def _entry_of(tensor: LazyTensor, number: int) -> Tensor:
    return tensor.make()[number]


def stacked(tensors: Iterable[LazyTensor], ends: tuple[str, ...]) -> list[LazyTensor]:
    """Undo `unstacked`: stack ``name.0``, ``name.1``, .. into ``name``.

    Entries of a tensor must come in the order of their numbers.
    """
    parts: dict[str, list[LazyTensor]] = {}
    for tensor in tensors:
        name = tensor.name.rpartition(".")[0]
        name = name if name.endswith(ends) else tensor.name
        parts.setdefault(name, []).append(tensor)
    return [
        of_one[0]
        if of_one[0].name == name
        else replace(
            of_one[0],
            name=name,
            shape=(len(of_one), *of_one[0].shape),
            make=partial(_together, of_one),
        )
        for name, of_one in parts.items()
    ]


def _together(parts: list[LazyTensor]) -> Tensor:
    """Stack ``parts``, computed one at a time so that only one is in memory beside the result."""
    whole = torch.empty((len(parts), *parts[0].shape), dtype=parts[0].dtype)
    for place, part in zip(whole, parts, strict=True):
        place.copy_(part.make())
    return whole


def shared_parts(make: Callable[[], list[Tensor]], count: int) -> list[Callable[[], Tensor]]:
    """Return one function for each of the ``count`` tensors that one call of ``make`` returns.

    The results stay in memory until the last function is called: call them in order.
    """
    kept: list[Tensor] = []

    def take(index: int) -> Tensor:
        if not kept:
            kept.extend(make())
        part = kept[index]
        if index == count - 1:
            kept.clear()
        return part

    return [partial(take, index) for index in range(count)]


_BLOCKS = re.compile(r"(.*)_blocks(\.\d+)")
_SCALES = "_scales"
_INVERSE = "_scale_inv"
_EXPONENT_OF_ONE = 127
# Values of the low three bits: two of exponent, one of mantissa.  The fourth is the sign.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def plain_numbers(
    weights: Mapping[str, LazyTensor], config: Mapping[str, Any]
) -> dict[str, LazyTensor]:
    """Return `unstacked` ``weights``, quantized ones as bf16 tensors that are dequantized on use.

    Raises CheckpointError for another quantization, and if weights and scales do not match.
    """
    settings = config.get("quantization_config") or {}
    kind = settings.get("quant_method") if settings else ""
    if kind not in ("", "mxfp4", "fp8"):
        raise CheckpointError(
            f"config.json has quant_method {kind}: read are mxfp4 and fp8, or plain weights"
        )
    block = settings.get("weight_block_size") or [128, 128]
    if not isinstance(block, list) or [type(n) is int and n > 0 for n in block] != [True, True]:
        raise CheckpointError(
            f"config.json has weight_block_size {block}: two integers above 0 are needed"
        )
    out = dict(weights)
    for name, tensor in weights.items():
        if kind == "mxfp4" and (found := _BLOCKS.fullmatch(name)):
            other = found[1] + _SCALES + found[2]
            scales = _beside(name, other, weights)
            _check(tensor, torch.uint8, [*tensor.shape[:2], 16])
            _check(scales, torch.uint8, tensor.shape[:2])
            plain = found[1] + found[2]
            shape = (32 * tensor.shape[1], tensor.shape[0])
            make = partial(_from_mxfp4, tensor, scales)
            out[plain] = LazyTensor(plain, torch.bfloat16, shape, make)
            del out[name], out[other]
        elif kind == "fp8" and name.endswith(_INVERSE):
            weight = _beside(name, name.removesuffix(_INVERSE), weights)
            _check(weight, torch.float8_e4m3fn, weight.shape)
            del out[name]
        elif kind == "fp8" and tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
            scales = _beside(name, name + _INVERSE, weights)
            _check(tensor, torch.float8_e4m3fn, (*tensor.shape, 1, 1)[:2])  # a matrix
            squares = zip(tensor.shape, block, strict=True)
            _check(scales, scales.dtype, [-(-count // size) for count, size in squares])
            make = partial(_from_fp8, tensor, scales, block)
            out[name] = replace(tensor, dtype=torch.bfloat16, make=make)
    return out


def _beside(name: str, other: str, weights: Mapping[str, LazyTensor]) -> LazyTensor:
    if other not in weights:
        raise CheckpointError(
            f"the weights have {name} and no {other}, which belongs to it: a file is missing or "
            "config.json is of another model; get the whole folder again"
        )
    return weights[other]


def _check(tensor: LazyTensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    if tensor.dtype != dtype or list(tensor.shape) != list(shape):
        raise CheckpointError(
            f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}: quantization_config in "
            f"config.json asks for {dtype} {list(shape)}; get the whole folder again"
        )


def _from_mxfp4(blocks: LazyTensor, scales: LazyTensor) -> Tensor:
    """Return the exact bf16 values of [rows, groups, 16] bytes and [rows, groups] exponents."""
    values = blocks.make()
    both = torch.stack((values & 0xF, values >> 4), -1).flatten(-2).long()
    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    exponents = scales.make().to(torch.int32).unsqueeze(-1) - _EXPONENT_OF_ONE
    return torch.ldexp(table[both], exponents).flatten(-2).bfloat16().t()


def _from_fp8(weight: LazyTensor, scales: LazyTensor, block: list[int]) -> Tensor:
    values, factors = weight.make().float(), scales.make()
    for dim, count in enumerate(block):
        factors = factors.repeat_interleave(count, dim).narrow(dim, 0, values.shape[dim])
    return (values * factors).bfloat16()
