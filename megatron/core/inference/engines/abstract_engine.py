"""Base class of Megatron-LM's engines."""

from __future__ import annotations

import abc
from typing import Any


class AbstractEngine(abc.ABC):
    """An engine generates texts for prompts."""

    @abc.abstractmethod
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the finished requests of the given prompts."""
