"""Files that many processes need and one of them makes, without any collective open meanwhile.

The first process to take the file lock builds; the others look for the result.  The kernel drops
the lock of a process that dies, so the next one builds.  A directory that every node has for
itself is served by one builder a node.  A failed build leaves an error marker, and every process
that waits raises at once.
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
from functools import cache
from typing import BinaryIO, TypeVar

import numpy as np

from megatron.core.config.errors import DataError

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
    """Return ``load()``; where it gives None, one process runs ``build()`` and the rest wait.

    ``path`` is a name unique to the result: ``path.lock`` and ``path.error`` lie beside it for a
    while.  ``build`` must put finished files in place by renaming them.  Not a collective: any
    subset of processes may call it.  DataError if the directory cannot be written, or if the
    process that builds failed.
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
            waited_s = now_s - started_at_s
            logger.info(
                "waiting for %s: %.0f s so far, built by %s", path, waited_s, _holder(lock_path)
            )
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


def cached_arrays(
    prefix: str,
    description: str,
    names: Sequence[str],
    build: Callable[[], Sequence[np.ndarray]],
    fits: Callable[..., bool],
) -> Sequence[np.ndarray]:
    """The arrays ``prefix-NAME.npy``, which one process builds where they are missing.

    Damaged ones, and ones of another ``description`` or that ``fits`` refuses, are built again.
    The description lies beside them and is written last: with it they are complete.
    ``prefix-crc.json`` holds the CRC-32 of each array file.  A cache of Megatron-LM has none: its
    arrays have to pass ``fits(*arrays, completely=True)`` once, and get one then.
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
                with contextlib.suppress(OSError):  # the directory may be read-only
                    _write_crcs(crc_path, {path: _crc_of_file(path) for path in paths})
            return found
        warn_once(f"{prefix}-*.npy belong to other data and are built again")
        return None

    def build_and_save() -> Sequence[np.ndarray]:
        built = build()
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
        crcs = {path: save_array(path, array) for path, array in zip(paths, built, strict=True)}
        _write_crcs(crc_path, crcs)
        write_atomically(path, lambda file: file.write(description.encode("utf-8")))
        return load() or built  # mapped: shared by all ranks

    return build_once(prefix, load, build_and_save)


def _have_crcs(crc_path: str, paths: Sequence[str]) -> bool:
    """Whether the files are what was written; a file that is missing gets no warning."""
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


def _write_crcs(crc_path: str, crcs: dict[str, int]) -> None:
    content = json.dumps({os.path.basename(path): crc for path, crc in crcs.items()}, indent=1)
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
        text = f"{_own_name()}, {time.time_ns()}: {error!r}".encode()  # the time: never alike
        with contextlib.suppress(OSError):
            write_atomically(error_path, lambda file: file.write(text))
        raise
    with contextlib.suppress(FileNotFoundError):
        os.remove(error_path)
    return result


@contextlib.contextmanager
def _try_lock(lock_path: str) -> Iterator[bool]:
    """Whether this process holds the lock; held until the block ends, then the file is removed."""
    descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            # A file system without locks: everyone builds the same bytes, renames are atomic.
            logger.warning("%s: no file locks here (%s), each process builds", lock_path, error)
            yield True
            return
        if not _is_same_file(descriptor, lock_path):  # its last holder removed it meanwhile
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


def _holder(lock_path: str) -> str:
    return _read_text(lock_path) or "another process"


def _read_text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return None


def temporary_name(path: str) -> str:
    """A name beside ``path`` that no other process or thread uses."""
    return f"{path}.tmp-{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"


def write_atomically(path: str, write: Callable[[BinaryIO], object]) -> None:
    """Write a file that is either whole or not there: temporary name, fsync, rename."""
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


def save_array(path: str, array: np.ndarray) -> int:
    """Write a .npy file, complete or not at all; returns the CRC-32 of the file."""
    crc = 0

    def write(file: BinaryIO) -> None:
        nonlocal crc
        counted = _CrcWriter(file)
        np.save(counted, array, allow_pickle=False)
        crc = counted.crc

    write_atomically(path, write)
    return crc


class _CrcWriter:
    """A file for ``np.save``, which writes it in pieces, and the CRC-32 of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.crc = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.crc = zlib.crc32(data, self.crc)


# What numpy raises at a damaged file: it parses the header as Python.
_UNREADABLE_ARRAY = (
    ValueError,
    OSError,
    EOFError,
    OverflowError,
    SyntaxError,
    tokenize.TokenError,
)


def load_array(path: str) -> np.ndarray | None:
    """Map a .npy file; None if it is missing or damaged."""
    try:
        # a plain array on the map: indexing np.memmap itself is slow
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except FileNotFoundError:
        return None
    except _UNREADABLE_ARRAY as error:
        warn_once(f"{path} is damaged and is built again: {error}")
        return None


@cache
def warn_once(message: str, level: int = logging.WARNING) -> None:
    """Log a message the first time it is given; a waiting process looks many times."""
    logger.log(level, message)
