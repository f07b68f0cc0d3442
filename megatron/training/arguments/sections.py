"""Config classes that declare flags, and the RunConfig attribute of each."""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import cache
from typing import get_type_hints

from megatron.core.config.option import Option, dest_of, flag_of, options_of
from megatron.training.arguments.options import namespace_default
from megatron.training.config.out_of_scope import OutOfScopeFlags
from megatron.training.config.run import RunConfig
from megatron.training.config.shorthand import ShorthandFlags

# attribute of RunConfig -> its class
SECTIONS: dict[str, type] = {
    name: kind
    for name, kind in get_type_hints(RunConfig).items()
    if isinstance(kind, type) and is_dataclass(kind)
}

# Flags that only `resolve` reads; RunConfig does not contain them.
FLAGS_ONLY: tuple[type, ...] = (ShorthandFlags, OutOfScopeFlags)

ALL_CLASSES: tuple[type, ...] = (*SECTIONS.values(), *FLAGS_ONLY)


@cache
def flags_and_defaults() -> dict[str, tuple[str, object]]:
    """Return dest -> (flag, namespace value if the flag is absent)."""
    return {
        dest_of(f, opt): (flag_of(f, opt), namespace_default(f, opt))
        for cls in ALL_CLASSES
        for f, opt in options_of(cls)
    }


@cache
def options_by_dest() -> dict[str, Option]:
    """Return dest -> Option of its field."""
    return {dest_of(f, opt): opt for cls in ALL_CLASSES for f, opt in options_of(cls)}
