"""What is imported when first asked for: exports of a package (PEP 562), values of a table.

Programs that prepare data import ``megatron.core`` and ``megatron.training`` packages without
paying for torch, and a run imports the kinds of model and file that it has, not all there are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def lazy_exports(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A module ``__getattr__`` for ``package``.

    ``homes`` maps a public name to the module that defines it; a module that is itself the export
    maps to its own path.
    """

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = importlib.import_module(homes[name])
        return vars(home).get(name, home)

    return __getattr__


class LazyTable(Mapping[str, Any]):
    """name -> the value that ``homes`` says as ``path.of.module.name``."""

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = homes

    def __getitem__(self, name: str) -> Any:
        module, _, value = self._homes[name].rpartition(".")
        return vars(importlib.import_module(module))[value]

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)
