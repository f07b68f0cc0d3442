"""File names that come from files: in an index, a manifest, a pickle, an object's key.

Whoever wrote such a file may have written any string into it, so a name is checked before it is
joined to a folder.  Symbolic links are followed as usual: the cache of the Hugging Face hub is
made of them, and whoever can make a link in a folder can also replace the files in it.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from megatron.core.config.errors import CheckpointError, MegatronError

_TOO_LONG = 256  # bytes of a name that no common file system takes


def path_inside(
    folder: Path,
    name: object,
    said_by: object,
    *,
    below: bool = False,
    error: type[MegatronError] = CheckpointError,
) -> Path:
    """The path of file ``name`` directly inside ``folder``; with ``below``, at any depth in it.

    Raises ``error``, which names ``said_by`` (the file that holds ``name``), for everything else:
    an absolute path, ``..``, an empty name, a value that is not text.
    """
    if isinstance(name, str) and name.isprintable():
        parts = PurePosixPath(name).parts
        is_inside = name == "/".join(parts) and not {"/", ".."} & {*parts}
        is_short = all(len(part.encode()) < _TOO_LONG for part in parts)
        if is_inside and is_short and (len(parts) == 1 or (below and parts)):
            return folder / name
    where = "inside" if below else "directly inside"
    raise error(f"{said_by} names the file {name!r}, which is not a name {where} {folder}")
