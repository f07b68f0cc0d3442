"""Optimizer state in fewer bytes than fp32, and updates of it a stretch at a time.

`QuantizedState` keeps values in 16 or 8 bits.  fp16 and fp8 have too little range: every
128 numbers share a power of two.  An update rounds stochastically, since rounding to nearest would
leave a second moment that shrinks by a thousandth a step where it is for ever.  The noise is a
hash of the step, the upper half of the parameter and the number that was kept before: what all
layouts share.

`SplitMaster` is an fp32 value whose upper half is the bf16 weight of the layers: rounded to
nearest, ties away from zero.  The 16 bits of the remainder make it whole, to the bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
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
_BLOCK = 128  # numbers that share an exponent
_MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float8_e4m3fn: 3}
# Exponent that the largest number of a block is brought to: one below the format's own.
_TOP = {torch.float16: 14, torch.float8_e4m3fn: 7}
_SMALLEST = {torch.float16: 2.0**-24, torch.float8_e4m3fn: 2.0**-9}
_BITS = {1: torch.int8, 2: torch.int16}
# Elements updated at a time: what is made of them in fp32 stays in a CPU's cache.
_STRETCH_CPU = 2**17
_STRETCH_GPU = 2**26


class StateStorage(ABC):
    """Numbers of ``shape`` that count as fp32; ``tensors``: what they are kept in."""

    def __init__(self, shape: torch.Size, tensors: Sequence[Tensor]) -> None:
        self.shape = shape
        self.tensors = tuple(tensors)

    def read(self) -> Tensor:
        """All numbers, in fp32."""
        return self.stretch(0, prod(self.shape)).view(self.shape)

    def write(self, values: Tensor) -> None:
        """Replace all, rounding to nearest; what was read comes back to the bit."""
        self.put(0, values.detach().reshape(-1))

    @abstractmethod
    def stretch(self, start: int, stop: int) -> Tensor:
        """Elements ``start`` (a multiple of 128) to ``stop``, flat."""

    @abstractmethod
    def put(self, start: int, values: Tensor, chance: Tensor | None = None) -> None:
        """Replace the elements from ``start`` on, rounding up or down by ``chance`` (int32).

        ``values`` are of no use afterwards.
        """


class QuantizedState(StateStorage):
    """Numbers in 16 or 8 bits.  ``is_square``: the root is kept, which spans half the range."""

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
        dtype, kept = self.values.dtype, self.values[start : start + len(values)]
        above_zero = values > 0 if self.is_square else None
        if dtype in _TOP:
            values = self._scaled(start, values.sqrt() if self.is_square else values)
        if chance is not None:
            values = _with_noise(values, kept, chance)
        if above_zero is not None:  # a moment of 0 makes an update as long as 1 / eps
            values = torch.where(above_zero, values.clamp(min=_SMALLEST[dtype]), values)
        kept.copy_(values)

    def _scaled(self, start: int, values: Tensor) -> Tensor:
        """``values`` over the powers of two of their blocks, which are written."""
        dtype, count = self.values.dtype, len(values)
        blocks = torch.zeros(_padded(count), device=values.device)
        blocks[:count] = values
        blocks, top = blocks.view(-1, _BLOCK), _TOP[dtype]
        largest = blocks.abs().amax(1)
        exponents = ((largest.view(torch.int32) >> 23) - 127 - top).clamp_(-126, 126 - top)
        self._exponents(start, blocks.numel()).copy_(exponents)
        # What rounds up to the next power of two would have another exponent when read again.
        limit = (2.0 - 2.0 ** -_MANTISSA_BITS[dtype]) * 2.0**top
        blocks.mul_(_power_of_2(-exponents)[:, None]).clamp_(-limit, limit)
        return blocks.view(-1)[:count]

    def _exponents(self, start: int, count: int) -> Tensor:
        assert self.exponents is not None, "these numbers need none"
        return self.exponents[start // _BLOCK : (start + count) // _BLOCK]


class SplitMaster(StateStorage):
    """Main parameters in fp32: a bf16 weight and 16 bits beside it."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.view(-1)
        self.lower = torch.zeros_like(self.weight, dtype=torch.int16)
        super().__init__(weight.shape, [self.lower])

    def stretch(self, start: int, stop: int) -> Tensor:
        values = self.weight[start:stop].float()
        values.view(torch.int32).add_(self.lower[start:stop].int())
        return values

    def put(self, start: int, values: Tensor, chance: Tensor | None = None) -> None:
        bits, stop = values.contiguous().view(torch.int32), start + len(values)
        upper = (bits + 0x8000).bitwise_right_shift_(16)
        self.weight[start:stop].view(torch.int16).copy_(upper)
        self.lower[start:stop].copy_(bits)


