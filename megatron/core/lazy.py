"""Package exports that are imported when first asked for (PEP 562).

Programs that prepare data import ``megatron.core`` and ``megatron.training`` packages without
paying for torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
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
