"""Import paths of Megatron-LM whose names are defined elsewhere in this project.

A table is a text with one row for each path and each module that defines names of it, all below
``megatron``.  A row continues in lines that begin with a blank.

    core.jit <- core.compat.config: jit_fuser disable_jit_fuser
    core.timers = core.diagnostics.timers

The first row gives a path two names; ``name=other`` is a name that the module calls ``other``, and
``name=`` the module itself.  In the second row the path is the module itself.

`install` adds an import hook, which creates a module for a path without a file, and extends a
module that exists by the names that it lacks.  Names are looked up at first use, so that no path
imports more than it needs.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import re
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_homes: dict[str, dict[str, tuple[str, str]]] = {}  # path -> name -> (module, its name there)
_same: dict[str, str] = {}  # path -> the module that it is
_packages: set[str] = set()  # packages that contain a path


def install(table: str) -> None:
    """Add the paths of ``table``; modules that are imported already are extended at once."""
    for row in table.replace("\n ", " ").splitlines():
        if not row or row.startswith("#"):
            continue
        path, arrow, entries = f"megatron.{row}".split(maxsplit=2)
        home, _, names = entries.partition(":")
        _packages.update(path[: dot.start()] for dot in re.finditer(r"\.", path))
        if arrow == "=":
            _same[path] = f"megatron.{home}"
            continue
        known = _homes.setdefault(path, {})
        for entry in names.split():
            name, is_other, other = entry.partition("=")
            known[name] = f"megatron.{home}", other if is_other else name
        if (module := sys.modules.get(path)) is not None:
            _extend(module)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the paths of the table, with or without a file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a path of the table, or of a package that contains one."""
        if fullname in _same:
            return importlib.machinery.ModuleSpec(fullname, _Loader())
        is_package = fullname in _packages
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
        """Add the names of the table, or put the module that the path is in its place."""
        if module.__name__ in _same:
            sys.modules[module.__name__] = importlib.import_module(_same[module.__name__])
        else:
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
