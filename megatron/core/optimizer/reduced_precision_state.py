"""Optimizer state in fewer bytes than fp32, updated one chunk of elements at a time.

`QuantizedState` stores values in 16 or 8 bits.  The range of fp16 and fp8 is too small for moments,
so each block of 128 values shares a power of two as its scale.  An update rounds stochastically:
with rounding to nearest, a second moment that shrinks by 0.1 % a step would never change, since
the change is less than half a unit of the last place.  The noise is a hash of the step, the upper
half of the parameter and the previously stored bits, which are the same in every layout: results do
not depend on how parameters are sharded, and no random number generator has to be saved.

`SplitMaster` stores an fp32 main parameter as the model's bf16 weight (rounded to nearest, ties
away from zero) and a signed 16-bit remainder; the sum of their bits is the fp32 value, exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from math import prod
from typing import cast

import torch
from torch import Tensor

from megatron.core import device

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}


def dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    """Return the type of stored state that a field of OptimizerConfig names."""
    if isinstance(dtype, str):
        return DTYPES[dtype]
    return torch.float8_e4m3fn if dtype == torch.uint8 else dtype  # Megatron Core's FP8


def is_fp32(dtype: torch.dtype | str) -> bool:
    """Return whether a field of OptimizerConfig names fp32."""
    return dtype_of(dtype) == DTYPES["fp32"]


_BLOCK = 128  # values that share an exponent
_MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float8_e4m3fn: 3}
# Exponent of a block's largest value after scaling: one below the format's largest exponent.
_TOP = {torch.float16: 14, torch.float8_e4m3fn: 7}
_SMALLEST = {torch.float16: 2.0**-24, torch.float8_e4m3fn: 2.0**-9}
_BITS = {1: torch.int8, 2: torch.int16}
# Elements updated at a time: their temporary fp32 copies stay in a CPU's cache.
_STRETCH_CPU = 2**17
_STRETCH_GPU = 2**26


class StateStorage(ABC):
    """Values of ``shape`` that are read and written as fp32; ``tensors`` are their storage."""

    def __init__(self, shape: torch.Size, tensors: Sequence[Tensor]) -> None:
        self.shape = shape
        self.tensors = tuple(tensors)

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> StateStorage:
        """Return a storage on ``device`` with these values; if they are there, this one."""
        places = {id(t): t.to(device, non_blocking=non_blocking) for t in self.tensors}
        if all(place is t for place, t in zip(places.values(), self.tensors, strict=True)):
            return self
        moved = copy(self)
        for name, value in vars(self).items():
            if id(value) in places:
                setattr(moved, name, places[id(value)])
        moved.tensors = tuple(places.values())
        return moved

    def read(self) -> Tensor:
        """Return all values, in fp32."""
        return self.stretch(0, prod(self.shape)).view(self.shape)

    def write(self, values: Tensor) -> None:
        """Replace all values, rounding to nearest; writing the result of `read` changes nothing."""
        self.put(0, values.detach().reshape(-1))

    @abstractmethod
    def stretch(self, start: int, stop: int) -> Tensor:
        """Return the elements ``start`` (a multiple of 128) to ``stop``, flat, in fp32."""

    @abstractmethod
    def put(self, start: int, values: Tensor, chance: Tensor | None = None) -> None:
        """Replace the elements from ``start`` on.

        With ``chance`` (int32 hashes, one per element) round stochastically, else to nearest.
        Overwrites ``values`` as scratch memory.
        """


class QuantizedState(StateStorage):
    """Values in 16 or 8 bits.

    ``is_square``: store the square root, whose exponents span half the range (second moments).
    """

    def __init__(self, like: Tensor, dtype: torch.dtype, *, is_square: bool = False) -> None:
        self.is_square = is_square and dtype in _TOP
        blocks = -(-like.numel() // _BLOCK)
        self.values = torch.zeros(blocks * _BLOCK, dtype=dtype, device=like.device)
        kept = [self.values]
        self.exponents: Tensor | None = None
        if dtype in _TOP:
            self.exponents = torch.zeros(blocks, dtype=torch.int8, device=like.device)
            kept.append(self.exponents)
        super().__init__(like.shape, kept)

    def stretch(self, start: int, stop: int) -> Tensor:
        values = self.values[start : start + _padded(stop - start)].float()
        if self.values.dtype in _TOP:
            values.view(-1, _BLOCK).mul_(
                _power_of_2(self._exponents(start, values.numel()))[:, None]
            )
        if self.is_square:
            values.square_()
        return values[: stop - start]

    def put(self, start: int, values: Tensor, chance: Tensor | None = None) -> None:
        dtype = self.values.dtype
        kept = self.values[start : start + len(values)]
        above_zero = values > 0 if self.is_square else None
        if dtype in _TOP:
            values = self._scaled(start, values.sqrt() if self.is_square else values)
        if chance is not None:
            values = _with_noise(values, kept, chance)
        # A second moment that rounds to 0 would make Adam divide by eps alone: a huge update.
        if above_zero is not None:
            values = torch.where(above_zero, values.clamp(min=_SMALLEST[dtype]), values)
        kept.copy_(values)

    def _scaled(self, start: int, values: Tensor) -> Tensor:
        """Store the blocks' exponents, and return ``values`` divided by these powers of two."""
        dtype = self.values.dtype
        count = len(values)
        blocks = torch.zeros(_padded(count), device=values.device)
        blocks[:count] = values
        blocks = blocks.view(-1, _BLOCK)
        top = _TOP[dtype]
        largest = blocks.abs().amax(1)
        exponents = ((largest.view(torch.int32) >> 23) - 127 - top).clamp_(-126, 126 - top)
        self._exponents(start, blocks.numel()).copy_(exponents)
        # A value that rounded up to the next power of two would give the block another exponent
        # when it is written again, and the same values would then round differently.
        limit = (2.0 - 2.0 ** -_MANTISSA_BITS[dtype]) * 2.0**top
        blocks.mul_(_power_of_2(-exponents)[:, None]).clamp_(-limit, limit)
        return blocks.view(-1)[:count]

    def _exponents(self, start: int, count: int) -> Tensor:
        assert self.exponents is not None, "these numbers need none"
        return self.exponents[start // _BLOCK : (start + count) // _BLOCK]


class SplitMaster(StateStorage):
    """fp32 main parameters: the model's bf16 weight, and the 16-bit remainder in ``lower``."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.view(-1)
        self.lower = torch.zeros_like(self.weight, dtype=torch.int16)
        super().__init__(weight.shape, [self.lower])

    def stretch(self, start: int, stop: int) -> Tensor:
        values = self.weight[start:stop].float()
        values.view(torch.int32).add_(self.lower[start:stop].int())
        return values

    def put(self, start: int, values: Tensor, chance: Tensor | None = None) -> None:
        bits = values.contiguous().view(torch.int32)
        stop = start + len(values)
        # Adding half a unit rounds the magnitude to nearest.  `lower` takes the low 16 bits as a
        # signed number: negative exactly where the upper half was rounded up by one.
        upper = (bits + 0x8000).bitwise_right_shift_(16)
        self.weight[start:stop].view(torch.int16).copy_(upper)
        self.lower[start:stop].copy_(bits)


class SideMaster(StateStorage):
    """Main parameters in a `QuantizedState`; each update also writes the rounded 16-bit weight."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight = weight.view(-1)
        self.main = QuantizedState(weight, dtype)
        super().__init__(weight.shape, self.main.tensors)
        self.write(weight.float())

    def stretch(self, start: int, stop: int) -> Tensor:
        return self.main.stretch(start, stop)

    def put(self, start: int, values: Tensor, chance: Tensor | None = None) -> None:
        self.main.put(start, values, chance)
        stop = start + len(values)
        self.weight[start:stop] = self.main.stretch(start, stop)


@dataclass
class StateChunk:
    """Elements of one or more parameters that one kernel call updates, in the update's dtype."""

    values: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    _read: list[tuple[StateStorage, int, Tensor, Tensor | None]] = field(default_factory=list)

    def add(
        self,
        param: Tensor,
        grad: Tensor,
        state: Mapping[str, Tensor | StateStorage],
        span: slice,
        step: Tensor,
    ) -> None:
        """Add the elements ``span`` of a parameter, converted to fp32, for update ``step``."""
        kept = {"main": param, **state}
        kept.pop("step", None)
        stored = {key: each for key, each in kept.items() if isinstance(each, StateStorage)}
        parts = {key: each.stretch(span.start, span.stop) for key, each in stored.items()}
        parts |= {k: each.view(-1)[span] for k, each in kept.items() if isinstance(each, Tensor)}
        main = parts.pop("main")
        chance = None
        # The factors are odd constants of an integer hash.  Only the upper half of the parameter
        # enters, which a bf16 weight and its fp32 master have in common.
        if any(not isinstance(each, SplitMaster) for each in stored.values()):
            chance = (main.view(torch.int32) >> 16).add_(step.int() * 0x2545F491).mul_(0x165667B1)
        self.values.append(main)
        self.grads.append(grad.reshape(-1)[span].to(main.dtype))
        self.states.append({"step": step, **parts})
        read = {"main": main, **parts}
        self._read += [(each, span.start, read[key], chance) for key, each in stored.items()]

    def put_back(self) -> None:
        """Store the updated values in reduced precision."""
        for kept, start, values, chance in self._read:
            kept.put(start, values, chance)


def is_plain(param: Tensor, grad: Tensor, state: Mapping[str, Tensor | StateStorage]) -> bool:
    """Return whether the update kernel can use all of these tensors without conversion."""
    return grad.dtype == param.dtype and all(isinstance(kept, Tensor) for kept in state.values())


def stretches(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor | StateStorage]],
    step: Tensor,
) -> Iterator[StateChunk]:
    """Yield all elements in chunks, which bound the memory of temporary fp32 copies.

    The caller updates a chunk and calls `StateChunk.put_back` before it takes the next one.  State
    that needs no conversion is not split.
    """
    length = _STRETCH_GPU if device.is_cuda(params[0].device) else _STRETCH_CPU
    chunk = StateChunk()
    filled = 0
    for param, grad, state in zip(params, grads, states, strict=True):
        if is_plain(param, grad, state):
            chunk.values.append(param)
            chunk.grads.append(grad)
            chunk.states.append(cast(dict[str, Tensor], state))
            continue
        for start in range(0, max(1, param.numel()), length):
            span = slice(start, min(start + length, param.numel()))
            chunk.add(param, grad, state, span, step)
            filled += span.stop - span.start
            if filled >= length:
                yield chunk
                chunk = StateChunk()
                filled = 0
    if chunk.values:
        yield chunk


def _padded(count: int) -> int:
    return -(-count // _BLOCK) * _BLOCK


def _power_of_2(exponents: Tensor) -> Tensor:
    """Return 2 ** exponents in fp32, for exponents from -126 to 127."""
    return ((exponents.int() + 127) << 23).view(torch.float32)


def _with_noise(values: Tensor, before: Tensor, chance: Tensor) -> Tensor:
    """Round fp32 ``values`` stochastically to the mantissa of ``before``'s dtype.

    Adds uniform noise below the last mantissa bit that is stored, then truncates: the value rounds
    up with a probability equal to the fraction that is cut off.  ``before`` is the stored value
    that ``values`` replace.
    """
    kept_bits = _MANTISSA_BITS[before.dtype] + 9  # sign, 8 bits of exponent, mantissa
    noise = before.view(_BITS[before.dtype.itemsize]).int().mul_(0x9E3779B)
    noise.bitwise_xor_(chance).mul_(0x27D4EB2F).bitwise_right_shift_(kept_bits)
    noise.bitwise_and_((1 << (32 - kept_bits)) - 1)
    bits = values.view(torch.int32).add_(noise)
    return bits.bitwise_and_(-(1 << (32 - kept_bits))).view(torch.float32)
