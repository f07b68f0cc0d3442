"""Read torch.save archives without torch.load, and write them.

Tensors are not loaded: `StoredArray` has the position of the bytes and reads the requested box.
The checksum that torch.save stores for every storage is compared at the first read.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.config.value_types import Shape, Unpickled
from megatron.core.dist_checkpointing import manifest
from megatron.core.dist_checkpointing.manifest import (
    MALFORMED,
    FileEntry,
    adopt_file,
    are_counts,
    reading,
)
from megatron.core.dist_checkpointing.megatron_formats.unpickler import Storage, unpickle

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_FAILURES = (*MALFORMED, zipfile.BadZipFile, OSError, EOFError, struct.error, zlib.error)
_OLD_FORMAT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


class MappedFile:
    """A privately memory-mapped file: bytes are read when accessed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path), open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise CheckpointDamaged(f"{path} is damaged: it is empty")
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._checked: set[int] = set()

    def elements(
        self, start: int, num_bytes: int, crc32: int, dtype: torch.dtype, offset: int, count: int
    ) -> Tensor:
        """Return a copy of ``count`` values from ``offset`` of the record that begins at ``start``.

        Its bytes are compared with the checksum at the first access.  Raises CheckpointDamaged.
        """
        if start not in self._checked:
            with memoryview(self.bytes) as view, view[start : start + num_bytes] as record:
                found = manifest.crc32(record)
            if found != crc32:
                raise CheckpointDamaged(
                    f"{self.path} is damaged: a tensor at byte {start} does not fit its checksum"
                )
            self._checked.add(start)
        size = dtype.itemsize
        place = start + offset * size
        raw = torch.frombuffer(self.bytes, dtype=torch.uint8, count=count * size, offset=place)
        # The copy is also aligned: an archive inside a file may start at any byte.
        return raw.clone().view(dtype)


@dataclass(frozen=True)
class StoredArray:
    """A strided view of stored values.

    ``view``: a tensor without values (on device meta) of this dtype, shape, stride and offset.
    ``elements(offset, count)`` returns a copy of the values.
    """

    view: Tensor
    elements: Callable[[int, int], Tensor]

    @property
    def dtype(self) -> torch.dtype:
        return self.view.dtype

    @property
    def shape(self) -> Shape:
        return tuple(self.view.shape)

    def read(self) -> Tensor:
        """Return a copy of the values in host memory.  Raises CheckpointDamaged."""
        shape = self.view.shape
        stride = self.view.stride()
        if 0 in shape:
            return torch.empty(shape, dtype=self.dtype)
        count = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        return self.elements(int(self.view.storage_offset()), count).as_strided(shape, stride)

    def __getitem__(self, index: Any) -> StoredArray:
        """Return the part that a tensor returns for ``index``."""
        return replace(self, view=self.view[index])

    def flat(self, begin: int, shape: Shape) -> StoredArray:
        """Return ``prod(shape)`` elements of a contiguous array from ``begin``, with ``shape``."""
        return replace(self, view=self.view.view(-1)[begin : begin + prod(shape)].view(shape))

    def t(self) -> StoredArray:
        """Return the transposed matrix."""
        return replace(self, view=self.view.t())

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def load_archive(file: MappedFile, begin: int = 0, length: int | None = None) -> Unpickled:
    """Return the object that torch.save wrote to ``length`` bytes of ``file`` from ``begin``.

    Tensors are `StoredArray`.  Raises CheckpointDamaged, and CheckpointError for a class that must
    not be unpickled.
    """
    path, end = file.path, len(file.bytes) if length is None else begin + length
    if end > len(file.bytes):
        raise CheckpointDamaged(f"{path} has {len(file.bytes)} bytes, {end} were written")
    if file.bytes[begin : begin + len(_OLD_FORMAT)] == _OLD_FORMAT:
        raise CheckpointError(
            f"{path} is in the format that torch wrote before 1.6: load and save it with torch once"
        )
    try:
        with (
            open(path, "rb") as stream,
            _Prefix(stream.fileno(), end, access=mmap.ACCESS_READ) as prefix,
            zipfile.ZipFile(cast(BinaryIO, prefix)) as archive,
        ):
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            pickled = archive.read(records["data.pkl"])
            order = archive.read(records["byteorder"]) if "byteorder" in records else b"little"
    except _FAILURES as error:
        raise CheckpointDamaged(f"{path} is damaged at byte {begin}: {error}") from None
    if order != b"little":
        raise CheckpointError(f"{path} was written on a machine of the other byte order")
    return unpickle(pickled, path, _rebuild(file, end, records))


class _Prefix(mmap.mmap):
    """The bytes of a file up to the end of an archive, which zipfile searches from the end."""

    def seekable(self) -> bool:  # not before Python 3.13
        return True


def _rebuild(
    file: MappedFile, end: int, records: dict[str, zipfile.ZipInfo]
) -> Callable[..., StoredArray]:
    def rebuild(storage: Storage, offset: int, shape: Shape, stride: Shape) -> StoredArray:
        dtype, key, numel = storage
        info = records[f"data/{key}"]
        header = info.header_offset
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(file.bytes, header)
        start = header + _LOCAL_HEADER.size + name_bytes + extra_bytes
        last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        counts = [offset, *shape, *stride, numel]
        if not are_counts(counts) or len(shape) != len(stride) or prod(shape) > numel:
            raise ValueError(f"a tensor of {shape} cannot be in {numel} elements")
        fits = start + info.file_size <= end and numel * dtype.itemsize <= info.file_size
        inside = 0 in shape or last < numel
        if magic != b"PK\x03\x04" or info.compress_type or not fits or not inside:
            raise ValueError(f"record {info.filename} does not hold its tensor")
        view = torch.empty(numel, dtype=dtype, device="meta").as_strided(shape, stride, offset)
        return StoredArray(view, partial(file.elements, start, info.file_size, info.CRC, dtype))

    return rebuild


class _Pickler(pickle._Pickler):
    """Write numpy's functions by the names of numpy 1, which numpy 2 can import too.

    Megatron-LM core_v0.14 runs with numpy 1, which before 1.26 has no module numpy._core.
    """

    def save_global(self: Any, obj: Any, name: str | None = None) -> None:
        if getattr(obj, "__module__", None) == "numpy._core.multiarray":
            self.write(f"cnumpy.core.multiarray\n{name or obj.__qualname__}\n".encode("ascii"))
            self.memoize(obj)
        else:
            pickle._Pickler.save_global(self, obj, name)  # type: ignore[attr-defined]


_PICKLE = SimpleNamespace(Pickler=_Pickler, __name__="pickle")


def write_archive(file: BinaryIO, value: object, name: str = "a value") -> None:
    """Write ``value`` as torch.save does.

    Raises OSError, and CheckpointError, with ``name``, for a value that cannot be pickled.
    """
    try:
        torch.save(value, file, pickle_module=_PICKLE)
    except RuntimeError as error:  # torch reports a short file, in place of the full disk
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{name} cannot be pickled ({error}): give numbers, text, lists, dicts or tensors, or "
            "leave it out"
        ) from None


def save_archive(path: Path, value: object) -> FileEntry:
    """Write ``value`` to ``path`` as torch.save does, and fsync it.  Raises OSError."""
    with open(path, "wb") as file:  # torch's own file writer hides the OSError of a full disk
        write_archive(file, value, f"a value of {path.name}")
    return adopt_file(path)


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values on the CPU, in a storage without other data."""
    tensor = tensor.detach().cpu().contiguous()
    is_whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.dtype.itemsize
    return tensor if is_whole else tensor.clone()
