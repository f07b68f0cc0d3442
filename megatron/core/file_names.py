"""Check file names that are read from files: from an index, a manifest, a pickle, an object key.

Such a file may contain any string, so a name is checked before it is joined to a folder.  Symbolic
links are followed: the cache of the Hugging Face hub consists of them, and a program that can
create a link in a folder can also replace the files in it.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from megatron.core.config.errors import CheckpointError, MegatronError

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
