"""Identity modules for the submodules that a layer does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

T = TypeVar("T")


class IdentityOp(nn.Module):
    """Module that accepts any arguments and returns the first argument of `forward`."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def forward(self, x: T, *args: object, **kwargs: object) -> T:
        """Return ``x`` unchanged."""
        return x


class IdentityFuncOp(IdentityOp):
    """Module that replaces bias-dropout-add: a call returns the identity function."""

    def forward(self, *args: object, **kwargs: object) -> Callable[..., object]:  # type: ignore[override]
        """Return the identity function."""
        return super().forward
