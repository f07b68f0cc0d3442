"""Cache of the results of operations on meta tensors, by the shapes of their arguments.

torch computes most result shapes in Python, which would take most of the time of a plan.  The
result of an operation that neither returns a view nor writes to an argument depends on shapes,
strides, dtypes and plain values only.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

_aten: Any = torch.ops.aten
# Returns a view, though its schema does not say so.
_HIDDEN_VIEWS = {_aten._unsafe_view.default, _aten.unsafe_split.Tensor, _aten.unsafe_chunk.default}
# Operations that write values to their first argument, keep its shape and return it.
_WRITES_VALUES = (
    "add_ addcdiv_ addcmul_ addmm_ bernoulli_ clamp_ copy_ div_ fill_ index_add_ lerp_ "
    "masked_fill_ mul_ neg_ normal_ scatter_add_ sqrt_ sub_ uniform_ zero_"
).split()
# The same for `out`, which callers pass in its final shape; torch 2.11 raises on meta tensors.
_WRITES_OUT = {_aten.addmm.dtype_out}


@dataclass(frozen=True)
class _Layout:
    """Shape, strides and dtype of a tensor without memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class KnownShapes:
    """Calls operations, each combination of shapes only once; plans may share one object."""

    def __init__(self) -> None:
        self._known: dict[Hashable, object] = {}  # key -> layouts of the result
        self._is_pure: dict[OpOverload, bool] = {}

    def result(
        self, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """Return what ``func(*args, **kwargs)`` returns, from the cache if possible."""
        if func not in self._is_pure:
            self._is_pure[func] = _is_pure(func)
        if not self._is_pure[func]:
            written = kwargs.get("out") if func in _WRITES_OUT else args[0] if args else None
            if _has_only_shape(written) and _writes_values(func):
                return written
            return func(*args, **kwargs)
        try:
            key = (func, _key(args), *((name, _key(value)) for name, value in kwargs.items()))
        except _NoKeyError:
            return func(*args, **kwargs)
        if key not in self._known:
            result = func(*args, **kwargs)
            self._known[key] = _layouts(result)
            return result
        known = self._known[key]
        if known is None:
            return func(*args, **kwargs)
        return tree_map_only(_Layout, _Layout.make, known)


class _NoKeyError(Exception):
    """An argument is a tensor with memory."""


def _key(value: object) -> Hashable:
    if isinstance(value, Tensor):
        if not _has_only_shape(value):
            raise _NoKeyError
        return _layout(value)
    if isinstance(value, (tuple, list)):
        return tuple(_key(item) for item in value)
    return type(value), value  # 1, 1.0 and True promote types differently


def _layout(tensor: Tensor) -> _Layout:
    return _Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _layouts(result: object) -> object:
    """Return the layouts of ``result``, None if an equal result cannot be made from them."""
    tensors = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
    layouts = tree_map_only(Tensor, _layout, result)
    sizes = [t.untyped_storage().nbytes() for t in tensors]
    made = [_layout(t).make().untyped_storage().nbytes() for t in tensors]
    is_alone = len({t.untyped_storage()._cdata for t in tensors}) == len(tensors)
    is_meta = all(_has_only_shape(t) for t in tensors)
    return layouts if is_meta and is_alone and sizes == made else None


def _is_pure(func: OpOverload) -> bool:
    schema = func._schema
    no_alias = all(a.alias_info is None for a in (*schema.arguments, *schema.returns))
    takes_tensors = any("Tensor" in str(a.type) for a in schema.arguments)
    return func.namespace == "aten" and no_alias and takes_tensors and func not in _HIDDEN_VIEWS


def _writes_values(func: OpOverload) -> bool:
    name = func._schema.name.split("::")[1]
    return func in _WRITES_OUT or (func.namespace == "aten" and name in _WRITES_VALUES)


def _has_only_shape(tensor: object) -> TypeGuard[Tensor]:
    return isinstance(tensor, Tensor) and tensor.is_meta and not isinstance(tensor, FakeTensor)
