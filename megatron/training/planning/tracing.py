"""Count what code allocates and sends while it runs, tensor by tensor.

The same counter works for real tensors and for tensors without memory (meta or fake).  It counts
storages: views cost nothing, and a storage counts until its last tensor is freed.

FSDP2 resizes the storages of gathered parameters without a dispatched operation.  It allocates and
resizes them in phases that begin and end with an operation of ``torch.profiler``: their sizes are
read at these operations.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import global_decomposition_table
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron.core import device
from megatron.core.params.param_info import local_part
from megatron.training.planning.costs import Collective

_aten: Any = torch.ops.aten
_resize: Any = torch.ops.inductor.resize_storage_bytes_.default
_read: Any = _aten._local_scalar_dense.default
_fused_sgd: Any = _aten._fused_sgd_.default
_EXCLUDED = "__dynamo_disable"
_KINDS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "broadcast_": "broadcast",
    "send": "send",
}


class Measured(NamedTuple):
    """Peak and remaining bytes, relative to those alive before, and what was sent."""

    peak: int
    kept: int
    sent: Counter[Collective]


class Tracker(TorchDispatchMode):
    """Dispatch mode that counts collectives, and ``alive`` and ``peak`` bytes of new storages."""

    def __init__(
        self,
        existing: Iterable[Tensor] = (),
        *,
        share_of_true: float = 1.0,
        shapes: KnownShapes | None = None,
    ) -> None:
        """Create a tracker that does not count the storages of ``existing`` tensors.

        ``share_of_true``: assumed fraction of true elements in a condition without values.  The
        ``shapes`` of earlier plans make this one faster.
        """
        TorchDispatchMode.__init__(self)
        self._shapes = shapes or KnownShapes()
        self._share_of_true = share_of_true
        self.alive = self.peak = 0
        self.collectives: Counter[Collective] = Counter()
        self._sizes: dict[int, int] = {}  # bytes of storages allocated inside
        self._ends: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # call `_forget`
        self._existing = {_storage(tensor)._cdata for tensor in existing}
        self._depth = 0  # nesting of FSDP2's phases
        self._resizable: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # made in such a phase

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, which takes a second

    def measure(self, function: Callable[[], object]) -> Measured:
        """Call ``function`` (inside the tracker) and return its cost."""
        self._read_sizes()
        before = self.peak = self.alive
        sent_before = self.collectives.copy()
        function()
        sent = self.collectives - sent_before
        return Measured(self.peak - before, self.alive - before, sent)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        del types
        about = _about(func)
        if about.needs_values and _has_no_memory(args[0] if func is not _fused_sgd else args[0][0]):
            if func is _read:
                return 1  # stands for a finite norm or a passed check
            if func is _fused_sgd:
                return None  # allocates nothing; torch implements it for real tensors only
            count = max(1, round(args[0].numel() * self._share_of_true))
            places = args[0].new_empty((count, args[0].dim()), dtype=torch.int64)
            self._note(places)
            return places
        if about.namespace == "c10d":
            self._note_collective(func, args)
        elif about.namespace in ("fsdp", "profiler"):
            self._read_sizes()
            if about.namespace == "profiler":
                self._depth += 1 if "enter" in func.name() else -1
        out = self._shapes.result(func, args, kwargs or {})
        if func is _resize:
            storage = _storage(args[0])
            if storage._cdata in self._sizes:
                self._set_size(storage._cdata, storage.nbytes())
        for tensor in _tensors(out):
            self._note(tensor)
        return out

    def _read_sizes(self) -> None:
        """Update the sizes that FSDP2 has changed since its last phase began or ended."""
        for key, reference in tuple(self._resizable.items()):
            if (storage := reference()) is not None:
                self._set_size(key, storage.nbytes())

    def _note(self, tensor: Tensor) -> None:
        storage = _storage(tensor)
        key = storage._cdata
        if key not in self._sizes and key not in self._existing:
            self._sizes[key] = 0
            self._set_size(key, storage.nbytes())
            self._ends[key] = weakref.ref(storage, partial(self._forget, key))
            if self._depth:
                self._resizable[key] = weakref.ref(storage)

    def _set_size(self, key: int, size: int) -> None:
        self.alive += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.alive)

    def _forget(self, key: int, _: object) -> None:
        del self._ends[key]
        self.alive -= self._sizes.pop(key)
        self._resizable.pop(key, None)

    def _note_collective(self, func: OpOverload, args: tuple[object, ...]) -> None:
        kind = _KINDS.get(func.name().split("::")[1].split(".")[0])
        groups = [a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a)]
        if kind is None or not groups:
            return
        group = dist.ProcessGroup.unbox(groups[0])
        tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        size = max(t.numel() * t.element_size() for t in tensors)
        self.collectives[Collective(kind, group.group_name, group.size(), size)] += 1


def attention_without_memory(*args: Any, **kwargs: Any) -> Tensor:
    """Call F.scaled_dot_product_attention; for tensors without memory choose a kernel.

    All kernels save the same for backward: the output and a log-sum-exp.  Only GPUs have a kernel
    for a bias with a gradient.
    """
    bias = kwargs["attn_mask"]
    takes_gradient = bias is not None and bias.requires_grad
    if not _has_no_memory(args[0]) or (takes_gradient and not device.is_cuda()):
        return F.scaled_dot_product_attention(*args, **kwargs)
    if takes_gradient:
        rest = True, kwargs["dropout_p"], kwargs["is_causal"]
        kept = _aten._scaled_dot_product_efficient_attention(
            *args, bias.expand(*args[0].shape[:-1], args[1].shape[-2]), *rest, scale=kwargs["scale"]
        )
        kept_out: Tensor = kept[0]
        return kept_out
    out: Tensor = _aten._scaled_dot_product_flash_attention_for_cpu(
        *args,
        kwargs["dropout_p"],
        kwargs["is_causal"],
        attn_mask=kwargs["attn_mask"],
        scale=kwargs["scale"],
    )[0]
    return out


# Module -> what torch's shape functions take from it at each call, if all shapes are integers.
# The modules import sympy, which takes half a second.
_OF_INTEGERS: dict[str, dict[str, Any]] = {
    "sympy": {"Basic": type("Basic", (), {})},
    "torch.utils._sympy.functions": {"Max": max},
    "torch.fx.experimental.symbolic_shapes": {
        "expect_true": bool,
        "free_unbacked_symbols": lambda _: set(),
        "guard_or_false": bool,
        "guard_or_true": bool,
        "guard_size_oblivious": bool,
        "guarding_hint_or_throw": int,
        "has_guarding_hint": lambda _: True,
        "is_nested_int": lambda _: False,
        "statically_known_true": bool,
        "sym_and": lambda *terms: all(terms),
        "sym_eq": operator.eq,
        "sym_or": lambda *terms: any(terms),
    },
}


class _StandIn(ModuleType):
    """Has the names of `_OF_INTEGERS`; every other name ends all stand-ins."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _remove_stand_ins()
        return getattr(importlib.import_module(self.__name__), name)


