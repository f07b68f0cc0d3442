"""The types of custom autograd functions, which torch leaves open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
from torch import Tensor

R = TypeVar("R", covariant=True)
V = TypeVar("V")


class Function(torch.autograd.Function, Generic[R]):
    """`torch.autograd.Function` whose ``apply`` returns R."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: object) -> R: ...


class Context(Protocol[V]):
    """What ``forward`` and ``backward`` get first.

    ``values`` are what forward leaves for backward besides saved tensors.  Autograd frees saved
    tensors after backward and refuses those that have changed; parameters are among the values
    where backward needs the objects themselves.
    """

    values: V
    needs_input_grad: tuple[bool, ...]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...
    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...
