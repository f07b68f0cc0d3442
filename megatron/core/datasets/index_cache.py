"""Files that many processes need and one of them builds, without an open collective meanwhile.

The process that takes the file lock builds; the others poll for the result.  The kernel releases
the lock of a process that dies, and another process then builds.  For a directory local to each
node, one process per node builds.  A failed build leaves an error marker, and every waiting
process raises at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import tokenize
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, TypeVar

import numpy as np

from megatron.core.config.errors import DataError
from megatron.core.diagnostics.log_once import warn_once as warn_once

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0
_REPORT_EVERY_S = 30.0


def build_once(
    path: str,
    load: Callable[[], T | None],
    build: Callable[[], T],
    directory_flag: str = "--data-cache-path",
) -> T:
    """Return ``load()``; if it returns None, one process runs ``build()`` and the others wait.

    ``path`` is a name unique to the result; ``path.lock`` and ``path.error`` exist temporarily.
    ``build`` must create finished files by renaming them.  Not a collective: any subset of
    processes may call it.  Raises DataError if the directory is not writable, or if the building
    process failed.
    """
    if (result := load()) is not None:
        return result
    lock_path, error_path = path + ".lock", path + ".error"
    _make_directory(path, directory_flag)
    error_before = _read_text(error_path)
    started_at_s = reported_at_s = time.monotonic()
    pause_s = _FIRST_PAUSE_S
    while True:
        with _try_lock(lock_path) as locked:
            if (result := load()) is not None:
                return result
            error = _read_text(error_path)
            if error is not None and error != error_before:
                raise DataError(f"{path} was not built: {error}")
            if locked:
                return _build(build, error_path)
        now_s = time.monotonic()
        if now_s - reported_at_s >= _REPORT_EVERY_S:
            reported_at_s = now_s
            holder = _read_text(lock_path) or "another process"
            waited_s = now_s - started_at_s
            logger.info("waiting for %s: %.0f s so far, built by %s", path, waited_s, holder)
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


def cached_arrays(
    prefix: str,
    description: str,
    names: Sequence[str],
    build: Callable[[], Sequence[np.ndarray]],
    fits: Callable[..., bool],
) -> Sequence[np.ndarray]:
    """Return the arrays ``prefix-NAME.npy``; if they are missing, one process builds them.

    Arrays are rebuilt if they are damaged, have another ``description``, or fail ``fits``.  The
    description is written last, so its file marks a complete cache.  ``prefix-crc.json`` holds the
    CRC-32 of each array file.  A cache written by Megatron-LM has no such file: its arrays must
    pass ``fits(*arrays, completely=True)`` once, then the file is written.  Not a collective.
    """
    path, crc_path = f"{prefix}-description.txt", f"{prefix}-crc.json"
    paths = [f"{prefix}-{name}.npy" for name in names]

    def load() -> Sequence[np.ndarray] | None:
        try:
            with open(path, encoding="utf-8") as file:
                is_same = file.read() == description
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            warn_once(f"{prefix}-*.npy cannot be read and are built again: {error}")
            return None
        has_crcs = os.path.exists(crc_path)
        if has_crcs and not _have_crcs(crc_path, paths):
            return None
        arrays = [load_array(path) for path in paths]
        found = [array for array in arrays if array is not None]
        if len(found) < len(names):
            return None
        if is_same and fits(*found, completely=not has_crcs):
            if not has_crcs:
                with contextlib.suppress(OSError):  # the cache directory may be read-only
                    _write_crcs(crc_path, paths)
            return found
        warn_once(f"{prefix}-*.npy belong to other data and are built again")
        return None

    def build_and_save() -> Sequence[np.ndarray]:
        built = build()
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
        for array_path, array in zip(paths, built, strict=True):
            save_array(array_path, array)
        _write_crcs(crc_path, paths)
        write_atomically(path, lambda file: file.write(description.encode("utf-8")))
        return load() or built  # memory-mapped: the ranks of a node share the pages

    return build_once(prefix, load, build_and_save)


def _have_crcs(crc_path: str, paths: Sequence[str]) -> bool:
    """Return whether the array files have their checksums; warn unless a file is missing."""
    try:
        with open(crc_path, encoding="utf-8") as file:
            crcs = dict(json.load(file))
        for path in paths:
            if _crc_of_file(path) != crcs.get(os.path.basename(path)):
                warn_once(f"{path}: its checksum in {crc_path} does not match; it is built again")
                return False
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError, TypeError, RecursionError) as error:
        warn_once(f"{crc_path} cannot be read, and the arrays beside it are built again: {error}")
        return False
    return True


def _write_crcs(crc_path: str, paths: Sequence[str]) -> None:
    crcs = {os.path.basename(path): _crc_of_file(path) for path in paths}
    content = json.dumps(crcs, indent=1)
    write_atomically(crc_path, lambda file: file.write(content.encode()))


def _crc_of_file(path: str) -> int:
    crc = 0
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(1 << 24):
            crc = zlib.crc32(piece, crc)
    return crc


def _build(build: Callable[[], T], error_path: str) -> T:
    try:
        result = build()
    except BaseException as error:
        reason = str(error) if isinstance(error, DataError) else repr(error)
        text = f"{_own_name()}, {time.time_ns()}: {reason}".encode()  # unique text
        with contextlib.suppress(OSError):
            write_atomically(error_path, lambda file: file.write(text))
        raise
    with contextlib.suppress(FileNotFoundError):
        os.remove(error_path)
    return result


@contextlib.contextmanager
def _try_lock(lock_path: str) -> Iterator[bool]:
    """Yield whether this process holds the lock; afterwards release it and delete its file."""
    descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            # File system without locks: each process builds; equal bytes, atomic renames.
            logger.warning(
                "%s: this file system has no file locks (%s), so each process builds",
                lock_path,
                error,
            )
            yield True
            return
        if not _is_same_file(descriptor, lock_path):  # the last holder has just removed the file
            yield False
            return
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, _own_name().encode(), 0)
        try:
            yield True
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(lock_path)
    finally:
        os.close(descriptor)


def _is_same_file(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _make_directory(path: str, directory_flag: str) -> None:
    directory = os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(directory, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise DataError(
            f"cannot write the index cache {directory}: {error.strerror}; "
            f"name a writable directory with {directory_flag}"
        ) from error


def _own_name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _read_text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return None


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
