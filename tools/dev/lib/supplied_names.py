"""Names that a project imports at once, and this checkout does not have: supplied by the runner.

They stand for features that the checks do not use; who uses one gets an error.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from types import ModuleType


class Supplied:
    """Stands for a class or a function."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError("supplied by the runner for an import only")


def supply(places: Iterable[str]) -> None:
    """Add each "module:name" that cannot be imported; say which."""
    added = []
    for place in places:
        path, _, name = place.partition(":")
        module = _module(path)
        if not hasattr(module, name):
            setattr(module, name, type(name, (Supplied,), {}))
            added.append(place)
    if added:
        print(f"supplied: {', '.join(added)}")


def _module(path: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        parent, _, name = path.rpartition(".")
        module = ModuleType(path)
        module.__path__ = []
        setattr(_module(parent), name, module)
        sys.modules[path] = module
        return module
