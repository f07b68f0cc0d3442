"""What fills a slot of a layer that has nothing to do there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

T = TypeVar("T")


class IdentityOp(nn.Module):
    """Takes any arguments, returns the first of its call."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def forward(self, x: T, *args: object, **kwargs: object) -> T:
        """``x``"""
        return x


class IdentityFuncOp(IdentityOp):
    """Called without arguments, gives a function that returns its first argument."""

    def forward(self, *args: object, **kwargs: object) -> Callable[..., object]:  # type: ignore[override]
        """The function."""
        return super().forward
