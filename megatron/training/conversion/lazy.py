"""Lazy tensors: computed one ahead of their use, split into entries, stacked from entries.

A stacked tensor ``name`` [E, ..] has one entry per expert of a layer: ``name.3`` is expert 3's.

Quantized weights are read as bf16.  mxfp4 (gpt-oss): ``name_blocks`` [E, rows, groups, 16] uint8
has two 4-bit values per byte, the low half first; ``name_scales`` [E, rows, groups] uint8 has the
exponent of a power of two, plus 127, for each 32 values.  ``name`` is the transpose of these
matrices: [E, 32 groups, rows].  fp8 (DeepSeek V3): ``name`` [o, i] is in float8_e4m3;
``name_scale_inv`` in float32 has a factor for each block of it (weight_block_size).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.training.conversion.family import Config


def as_lazy(tensors: Mapping[str, Tensor]) -> dict[str, LazyTensor]:
    """Return tensors in memory as lazy ones."""
    return {n: LazyTensor(n, t.dtype, tuple(t.shape), t.detach) for n, t in tensors.items()}


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


@dataclass(frozen=True)
class Entries(LazyTensor):
    """Lazy tensor of which each entry along dimension 0 can be computed alone.

    ``fill`` writes the complete tensor into memory of its shape and dtype.
    """

    make_entry: Callable[[int], Tensor]
    fill: Callable[[Tensor], None] | None = None


def unstacked(weights: Mapping[str, LazyTensor], ends: tuple[str, ...]) -> dict[str, LazyTensor]:
    """Split tensors whose names end with one of ``ends`` into one tensor per entry."""
    out: dict[str, LazyTensor] = {}
    for name, tensor in weights.items():
        if not name.endswith(ends):
            out[name] = tensor
            continue
        for number in range(tensor.shape[0]):
            own = f"{name}.{number}"
            make = partial(entry_of, tensor, number)
            out[own] = LazyTensor(own, tensor.dtype, tensor.shape[1:], make)
    return out


def entry_of(tensor: LazyTensor, number: int) -> Tensor:
    """Compute entry ``number`` along dimension 0."""
    return tensor.make_entry(number) if isinstance(tensor, Entries) else tensor.make()[number]


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


_BLOCKS, _SCALES, _INVERSE = "_blocks", "_scales", "_scale_inv"
_EXPONENT_OF_ONE = 127
# Values of the low three bits: two of exponent, one of mantissa.  The fourth is the sign.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def plain_numbers(weights: Mapping[str, LazyTensor], config: Config) -> dict[str, LazyTensor]:
    """Return ``weights`` with quantized tensors replaced by bf16 ones, dequantized on use.

    Raises CheckpointError for another quantization, and if weights and scales do not match.
    """
    told = config.get("quantization_config")
    out = dict(weights)
    if not told:
        return out
    kind = told.get("quant_method")
    if kind == "mxfp4":
        for name in [name for name in weights if name.endswith(_BLOCKS)]:
            plain = name.removesuffix(_BLOCKS)
            blocks, scales = out.pop(name), _beside(name, plain + _SCALES, out)
            _check_kind(blocks, torch.uint8, 4)
            _check_kind(scales, torch.uint8, 3)
            _check_scales(scales, blocks.shape[:3])
            del out[plain + _SCALES]
            out[plain] = _from_mxfp4(plain, blocks, scales)
    elif kind == "fp8":
        size = told.get("weight_block_size") or [128, 128]
        if not isinstance(size, list) or len(size) != 2 or not all(_is_count(n) for n in size):
            raise CheckpointError(
                f"config.json has weight_block_size {size}: two integers above 0 are needed"
            )
        for name in [name for name in weights if name.endswith(_INVERSE)]:
            plain, scales = name.removesuffix(_INVERSE), out.pop(name)
            weight = _beside(name, plain, weights)
            _check_kind(weight, torch.float8_e4m3fn, 2)
            squares = zip(weight.shape, size, strict=True)
            _check_scales(scales, [-(-count // block) for count, block in squares])
            make = partial(_from_fp8, weight, scales, size)
            out[plain] = LazyTensor(plain, torch.bfloat16, weight.shape, make)
        for name, tensor in out.items():
            if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
                _beside(name, name + _INVERSE, out)
    else:
        raise CheckpointError(
            f"config.json has quant_method {kind}: read are mxfp4 and fp8, or plain weights"
        )
    return out


def _beside(name: str, other: str, weights: Mapping[str, LazyTensor]) -> LazyTensor:
    if other not in weights:
        raise CheckpointError(
            f"the weights have {name} and no {other}, which belongs to it: a file is missing or "
            "config.json is of another model; get the whole folder again"
        )
    return weights[other]


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _check_kind(tensor: LazyTensor, dtype: torch.dtype, dims: int) -> None:
    if tensor.dtype != dtype or len(tensor.shape) != dims:
        raise CheckpointError(
            f"{tensor.name} is {tensor.dtype} {list(tensor.shape)}: quantization_config in "
            f"config.json asks for {dtype} of {dims} dimensions"
        )


def _check_scales(scales: LazyTensor, shape: Sequence[int]) -> None:
    if list(scales.shape) != list(shape):
        raise CheckpointError(
            f"{scales.name} has shape {list(scales.shape)}, its weight needs {list(shape)}: see to "
            "quantization_config in config.json (weight_block_size), or get the whole folder again"
        )


def _from_mxfp4(name: str, blocks: LazyTensor, scales: LazyTensor) -> Entries:
    def make_entry(number: int) -> Tensor:
        return mxfp4_values(entry_of(blocks, number), entry_of(scales, number)).t()

    def make() -> Tensor:
        return torch.stack([make_entry(number) for number in range(blocks.shape[0])])

    count, rows, groups, size = blocks.shape
    shape = (count, 2 * groups * size, rows)
    return Entries(name, torch.bfloat16, shape, make, make_entry)


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantize [.., g, 16] bytes of two values and [.., g] exponents to exact bf16 [.., 32 g]."""
    both = torch.stack((blocks & 0xF, blocks >> 4), -1).flatten(-2).long()
    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    exponents = scales.to(torch.int32).unsqueeze(-1) - _EXPONENT_OF_ONE
    return torch.ldexp(table[both], exponents).flatten(-2).bfloat16()


def _from_fp8(weight: LazyTensor, scales: LazyTensor, size: list[int]) -> Tensor:
    values, factors = weight.make().float(), scales.make()
    for dim, count in enumerate(size):
        factors = factors.repeat_interleave(count, dim).narrow(dim, 0, values.shape[dim])
    return (values * factors).bfloat16()
