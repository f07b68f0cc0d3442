"""Types for custom autograd functions, which torch does not annotate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
from torch import Tensor

R = TypeVar("R", covariant=True)
V = TypeVar("V")


class Function(torch.autograd.Function, Generic[R]):
    """Subclass of `torch.autograd.Function` whose ``apply`` returns R."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: object) -> R: ...


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
