"""Module specs: a description of the submodules of a layer, from which the layer builds them."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from megatron.core.config.errors import ConfigError

OWN_SPECS = "megatron.core.models"  # below it are the specs that a checkpoint may name


@dataclass
class ModuleSpec:
    """Specification of a module.

    ``module``: its class, or (module path, name) to import it from; ``params``: keyword arguments
    of the constructor; ``submodules``: the specs of its submodules.
    """

    module: Callable[..., object] | tuple[str, ...]
    params: dict[str, object] = field(default_factory=dict)
    submodules: Any = None


Slot = ModuleSpec | Callable[..., object]


def import_module(module_path: Sequence[str]) -> object:
    """Import and return the object ``(module path, name)``.  Raises ConfigError if it cannot."""
    if len(module_path) != 2:
        raise ConfigError(f"--spec takes a module and a name in it, not {list(module_path)}")
    path, name = module_path
    try:
        return getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # "..x", and NULs
        raise ConfigError(f"--spec {path} {name} cannot be imported: {error}") from error


def reason_not_own_spec(path: Sequence[str]) -> str | None:
    """Return why a spec named in a checkpoint must not be imported; None if it may be.

    Security: a checkpoint must not make a run import or call arbitrary code, so only specs that are
    defined below `OWN_SPECS` are allowed.  A name that such a module merely imports is refused.
    """
    is_path = isinstance(path, list | tuple) and all(isinstance(word, str) for word in path)
    words = ".".join(path).split(".") if is_path else []
    if words == ["local"]:
        return None
    if not is_path or len(path) != 2 or not all(word.isidentifier() for word in words):
        return "it is not a module and a name in it"
    module, name = path
    if not _is_own(module):
        return f"{module} is not a module of {OWN_SPECS}"
    try:
        found = import_module(path)
    except ConfigError as error:
        return str(error)
    if isinstance(found, ModuleSpec) or (inspect.isfunction(found) and _is_own(found.__module__)):
        return None
    return f"{name} is not a ModuleSpec or a function that {OWN_SPECS} defines"


def _is_own(module: str) -> bool:
    return f"{module}.".startswith(f"{OWN_SPECS}.")


def get_module(spec_or_module: Slot) -> Callable[..., Any]:
    """Return the class or function of a spec; imports it if the spec holds its path."""
    module = spec_or_module.module if isinstance(spec_or_module, ModuleSpec) else spec_or_module
    found = import_module(module) if isinstance(module, tuple) else module
    if not callable(found):
        raise TypeError(f"a spec has a class, a function or (module path, name), not {module!r}")
    return found


def build_module(
    spec_or_module: Slot | None,
    *args: object,
    offered: Mapping[str, object] | None = None,
    **kwargs: object,
) -> Any:
    """Build the module of a spec; a plain function is returned as it is.

    ``args`` and ``kwargs`` are always passed to the constructor.  ``offered`` arguments (such as
    process groups, which not every module needs) are passed only if it has parameters of these
    names.  Raises TypeError, naming the class, if the constructor does not accept the arguments.
    """
    assert spec_or_module is not None, "a slot that must be filled is empty in the spec"
    module = get_module(spec_or_module)
    if isinstance(module, types.FunctionType):
        return module
    if isinstance(spec_or_module, ModuleSpec):
        kwargs |= spec_or_module.params
        if spec_or_module.submodules is not None:
            kwargs["submodules"] = spec_or_module.submodules
    if offered:
        names = _arguments_of(module)
        kwargs |= {k: v for k, v in offered.items() if k in names and k not in kwargs}
        if "model_comm_pgs" in names and "pg_collection" not in names:  # a project's class
            kwargs.setdefault("model_comm_pgs", offered.get("pg_collection"))
    try:
        return module(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"while building {module.__name__}: {error}") from error


def build_norm(spec: Slot, config: Any, width: int, **more: Any) -> Any:
    """Build a norm of rows of ``width``, with the epsilon of ``config``."""
    return build_module(
        spec, config=config, hidden_size=width, eps=config.layernorm_epsilon, **more
    )


@cache
def _arguments_of(module: Callable[..., object]) -> set[str]:
    """Return the parameter names of a constructor; with ``**kwargs`` also those of its base."""
    if not isinstance(module, type):
        return set(inspect.signature(module).parameters)
    names: set[str] = set()
    # Without object, whose parameters say nothing; to parse its signature copies sys.modules.
    classes = module.__mro__[:-1]
    for init in (vars(cls)["__init__"] for cls in classes if "__init__" in vars(cls)):
        parameters = inspect.signature(init).parameters
        names |= parameters.keys()
        if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            break
    return names
