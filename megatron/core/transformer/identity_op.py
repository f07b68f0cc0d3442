"""What fills a slot of a layer that has nothing to do there."""

from __future__ import annotations

from typing import Any

from torch import nn


class IdentityOp(nn.Module):
    """Takes any arguments, returns the first of its call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """``x``"""
        return x


class IdentityFuncOp(IdentityOp):
    """Called without arguments, gives a function that returns its first argument."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The function."""
        return super().forward