def _remove_stand_ins() -> None:
    for name in _OF_INTEGERS:
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Do not let torch's shape functions import its compiler or symbolic shapes, which is slow.

    A decorator of theirs imports the compiler at the first call, to exclude them from it, unless
    they have the attribute in which it notes that.
    """
    found: list[object] = [*vars(torch._refs).values(), *vars(torch._refs.nn.functional).values()]
    for table in global_decomposition_table.values():
        found += table.values()
    marked = []
    while found:
        function = found.pop()
        if isinstance(function, FunctionType) and not hasattr(function, _EXCLUDED):
            setattr(function, _EXCLUDED, function)
            marked.append(function)
            found += [cell.cell_contents for cell in function.__closure__ or ()]
    if not _OF_INTEGERS.keys() & sys.modules.keys():
        for name, content in _OF_INTEGERS.items():
            sys.modules[name] = _StandIn(name)
            vars(sys.modules[name]).update(content)
    try:
        yield
    finally:
        _remove_stand_ins()
        for function in marked:
            delattr(function, _EXCLUDED)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of ``tensors``, each storage once."""
    storages = [_storage(tensor) for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return local_part(tensor).untyped_storage()


def _has_no_memory(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


# Returns a view, though its schema does not say so.
_HIDDEN_VIEWS = {_aten._unsafe_view.default, _aten.unsafe_split.Tensor, _aten.unsafe_chunk.default}
# Operations that write values to their first argument, keep its shape and return it.
_WRITES_VALUES = (
    "add_ addcdiv_ addcmul_ addmm_ bernoulli_ clamp_ copy_ div_ fill_ index_add_ lerp_ "
    "masked_fill_ mul_ neg_ normal_ scatter_add_ sqrt_ sub_ uniform_ zero_"
).split()
# The same for `out`, which callers pass in its final shape; torch 2.11 raises on meta tensors.
_WRITES_OUT = {_aten.addmm.dtype_out}


class _Layout(NamedTuple):
    """Shape, strides and dtype of a tensor without memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class KnownShapes:
    """Calls operations, each combination of shapes only once; plans may share one object."""

    def __init__(self) -> None:
        self._known: dict[Hashable, object] = {}  # key -> layouts of the result

    def result(
        self, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """Return what ``func(*args, **kwargs)`` returns, from the cache if possible."""
        about = _about(func)
        if not about.is_pure:
            if about.writes is not None:
                written = kwargs.get("out") if about.writes == "out" else args[0] if args else None
                if _has_only_shape(written):
                    return written
            return func(*args, **kwargs)
        try:
            key = (about, _key(args), *((name, _key(value)) for name, value in kwargs.items()))
        except _NoKeyError:
            return func(*args, **kwargs)
        known = self._known.get(key, key)
        if known is key:
            result = func(*args, **kwargs)
            self._known[key] = _layouts(result)
            return result
        return func(*args, **kwargs) if known is None else _like(known)


class _NoKeyError(Exception):
    """An argument is a tensor with memory."""


def _key(value: object) -> Hashable:
    if isinstance(value, Tensor):
        if not _has_only_shape(value):
            raise _NoKeyError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple([_key(item) for item in value])
    return type(value), value  # 1, 1.0 and True promote types differently


def _layouts(result: object) -> object:
    """Return the layouts of ``result``, None if an equal result cannot be made from them."""
    tensors = list(_tensors(result))
    layouts = tree_map_only(Tensor, lambda t: _Layout(tuple(t.shape), t.stride(), t.dtype), result)
    sizes = [t.untyped_storage().nbytes() for t in tensors]
    made = [t.untyped_storage().nbytes() for t in _tensors(_like(layouts))]
    is_alone = len({t.untyped_storage()._cdata for t in tensors}) == len(tensors)
    is_meta = all(_has_only_shape(t) for t in tensors)
    return layouts if is_meta and is_alone and sizes == made else None


def _like(layouts: object) -> object:
    """Return new tensors without memory in place of ``layouts``."""
    if isinstance(layouts, _Layout):
        return torch.empty_strided(*layouts[:2], dtype=layouts.dtype, device="meta")
    if isinstance(layouts, (tuple, list)):
        return type(layouts)(map(_like, layouts))
    return layouts


def _tensors(out: object) -> Iterable[Tensor]:
    """Return the tensors in the result of an operation."""
    if isinstance(out, Tensor):
        return (out,)
    return [t for item in out for t in _tensors(item)] if isinstance(out, (tuple, list)) else ()


@dataclass(frozen=True, eq=False)
class _Operation:
    """What the tracker must know about an operation."""

    namespace: str
    needs_values: bool
    is_pure: bool  # its result depends on shapes alone and is new
    writes: str | None  # what it writes values into and returns: its first argument or "out"


@cache
def _about(func: OpOverload) -> _Operation:
    schema = func._schema
    no_alias = all(a.alias_info is None for a in (*schema.arguments, *schema.returns))
    takes_tensors = any("Tensor" in str(a.type) for a in schema.arguments)
    name = schema.name.removeprefix("aten::")
    return _Operation(
        namespace=func.namespace,
        needs_values=func in (_read, _fused_sgd, _aten.nonzero.default),
        is_pure=func.namespace == "aten"
        and no_alias
        and takes_tensors
        and func not in _HIDDEN_VIEWS,
        writes="out" if func in _WRITES_OUT else "first" if name in _WRITES_VALUES else None,
    )


def _has_only_shape(tensor: object) -> TypeGuard[Tensor]:
    return isinstance(tensor, Tensor) and tensor.is_meta and not isinstance(tensor, FakeTensor)
