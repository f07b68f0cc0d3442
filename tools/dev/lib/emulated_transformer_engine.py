"""A stand-in for Transformer Engine, for projects that import it without asking for it first.

Modules of the package import, and have any class that a project may name, to inherit from it or to
ask for it with isinstance; they have no functions.  This checkout's layers never use it without a
GPU.  `install` does nothing where the package works.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torch import nn

PACKAGE = "transformer_engine"
VERSION = "2.10.0"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and creates the modules of the package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for each name below the package."""
        if fullname.split(".")[0] != PACKAGE:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its version, and a class for each name that begins as one."""
        vars(module)["__version__"] = VERSION

        def __getattr__(name: str) -> Any:  # noqa: N807  (PEP 562)
            if not name[0].isupper():
                raise AttributeError(f"{module.__name__} is emulated, and has no {name}")
            stand_in = type(name, (nn.Module,), {"__module__": module.__name__})
            vars(module)[name] = stand_in
            return stand_in

        vars(module)["__getattr__"] = __getattr__


def install() -> None:
    """Put the stand-in in place, unless the package imports; say so."""
    try:
        importlib.import_module(f"{PACKAGE}.pytorch")
    except (ImportError, OSError, RuntimeError):
        for name in [n for n in sys.modules if n.split(".")[0] == PACKAGE]:
            del sys.modules[name]
        sys.meta_path.insert(0, _Finder())
        importlib.import_module(f"{PACKAGE}.pytorch.ops")
        print(f"imports:   emulated: {PACKAGE} (classes without functions)")
