"""Import paths of Megatron-LM whose names are defined elsewhere in this project.

A table maps each path to the modules that define its names.  `install` adds an import hook, which
creates a module for a path without a file, and extends a module that exists by the names that it
lacks.  Names are looked up at first use, so that no path imports more than it needs.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

# Import path -> module -> the names that it defines, separated by spaces; ``name=other`` if the
# module calls it ``other``, ``name=`` if the module itself has this name.  All below megatron.
PathTable = Mapping[str, Mapping[str, str]]

_homes: dict[str, dict[str, tuple[str, str]]] = {}  # path -> name -> (module, its name there)


def install(table: PathTable) -> None:
    """Add the paths of ``table``; modules that are imported already are extended at once."""
    for path, homes in table.items():
        known = _homes.setdefault(f"megatron.{path}", {})
        for home, names in homes.items():
            for entry in names.split():
                name, is_other, other = entry.partition("=")
                known[name] = f"megatron.{home}", other if is_other else name
        if (module := sys.modules.get(f"megatron.{path}")) is not None:
            _extend(module)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the paths of the table, with or without a file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a path of the table, or of a package that contains one."""
        is_package = any(known.startswith(f"{fullname}.") for known in _homes)
        if fullname not in _homes and not is_package:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:  # a folder without modules, left by an update
            return importlib.machinery.ModuleSpec(fullname, _Loader(), is_package=is_package)
        if is_package and spec.submodule_search_locations is None:
            spec.submodule_search_locations = []  # Megatron Core has a package, we have a file
        if fullname in _homes and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _extend(sys.modules[fullname])  # the module may have put another in its place

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Loader(importlib.abc.Loader):
    """Creates the module of a path without a file."""

    def exec_module(self, module: ModuleType) -> None:
        """Add the names of the table."""
        _extend(module)


def _extend(module: ModuleType) -> None:
    """Add the names of the table that ``module`` lacks, to be looked up at first use."""
    path = module.__spec__.name if module.__spec__ else module.__name__
    homes = {**_homes.get(module.__name__, {}), **_homes.get(path, {})}
    own = vars(module).get("__getattr__")

    def __getattr__(name: str) -> Any:  # noqa: N807  (PEP 562)
        if name in homes:
            home, other = homes[name]
            found = importlib.import_module(home)
            return getattr(found, other) if other else found
        if own is not None:
            return own(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    vars(module)["__getattr__"] = __getattr__
    # `from path import *` takes these too.
    public = vars(module).get("__all__") or [n for n in vars(module) if not n.startswith("_")]
    vars(module)["__all__"] = [*public, *(n for n in homes if n[0] != "_" and n not in public)]
