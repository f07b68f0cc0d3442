"""Files that many processes need and one of them builds, without an open collective meanwhile.

The process that takes the file lock builds; the others wait for the lock, then load the result.
The kernel releases the lock of a process that dies, and another process then builds.  For a
directory local to each node, one process per node builds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import tokenize
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import BinaryIO, TypeVar

import numpy as np

from megatron.core.config.errors import DataError
from megatron.core.diagnostics.log_once import warn_once as warn_once

logger = logging.getLogger(__name__)

T = TypeVar("T")


def build_once(
    path: str,
    load: Callable[[], T | None],
    build: Callable[[], T],
    directory_flag: str = "--data-cache-path",
) -> T:
    """Return ``load()``; if it returns None, one process runs ``build()`` and the others wait.

    ``path`` is a name unique to the result; ``path.lock`` exists temporarily.  ``build`` must
    create finished files by renaming them.  Not a collective: any subset of processes may call it.
    Raises DataError if the directory is not writable.
    """
    if (result := load()) is not None:
        return result
    directory = os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(directory, exist_ok=True)
        lock = open(path + ".lock", "wb")  # noqa: SIM115
    except OSError as error:
        raise DataError(
            f"cannot write the index cache {directory}: {error.strerror}; "
            f"name a writable directory with {directory_flag}"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning(
                "%s: this file system has no file locks (%s), so each process builds", path, error
            )
        try:
            result = load()
            return build() if result is None else result
        finally:
            # After a failed build two processes may build at once: equal bytes, atomic renames.
            with contextlib.suppress(FileNotFoundError):
                os.remove(path + ".lock")


def cached_arrays(
    prefix: str,
    description: str,
    shapes: Mapping[str, tuple[int, ...]],
    build: Callable[[], Sequence[np.ndarray]],
    source: Sequence[int] = (),
) -> Sequence[np.ndarray]:
    """Return the arrays ``prefix-NAME.npy``; if they are missing, one process builds them.

    ``shapes``: name of each array -> shape of its elements.
    Arrays are rebuilt if they are damaged, have another ``description``, or were built from another
    ``source``: numbers that tell other data under the same name.  The description is written last,
    so its file marks a complete cache.  ``prefix-crc.json`` holds the CRC-32 of each array file and
    the source.  A cache written by Megatron-LM has no such file, and one written by an earlier
    release has a file without the source.  If ``source`` is given, one process compares the arrays
    of such a cache once with the result of ``build`` and then writes the file.  Without ``source``
    the file of an earlier release is enough, and in a read-only directory the description is.
    Not a collective.
    """
    path, crc_path = f"{prefix}-description.txt", f"{prefix}-crc.json"
    paths = [f"{prefix}-{name}.npy" for name in shapes]

    def is_described() -> bool:
        with open(path, "rb") as file:
            return file.read() == description.encode()

    def read_checks() -> bytes:
        with contextlib.suppress(FileNotFoundError), open(crc_path, "rb") as file:
            return file.read()
        return b"{}"

    def load() -> Sequence[np.ndarray] | None:
        try:
            is_same = is_described()
            crcs = dict(json.loads(read_checks()))
            stored_source = crcs.pop(_SOURCE, None)
            if crcs and crcs != _crcs_of(paths):
                raise ValueError("a checksum does not match")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, RecursionError) as error:
            warn_once(f"{prefix}-*.npy are damaged and are built again: {error}")
            return None
        arrays = _load_arrays(paths, shapes.values())
        is_same &= stored_source in (None, [*source])
        is_trusted = crcs and (stored_source is not None or not source)
        is_trusted = is_trusted or not os.access(os.path.dirname(path) or ".", os.W_OK)
        if arrays and not is_same:
            warn_once(_OF_OTHER_DATA.format(prefix))
        return arrays if arrays and is_same and is_trusted else None

    def write_crcs() -> None:
        content = json.dumps(_crcs_of(paths) | {_SOURCE: [*source]}, indent=1)
        write_atomically(crc_path, lambda file: file.write(content.encode()))

    def build_and_save() -> Sequence[np.ndarray]:
        built = build()
        with contextlib.suppress(FileNotFoundError):
            if is_described() and f'"{_SOURCE}"'.encode() not in read_checks():
                found = _load_arrays(paths, shapes.values())
                if found and all(map(np.array_equal, found, built)):
                    with contextlib.suppress(OSError):
                        write_crcs()
                    return found
                warn_once(_OF_OTHER_DATA.format(prefix))
            os.remove(path)
        for array_path, array in zip(paths, built, strict=True):
            save_array(array_path, array)
        write_crcs()
        write_atomically(path, lambda file: file.write(description.encode()))
        return load() or built  # memory-mapped: the ranks of a node share the pages

    return build_once(prefix, load, build_and_save)


_SOURCE = "source"  # in prefix-crc.json
_OF_OTHER_DATA = "{}-*.npy belong to other data and are built again"


def _load_arrays(paths: Sequence[str], shapes: Iterable[tuple[int, ...]]) -> list[np.ndarray]:
    """Return the array of each path; nothing if one is missing, damaged or of another form.

    Columns beyond ``shapes``, which earlier releases have written, are left out.
    """
    found: list[np.ndarray] = []
    for path, shape in zip(paths, shapes, strict=True):
        array = load_array(path)
        if array is None or array.ndim != 1 + len(shape) or array.dtype.kind not in "iub":
            return []
        box = slice(None), *map(slice, shape)
        array = array[box]
        if array.shape[1:] != shape:
            return []
        found.append(array)
    return found


def _crcs_of(paths: Sequence[str]) -> dict[str, int]:
    """Return the CRC-32 of each file by its name."""
    return {os.path.basename(path): _crc_of_file(path) for path in paths}


def _crc_of_file(path: str) -> int:
    crc = 0
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(1 << 24):
            crc = zlib.crc32(piece, crc)
    return crc


def temporary_name(path: str) -> str:
    """Return a path beside ``path`` that no other process or thread uses."""
    return f"{path}.tmp-{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"


def write_atomically(path: str, write: Callable[[BinaryIO], object]) -> None:
    """Write a file completely or not at all: temporary name, fsync, rename."""
    temporary_path = temporary_name(path)
    try:
        with open(temporary_path, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary_path, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary_path)
        raise


def save_array(path: str, array: np.ndarray) -> None:
    """Write a .npy file completely or not at all."""
    write_atomically(path, lambda file: np.save(file, array, allow_pickle=False))


# Errors of np.load for a damaged file; it parses the header as a Python literal.
_UNREADABLE_ARRAY = (
    ValueError,
    OSError,
    EOFError,
    OverflowError,
    SyntaxError,
    tokenize.TokenError,
)


def load_array(path: str) -> np.ndarray | None:
    """Memory-map a .npy file; return None if it is missing or damaged."""
    try:
        # plain array over the map: indexing np.memmap itself is slow
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except FileNotFoundError:
        return None
    except _UNREADABLE_ARRAY as error:
        warn_once(f"{path} is damaged and is built again: {error}")
        return None