class SideMaster(StateStorage):
    """Main parameters of fewer bits beside the 16-bit weight, which is what they round to."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight, self.main = weight.view(-1), QuantizedState(weight, dtype)
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
    """Numbers of one or many parameters that are updated at once, in the precision of the step."""

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
        """Take the elements ``span`` of a parameter, for the update number ``step``."""
        flat = {key: kept for key, kept in state.items() if key != "step"}
        parts = {key: _part_of(kept, span) for key, kept in {"main": param, **flat}.items()}
        main = parts.pop("main")
        changed = {key: kept for key, kept in flat.items() if isinstance(kept, StateStorage)}
        chance = None
        if any(not isinstance(kept, SplitMaster) for kept in changed.values()):
            chance = (main.view(torch.int32) >> 16).add_(step.int() * 0x2545F491).mul_(0x165667B1)
        taken = {"main": main, **parts}
        self._read += [(kept, span.start, taken[k], chance) for k, kept in changed.items()]
        self.values.append(main)
        self.grads.append(grad.reshape(-1)[span].to(main.dtype))
        self.states.append({"step": step, **parts})

    def put_back(self) -> None:
        """Keep what was updated."""
        for kept, start, values, chance in self._read:
            kept.put(start, values, chance)


def is_all_plain(param: Tensor, grad: Tensor, state: Mapping[str, Tensor | StateStorage]) -> bool:
    """Whether nothing has to be converted."""
    return grad.dtype == param.dtype and not any(
        isinstance(s, StateStorage) for s in state.values()
    )


def stretches(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor | StateStorage]],
    step: Tensor,
) -> Iterator[StateChunk]:
    """All elements, cut where state has to be converted, so that little is there in fp32 at once.

    Whoever takes a stretch puts it back before the next.
    """
    length = _STRETCH_GPU if device.is_cuda(params[0].device) else _STRETCH_CPU
    are_plain = [is_all_plain(*each) for each in zip(params, grads, states, strict=True)]
    if all(are_plain):
        yield StateChunk(list(params), list(grads), cast(list[dict[str, Tensor]], list(states)))
        return
    stretch, filled = StateChunk(), 0
    for param, grad, state, is_plain in zip(params, grads, states, are_plain, strict=True):
        width = max(1, param.numel()) if is_plain else length
        for start in range(0, max(1, param.numel()), width):
            span = slice(start, min(start + width, param.numel()))
            stretch.add(param, grad, state, span, step)
            filled += 0 if is_plain else span.stop - span.start
            if filled >= length:
                yield stretch
                stretch, filled = StateChunk(), 0
    if stretch.values:
        yield stretch


def _part_of(kept: Tensor | StateStorage, span: slice) -> Tensor:
    return (
        kept.stretch(span.start, span.stop)
        if isinstance(kept, StateStorage)
        else kept.view(-1)[span]
    )


def _padded(count: int) -> int:
    return -(-count // _BLOCK) * _BLOCK


def _power_of_2(exponents: Tensor) -> Tensor:
    """2 ** exponents, for -126 to 127."""
    return ((exponents.int() + 127) << 23).view(torch.float32)


def _with_noise(values: Tensor, before: Tensor, chance: Tensor) -> Tensor:
    """fp32 ``values`` cut to the bits of what was kept ``before``, up or down by ``chance``."""
    kept_bits = _MANTISSA_BITS[before.dtype] + 9
    noise = before.view(_BITS[before.dtype.itemsize]).int().mul_(0x9E3779B)
    noise.bitwise_xor_(chance).mul_(0x27D4EB2F).bitwise_right_shift_(kept_bits)
    noise.bitwise_and_((1 << (32 - kept_bits)) - 1)
    bits = values.view(torch.int32).add_(noise)
    return bits.bitwise_and_(-(1 << (32 - kept_bits))).view(torch.float32)
