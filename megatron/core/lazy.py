"""Import at first use: exports of a package (PEP 562), values of a table.

So programs that prepare data import packages of ``megatron.core`` and ``megatron.training`` without
importing torch, and a run imports only the model kinds and file formats that it uses.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def lazy_exports(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module ``__getattr__`` for ``package`` that imports exports at first use.

    ``homes`` maps each public name to the module that defines it.  If that module has no attribute
    of this name, the export is the module itself.
    """

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = importlib.import_module(homes[name])
        return vars(home).get(name, home)

    return __getattr__


class LazyTable(Mapping[str, Any]):
    """Mapping whose values are imported at first use; ``homes``: key -> "module.path.NAME"."""

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = homes

    def __getitem__(self, name: str) -> Any:
        module, _, value = self._homes[name].rpartition(".")
        return vars(importlib.import_module(module))[value]

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)
