"""Types for custom autograd functions, which torch does not annotate."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

R = TypeVar("R", covariant=True)
V = TypeVar("V")
# Bound once: every layer asks several times.
_is_compiling = torch.compiler.is_compiling
_is_transforming = torch._C._are_functorch_transforms_active


class Function(torch.autograd.Function, Generic[R]):
    """Subclass of `torch.autograd.Function` whose ``apply`` returns R."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: object) -> R: ...

    _apply_in_c: ClassVar[Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        base: Any = super(torch.autograd.Function, cls)
        cls._apply_in_c = base.apply

    @classmethod
    def call(cls, *args: object) -> R:
        """Do what ``apply`` does, without torch's Python code around it, which takes 2 to 3 us.

        That code binds defaults of functions with ``setup_context``, which these do not have, and
        unwraps tensors of ended functorch transforms (vmap, grad).  torch.compile knows ``apply``.
        """
        if _is_compiling() or _is_transforming():
            return cls.apply(*args)
        result: R = cls._apply_in_c(*args)
        return result


class Context(Protocol[V]):
    """Type of the context, the first argument of ``forward`` and ``backward``.

    ``values``: objects that forward passes to backward besides saved tensors.  Autograd frees saved
    tensors after backward, and raises if one was changed in place.  Parameters are passed in
    ``values`` if backward needs the parameter objects themselves.
    """

    values: V
    needs_input_grad: tuple[bool, ...]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...
    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


class ThreadLocal(Generic[V]):
    """A value per thread; autograd copies it to the threads in which it runs a backward pass."""

    def __init__(self, key: str) -> None:
        self._key = key

    def get(self) -> V | None:
        """Return this thread's value; None if none was set."""
        return torch._C._get_obj_in_tls(self._key) if torch._C._is_key_in_tls(self._key) else None

    def set(self, value: V | None) -> None:
        """Set this thread's value."""
        if not _stash_owns_its_object():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
        torch._C._stash_obj_in_tls(self._key, value)


@functools.cache
def _stash_owns_its_object() -> bool:
    """Return whether torch's thread-local state takes the reference that it releases later.

    torch 2.13 takes it; torch 2.11 does not, so the object would be freed while it is in use.
    """
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls("megatron probe", probe)
    is_owned = sys.getrefcount(probe) > before
    if not is_owned:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return is_owned


class _NoGradient(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@functools.cache
def runs_hooks_without_gradient() -> bool:
    """Return whether a parameter's post-accumulate hook runs if its gradient is None.

    torch 2.13 runs it, but does not document this: the function tries it once.
    """
    calls: list[Tensor] = []
    with torch.enable_grad():
        param = torch.ones((), requires_grad=True)
        param.register_post_accumulate_grad_hook(calls.append)
        _NoGradient.apply(param).backward()
    return bool(calls)
