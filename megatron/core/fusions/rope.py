"""Rotary position embedding of queries and keys.

``s`` tokens, ``b`` sequences, ``n`` heads, ``d`` head width, ``r`` <= d rotated width.  Pair i of
the rotated part is (x[i], x[i + r/2]), or (x[2i], x[2i + 1]) if interleaved; it is rotated by the
angle whose cosine and sine are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.autograd import Context, Function
from megatron.core.fusions import kernels


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and sines [s, 1 or b, 1, r/2] of the angle of each pair at each position.

    ``windowed``: the table of layers with a sliding window, if it is another one.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    windowed: RotaryTable | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        more = {} if self.windowed is None else self.windowed.tensors()
        return {"cos": self.cos, "sin": self.sin} | {f"windowed.{n}": t for n, t in more.items()}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> RotaryTable:
        """Return the table with other tensors, which are named as those of `tensors`."""
        windowed = self.windowed
        if windowed is not None:
            own = {n: tensors[f"windowed.{n}"] for n in windowed.tensors()}
            windowed = windowed.with_tensors(own)
        return replace(self, cos=tensors["cos"], sin=tensors["sin"], windowed=windowed)

    def to(self, dtype: torch.dtype) -> RotaryTable:
        """Convert the table to ``dtype``."""
        return self.with_tensors({name: x.to(dtype) for name, x in self.tensors().items()})


def _pairs(x: Tensor, width: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0:width:2], x[..., 1:width:2]
    half = width // 2
    return x[..., :half], x[..., half:width]


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int, fused: bool) -> Tensor:
    """Rotate by the angle times ``sign``; on a CPU four passes over half of ``x``."""
    has_rows = x.dim() == 4 and x.stride(-1) == 1 and cos.shape[::2] == (x.shape[0], 1)
    if fused and has_rows and (found := _kernels("rope", interleaved, x, cos, sin)):
        turned: Tensor = found.turn(x, cos, sin, interleaved, sign)
        return turned
    width = 2 * cos.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    first, second = _pairs(x, width, interleaved)
    out_first, out_second = _pairs(out, width, interleaved)
    torch.mul(first, cos, out=out_first)
    torch.mul(second, cos, out=out_second)
    out_first.addcmul_(second, sin, value=-sign)
    out_second.addcmul_(first, sin, value=sign)
    if width < x.shape[-1]:
        out[..., width:] = x[..., width:]
    return out


_Values = tuple[bool, bool]  # interleaved, fused


class _Rotary(Function[Tensor]):
    @staticmethod
    def forward(
        ctx: Context[_Values], x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, fused: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.values = interleaved, fused
        return _turn(x, cos, sin, interleaved, 1, fused)

    @staticmethod
    def backward(ctx: Context[_Values], grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        interleaved, fused = ctx.values
        return _turn(grad, cos, sin, interleaved, -1, fused), None, None, None, None


def apply_rotary(x: Tensor, table: RotaryTable, *, fused: bool = True) -> Tensor:
    """Rotate [s, b, n, d] -> [s, b, n, d], contiguous."""
    return _Rotary.call(x, table.cos, table.sin, table.interleaved, fused)


Parts = tuple[Tensor, Tensor, Tensor]


class _SplitRotary(Function[Parts]):
    @staticmethod
    def forward(ctx: Context[None], packed: Tensor, cos: Tensor, sin: Tensor, width: int) -> Parts:
        ctx.save_for_backward(cos, sin)
        found: Any = kernels.find("split_rope", packed)
        parts: Parts = found.split_and_turn(packed, width, cos, sin)
        return parts

    @staticmethod
    def backward(ctx: Context[None], *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        rows = tuple(grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        found: Any = kernels.find("split_rope", grads[0])
        return found.turn_and_join(rows, cos, sin), None, None, None


def split_and_rotate(
    packed: Tensor, width: int, table: RotaryTable | None, *, fused: bool
) -> Parts:
    """Split [s, b, g, (r + 2) d] into queries [s, b, g r, d], keys and values [s, b, g, d].

    The r queries of a group precede its key and value; d is ``width``.  ``table`` rotates queries
    and keys, if given.
    """
    if table is not None and fused and packed.is_contiguous():
        has_rows = table.cos.shape[::2] == (packed.shape[0], 1)
        if has_rows and _kernels("split_rope", table.interleaved, packed, table.cos, table.sin):
            return _SplitRotary.call(packed, table.cos, table.sin, width)
    *outer, packed_width = packed.shape
    query, key, value = packed.split_with_sizes([packed_width - 2 * width, width, width], -1)
    if packed_width != 3 * width:
        query = query.reshape(outer[0], outer[1], -1, width)
    if table is not None:
        query, key = (apply_rotary(x, table, fused=fused) for x in (query, key))
    return query, key, value


class _SplitNormRotary(Function[Parts]):
    """Saves the projection alone; backward computes the norms' statistics again."""

    @staticmethod
    def forward(
        ctx: Context[float],
        packed: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        table: RotaryTable,
        eps: float,
        width: int,
    ) -> Parts:
        ctx.save_for_backward(packed, query_weight, key_weight, table.cos, table.sin)
        ctx.values = eps
        at = table.cos, table.sin
        found: Any = kernels.find("split_norm_rope", packed)
        parts: Parts = found.split_and_norm(packed, width, (query_weight, key_weight), eps, at)
        return parts

    @staticmethod
    def backward(ctx: Context[float], *grads: Tensor) -> tuple[Tensor | None, ...]:
        packed, query_weight, key_weight, cos, sin = ctx.saved_tensors
        rows = tuple(grad.contiguous() for grad in grads)
        weights = (query_weight, key_weight)
        found: Any = kernels.find("split_norm_rope", packed)
        return (
            *found.join_gradients(packed, rows, weights, ctx.values, (cos, sin)),
            None,
            None,
            None,
        )


def split_norm_and_rotate(
    packed: Tensor, width: int, table: RotaryTable, weights: tuple[Tensor, Tensor], eps: float
) -> Parts | None:
    """Return `split_and_rotate` with an RMSNorm of each query and key before the rotation.

    ``weights`` [d] are those of queries and of keys.  None if no kernel computes it.
    """
    has_rows = packed.is_contiguous() and table.cos.shape[::2] == (packed.shape[0], 1)
    is_same = all(weight.dtype == packed.dtype for weight in weights)
    tensors = packed, table.cos, table.sin, *weights
    if not has_rows or not is_same or not _kernels("split_norm_rope", table.interleaved, *tensors):
        return None
    return _SplitNormRotary.call(packed, *weights, table, eps, width)


def _kernels(name: str, interleaved: bool, *tensors: Tensor) -> Any:
    """Return the module of kernels that rotates these tensors; None for torch's operations.

    A GPU's kernel took twice the time of torch to interleave pairs (benchmarks/train_gpu.md).
    """
    if interleaved and device.launches_kernels(tensors[0].device):
        return None
    return kernels.find(name, *tensors)
