"""Text files that users write: what is wrong with one is a single message that names it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.core.config.errors import MegatronError
from megatron.core.optional import require

_MAX_ENTRIES = 1 << 20  # of a YAML file, when every alias is written out


def read_text(path: str | os.PathLike[str], what: str, error: type[MegatronError]) -> str:
    """The UTF-8 text in ``path``.  Raises ``error``, whose message begins with ``what``."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as problem:
        raise error(f"{what}: cannot be read: {problem.strerror or problem}") from None
    except ValueError as problem:  # no UTF-8, or a name that no file can have
        raise error(f"{what}: not UTF-8: {problem}") from None


def parse_yaml(text: str, what: str, error: type[MegatronError], *, only_text: bool = False) -> Any:
    """The YAML value in ``text``; with ``only_text`` every scalar is the text it was written as.

    Raises ``error``, whose message begins with ``what``, and MissingDependency without PyYAML.
    """
    yaml = require("yaml", what)
    try:
        value = yaml.load(text, Loader=yaml.BaseLoader if only_text else yaml.SafeLoader)
        _check_size(value)
        return value
    except RecursionError:
        raise error(f"{what}: not YAML: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as problem:
        raise error(f"{what}: not YAML: {' '.join(str(problem).split())}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError) as problem:
        # PyYAML raises these at a value that is not of its tag, such as a 13th month.
        raise error(f"{what}: not YAML: a value is not of its type: {problem!r}") from None


def _check_size(value: object) -> None:
    """Raise ValueError if a few aliases stand for very much, RecursionError for a circle."""
    sizes: dict[int, int] = {}

    def size(item: object) -> int:
        if not isinstance(item, dict | list | tuple | set):
            return 1
        if id(item) not in sizes:
            parts: Iterable[object] = [*item, *item.values()] if isinstance(item, dict) else item
            sizes[id(item)] = 1 + sum(map(size, parts))
        return sizes[id(item)]

    if size(value) > _MAX_ENTRIES:
        raise ValueError(f"its aliases stand for more than {_MAX_ENTRIES} entries")
