"""Rotary position embedding of queries and keys.

``s`` tokens, ``b`` sequences, ``n`` heads, ``d`` head width, ``r`` <= d rotated width.  Pair i of
the rotated part is (x[i], x[i + r/2]), or (x[2i], x[2i + 1]) if interleaved; it is rotated by the
angle whose cosine and sine are given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.autograd import Context, Function
from megatron.core.fusions import kernels


class RotaryTable(NamedTuple):
    """Cosines and sines [s, 1 or b, 1, r/2] of the angle of each pair at each position.

    ``windowed``: the table of layers with a sliding window, if it is another one.
    ``query_scale`` [s, 1 or b, 1, 1]: factor of the queries at each position, if they have one.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    windowed: RotaryTable | None = None
    query_scale: Tensor | None = None

    def scaled(self, query: Tensor) -> Tensor:
        """Multiply queries [s, b, n, d] by the factor of their position."""
        return query if self.query_scale is None else query * self.query_scale


def apply_rotary(x: Tensor, table: RotaryTable, *, fused: bool = True) -> Tensor:
    """Rotate [s, b, n, d] -> [s, b, n, d], contiguous."""
    return _Rotary.call(x, table.cos, table.sin, table.interleaved, fused)[0]


Parts = tuple[Tensor, ...]  # queries, keys and values
Norm = Callable[[Tensor], Tensor]


def split_and_rotate(
    packed: Tensor,
    width: int,
    table: RotaryTable | None,
    norms: tuple[Norm | None, Norm | None] = (None, None),
    *,
    fused: bool,
) -> Parts:
    """Split [s, b, g, (r + 2) d] into queries [s, b, g r, d], keys and values [s, b, g, d].

    The r queries of a group precede its key and value; d is ``width``.  ``norms`` are applied to
    queries and keys, then ``table`` rotates them, if given.
    """
    if table is not None and fused and norms == (None, None):
        has_rows = packed.is_contiguous() and table.cos.shape[::2] == (packed.shape[0], 1)
        is_on_gpu = device.launches_kernels(packed.device)
        tensors = packed, table.cos, table.sin
        if has_rows and is_on_gpu and _kernels(table.interleaved, *tensors):
            return _Rotary.call(packed, table.cos, table.sin, False, True, width)
    *outer, packed_width = packed.shape
    query, key, value = packed.split_with_sizes([packed_width - 2 * width, width, width], -1)
    if packed_width != 3 * width:
        query = query.reshape(outer[0], outer[1], -1, width)
    norm_query, norm_key = norms
    query = query if norm_query is None else norm_query(query)
    key = key if norm_key is None else norm_key(key)
    if table is not None:
        query, key = (apply_rotary(x, table, fused=fused) for x in (query, key))
    return query, key, value


_Values = tuple[bool, bool, int]  # interleaved, fused and width


class _Rotary(Function[Parts]):
    """Rotate heads, or with ``width`` what `split_and_rotate` splits from a packed projection."""

    @staticmethod
    def forward(
        ctx: Context[_Values],
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        fused: bool,
        width: int = 0,
    ) -> Parts:
        ctx.values = interleaved, fused, width
        ctx.save_for_backward(cos, sin)
        if not width:
            return (_rotate(x, cos, sin, interleaved, 1, fused),)
        parts: Parts = _kernels(False, x).split(x, width, (cos, sin))
        return parts

    @staticmethod
    def backward(ctx: Context[_Values], *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        interleaved, fused, width = ctx.values
        if not width:
            return _rotate(grads[0], cos, sin, interleaved, -1, fused), *(None,) * 4
        rows = tuple(grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        return _kernels(False, grads[0]).join(rows, (cos, sin)), *(None,) * 5


def _rotate(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int, fused: bool
) -> Tensor:
    """Rotate by the angle times ``sign``; on a CPU four passes over half of ``x``."""
    has_rows = x.dim() == 4 and x.stride(-1) == 1 and cos.shape[::2] == (x.shape[0], 1)
    if fused and has_rows and (found := _kernels(interleaved, x, cos, sin)):
        rotated: Tensor = found.rotate(x, cos, sin, interleaved, sign)
        return rotated
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


def _pairs(x: Tensor, width: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0:width:2], x[..., 1:width:2]
    half = width // 2
    return x[..., :half], x[..., half:width]


def _kernels(interleaved: bool, *tensors: Tensor) -> Any:
    """Return the module of kernels that rotates these tensors; None for torch's operations.

    A GPU's kernel took twice the time of torch to interleave pairs (benchmarks/train_gpu.md).
    """
    if interleaved and device.launches_kernels(tensors[0].device):
        return None
    return kernels.find("rope", *tensors)
