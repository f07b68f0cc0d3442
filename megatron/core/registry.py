"""Registries that user code extends: of model kinds, optimizers, tokenizers and others."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from megatron.core.config.errors import ConfigError

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Mapping from names to values, built in or registered by user code.

    A registry can be the ``choices`` of a flag: iteration yields the names.  ``built_in`` maps a
    name to ``package.module:NAME``, which is imported at the first access.
    """

    def __init__(self, flag: str, built_in: Mapping[str, str]) -> None:
        """``flag``: the flag that selects a value, for error messages."""
        self.flag = flag
        self._built_in = dict(built_in)
        self._values: dict[str, T] = {}

    def register(self, name: str, value: T) -> None:
        """Add ``value``.  Raises ConfigError for a name that exists or contains white space."""
        if not name or name.split() != [name]:
            raise ConfigError(f"{self.flag} {name!r} cannot be registered: a name has no blanks")
        if name in self:
            raise ConfigError(f"{self.flag} {name} is registered already: choose another name")
        self._values[name] = value

    def find(self, name: str) -> T:
        """Return the value of ``name``.  Raises ConfigError, which lists the known names."""
        if name not in self:
            raise ConfigError(
                f"{self.flag} {name}: not one of {', '.join(self) or 'the registered names (none)'}"
                "; a name of your own needs --import-module with the module that registers it"
            )
        return self[name]

    def __getitem__(self, name: str) -> T:
        if name not in self._values:
            value: T = pkgutil.resolve_name(self._built_in[name])
            self._values[name] = value
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._built_in or name in self._values)

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys((*self._built_in, *self._values))

    def __len__(self) -> int:
        return len(self._built_in.keys() | self._values.keys())
