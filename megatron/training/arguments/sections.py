"""Which configs have flags, and where their values live in a RunConfig."""

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

# Flags that `resolve` reads and nobody after it.
FLAGS_ONLY: tuple[type, ...] = (ShorthandFlags, OutOfScopeFlags)

ALL_CLASSES: tuple[type, ...] = (*SECTIONS.values(), *FLAGS_ONLY)


@cache
def flags_and_defaults() -> dict[str, tuple[str, object]]:
    """dest -> flag and value when it is not given."""
    return {
        dest_of(f, opt): (flag_of(f, opt), namespace_default(f, opt))
        for cls in ALL_CLASSES
        for f, opt in options_of(cls)
    }


@cache
def options_by_dest() -> dict[str, Option]:
    """dest -> what its field declares."""
    return {dest_of(f, opt): opt for cls in ALL_CLASSES for f, opt in options_of(cls)}
