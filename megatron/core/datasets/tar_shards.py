"""Samples in tar files as webdataset writes them, in any order, by an index of our own.

Files of a tar that follow each other and have the same name up to the first dot are one sample:
``000017.jpg`` and ``000017.json``.  The index of ``x.tar`` is ``x.tar.index-*`` beside it, or in
the cache directory; it is built again when size or time of the tar file differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron.core.config.errors import DataError
from megatron.core.datasets.index_cache import cached_arrays

IMAGE_SUFFIXES = tuple("jpg jpeg png webp gif bmp tif tiff ppm avif".split())
_JSON, _TEXT, _IMAGE, _OTHER = range(4)  # kinds of files
_FORMAT = 1  # of the index
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)")
_RANGE = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}")
_MOST_SHARDS = 1_000_000  # of one range
_HEADER_BYTES = 512
# Exceptions of tarfile on damaged headers: large numbers, headers of long names in sequence.
_DAMAGED = (
    *(tarfile.TarError, OSError, ValueError, OverflowError, RecursionError),
    *(MemoryError, IndexError, KeyError, TypeError, struct.error),
)


@dataclass(frozen=True)
class TarSample:
    """Contents of a sample: its images in the order of the tar, and its text, if it has one."""

    name: str  # shard and sample, for messages
    images: list[bytes] = field(default_factory=list)
    json: bytes | None = None
    text: bytes | None = None


class TarShards:
    """All samples of the shards of ``path`` as one list; see `shard_paths` and `TarShard`."""

    def __init__(self, path: str, cache_directory: str | None = None) -> None:
        self.path = path
        self.shards = [TarShard(p, cache_directory) for p in shard_paths(path)]
        self._ends = np.cumsum([len(shard) for shard in self.shards])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, idx: int) -> TarSample:
        if not 0 <= idx < len(self):
            raise IndexError(f"sample {idx} of {len(self)}")
        shard = int(np.searchsorted(self._ends, idx, side="right"))
        first = int(self._ends[shard - 1]) if shard else 0
        return self.shards[shard].read(idx - first)


class TarShard:
    """One tar file.  Raises DataError if it is missing, damaged or without samples."""

    def __init__(self, path: str, cache_directory: str | None = None) -> None:
        self.path = path
        try:
            status = os.stat(path)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise DataError(
                f"{path}: {getattr(error, 'strerror', error)}; a shard of samples is missing: "
                "fetch it, or take it out of --data-path"
            ) from error
        self.num_bytes = status.st_size
        description = json.dumps(
            {"format": _FORMAT, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
        )
        prefix = f"{path}.index"
        if cache_directory is not None:
            name = hashlib.md5(os.path.abspath(path).encode(), usedforsecurity=False).hexdigest()
            prefix = os.path.join(cache_directory, f"{name}-{os.path.basename(path)}.index")
        # members i64 [m, 4]: sample, kind, offset and size in bytes of a file of the tar
        (self._members,) = cached_arrays(prefix, description, {"members": (4,)}, self._build)

    def __len__(self) -> int:
        return int(self._members[-1, 0]) + 1

    def read(self, idx: int) -> TarSample:
        """Read sample ``idx``.  Raises DataError if the file is not as it was indexed."""
        first, end = np.searchsorted(self._members[:, 0], (idx, idx + 1))
        rows = self._members[first:end].tolist()
        try:
            with open(self.path, "rb", buffering=0) as file:
                key = _key_before(os.pread(file.fileno(), _HEADER_BYTES, rows[0][2] - 512))
                contents = [os.pread(file.fileno(), size, at) for _, _, at, size in rows]
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror}; the shard is gone") from error
        if any(len(data) < row[3] for data, row in zip(contents, rows, strict=True)):
            raise DataError(
                f"{self.path} had {self.num_bytes} bytes when it was opened and was cut short "
                "since: fetch it again"
            )
        files = [(row[1], data) for row, data in zip(rows, contents, strict=True)]
        images = [data for kind, data in files if kind == _IMAGE]
        texts = dict(reversed(files))  # the first of each kind
        name = f"{self.path}, sample {key or idx}"
        return TarSample(name, images, texts.get(_JSON), texts.get(_TEXT))

    def _build(self) -> Sequence[np.ndarray]:
        rows: list[tuple[int, int, int, int]] = []
        sample = -1
        last_key = None
        try:
            with tarfile.open(self.path, "r:") as tar:
                at = 0
                for member in tar:
                    # Headers name their sizes: a negative one would lead to earlier headers again.
                    if member.size < 0 or tar.offset <= at:
                        raise self._damaged(f"{member.name} has a negative size")
                    at = tar.offset
                    tar.members = []  # type: ignore[attr-defined]  # else it keeps every header
                    match = _NAME.fullmatch(member.name)
                    if not member.isreg() or match is None:
                        continue
                    if match[1] != last_key:
                        sample = sample + 1
                        last_key = match[1]
                    end = member.offset_data + member.size
                    if end > self.num_bytes:
                        raise self._damaged(f"{member.name} would end at byte {end}")
                    rows.append((sample, _kind(match[2]), member.offset_data, member.size))
                # tarfile takes a header that it cannot read for the end, unless it is the first.
                tar.fileobj.seek(tar.offset)
                if any(tar.fileobj.read(_HEADER_BYTES)):
                    raise self._damaged(f"no header of a file at byte {tar.offset}")
        except DataError:  # a ValueError too
            raise
        except _DAMAGED as error:
            raise self._damaged(str(error)[:200] or type(error).__name__) from error
        if not rows:
            raise DataError(f"{self.path} has no samples: files are named KEY.jpg and KEY.json")
        return [np.array(rows, np.int64)]

    def _damaged(self, reason: str) -> DataError:
        return DataError(
            f"{self.path} ({self.num_bytes} bytes) is no complete tar file: {reason}; fetch it "
            "again, or unpack it first if it is compressed"
        )


def shard_paths(path: str) -> list[str]:
    """Return the tar files of ``path``: one file, a directory of them, or a range.

    A range is written into the name: ``train-{0000..0127}.tar``.  Files of a directory are in the
    order of their names.  Raises DataError for a directory without tar files, and for an empty or
    too long range.
    """
    if os.path.isdir(path):
        names = sorted(name for name in os.listdir(path) if name.endswith(".tar"))
        if not names:
            raise DataError(f"{path}: no file of this directory ends in .tar: give another one")
        return [os.path.join(path, name) for name in names]
    found = _RANGE.search(path)
    if found is None:
        return [path]
    first, last = map(int, found.groups())
    if not first <= last < first + _MOST_SHARDS:
        raise DataError(
            f"{path}: the range {found[0]} must have 1 to {_MOST_SHARDS} shards, the smaller "
            "number first: give a shorter one, or the directory of the shards"
        )
    before = path[: found.start()]
    after = path[found.end() :]
    width = len(found[1])
    return [f"{before}{number:0{width}}{after}" for number in range(first, last + 1)]


def _kind(extension: str) -> int:
    last = extension.rpartition(".")[2].lower()
    if last in IMAGE_SUFFIXES:
        return _IMAGE
    return {"json": _JSON, "txt": _TEXT}.get(last, _OTHER)


def _key_before(header: bytes) -> str:
    """Return the sample's name from the tar header before one of its files, "" if unreadable."""
    try:
        name = tarfile.TarInfo.frombuf(header, "utf-8", "replace").name
    except tarfile.TarError:
        return ""
    match = _NAME.fullmatch(name)
    return match[1] if match else name
