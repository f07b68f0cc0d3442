"""Read text and YAML files that users write, and check file names that files contain.

An index, a manifest, a pickle or an object key may contain any string, so a name is checked before
it is joined to a folder.  Symbolic links are followed: the cache of the Hugging Face hub consists
of them, and a program that can create a link in a folder can also replace the files in it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from megatron.core.config.errors import CheckpointError, MegatronError
from megatron.core.optional import require

_TOO_LONG = 256  # bytes; common file systems accept names of at most 255


def path_inside(
    folder: Path,
    name: object,
    said_by: object,
    *,
    below: bool = False,
    error: type[MegatronError] = CheckpointError,
) -> Path:
    """Return the path of file ``name`` directly inside ``folder``; ``below``: at any depth.

    ``said_by``: the file that contains ``name``, for the error message.  Raises ``error`` for an
    absolute path, ``..``, an empty or too long name, unprintable characters, or a value that is not
    a string.
    """
    if isinstance(name, str) and name.isprintable():
        parts = PurePosixPath(name).parts
        is_inside = name == "/".join(parts) and not {"/", ".."} & {*parts}
        is_short = all(len(part.encode()) < _TOO_LONG for part in parts)
        if is_inside and is_short and (len(parts) == 1 or (below and parts)):
            return folder / name
    where = "inside" if below else "directly inside"
    raise error(f"{said_by} names the file {name!r}, which is not a name {where} {folder}")


_MAX_ENTRIES = 1 << 20  # of a YAML file after expanding its aliases
_MAX_BITS = 1 << 12  # Python writes no number of more than 4,300 digits


def read_text(
    path: str | os.PathLike[str], what: str, error: type[MegatronError], needed: str = "a text file"
) -> str:
    """Return the UTF-8 text of ``path``.  Raises ``error``, whose message begins with ``what``.

    ``needed`` is what the message about a missing file asks for.
    """
    file = Path(path)
    if not file.is_file():
        raise error(f"{what}: no such file; give {needed}")
    try:
        return file.read_text(encoding="utf-8-sig")  # editors of Windows write a mark
    except UnicodeDecodeError as problem:
        raise error(f"{what}: not UTF-8 text ({problem}); save it as UTF-8") from None
    except OSError as problem:
        raise error(f"{what}: {problem.strerror or problem}") from None


def parse_yaml(text: str, what: str, error: type[MegatronError], *, only_text: bool = False) -> Any:
    """Parse YAML; with ``only_text`` every scalar is returned as its text, without conversion.

    Raises ``error``, whose message begins with ``what``, and MissingDependency without PyYAML.
    """
    yaml = require("yaml", what)
    try:
        _check_keys(yaml.compose(text, Loader=yaml.SafeLoader))
        value = yaml.load(text, Loader=yaml.BaseLoader if only_text else yaml.SafeLoader)
        _check_size(value)
        return value
    except RecursionError:
        raise error(f"{what}: not YAML: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as problem:
        raise error(f"{what}: not YAML: {' '.join(str(problem).split())}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError) as problem:
        # PyYAML raises these for a value that does not match its tag, for example a 13th month.
        raise error(f"{what}: not YAML: a value is not of its type: {problem!r}") from None


def _check_keys(root: Any) -> None:
    """Raise ValueError for a mapping that has a key twice, one of whose values would be lost."""
    nodes = [] if root is None else [root]
    seen = set()
    while nodes:
        node = nodes.pop()
        if id(node) in seen or not isinstance(node.value, list):
            continue
        seen.add(id(node))
        parts = node.value
        if node.id == "mapping":
            counts = Counter(key.value for key, _ in parts if key.id == "scalar")
            twice = [key for key, count in counts.items() if count > 1 and key != "<<"]
            if twice:
                raise ValueError(f"{', '.join(twice)} is given twice; remove one")
            parts = [each for pair in parts for each in pair]
        nodes += parts


def _check_size(value: object) -> None:
    """Raise ValueError for too many entries or digits, RecursionError for a cycle of aliases."""
    sizes: dict[int, int] = {}

    def size(item: object) -> int:
        if isinstance(item, int) and item.bit_length() > _MAX_BITS:
            raise ValueError(f"a number has more than {_MAX_BITS} bits")
        if not isinstance(item, dict | list | tuple | set):
            return 1
        if id(item) not in sizes:
            parts: Iterable[object] = [*item, *item.values()] if isinstance(item, dict) else item
            sizes[id(item)] = 1 + sum(map(size, parts))
        return sizes[id(item)]

    if size(value) > _MAX_ENTRIES:
        raise ValueError(f"its aliases stand for more than {_MAX_ENTRIES} entries")
