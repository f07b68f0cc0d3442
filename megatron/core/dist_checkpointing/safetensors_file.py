"""Write and parse one safetensors file: 8-byte header length, JSON header, contiguous data.

The writer computes a crc32 of each 4 MiB block of each tensor, so that a reader can verify only the
part it needs.  It uses ordinary writes, not a memory map: on a full disk a map raises SIGBUS.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.config.value_types import JsonObject, Shape
from megatron.core.diagnostics.fault_injection import fault_point, flip_bit
from megatron.core.dist_checkpointing.manifest import FileEntry, are_counts, crc32, json_object

BLOCK_BYTES = 4 << 20
_ALIGNMENT = 8
LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses longer ones

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class LazyTensor:
    """A tensor created when it is written, so that only one tensor of a file is in memory.

    ``file``: where it is read, for error messages.
    """

    name: str
    dtype: torch.dtype
    shape: Shape
    make: Callable[[], Tensor]
    file: Path | None = None

    @property
    def place(self) -> str:
        """Name and file, for error messages."""
        return self.name if self.file is None else f"{self.file}: {self.name}"

    @property
    def num_bytes(self) -> int:
        """Size of the values."""
        return prod(self.shape) * self.dtype.itemsize


def write_file(
    path: Path, tensors: Sequence[LazyTensor], metadata: dict[str, str], step: int
) -> tuple[FileEntry, list[JsonObject]]:
    """Create and write one tensor after the other, and fsync.

    Returns the file's entry, whose crc32 covers the header, and of each tensor its ``start`` in the
    file, ``num_bytes`` and ``crc32`` of each block.  ``step`` is for fault points.  Raises OSError,
    and CheckpointError for a dtype that the format cannot store.
    """
    header, starts = _layout(tensors, metadata)
    written = []
    with open(path, "wb", buffering=1 << 20) as file:
        file.write(header)
        for tensor, start in zip(tensors, starts, strict=True):
            flips = fault_point("save.tensor", step=step) == "bitflip"
            checksums = _write_blocks(file, tensor, flips=flips)
            written.append({"start": start, "num_bytes": tensor.num_bytes, "crc32": checksums})
        fault_point("save.before_fsync", step=step)
        file.flush()
        os.fsync(file.fileno())
        num_bytes = file.tell()
    return FileEntry(num_bytes, len(header), crc32(header)), written


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name without its module, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def piece_name(key: str, whole: Shape, offset: Sequence[int], shape: Shape) -> str:
    """Return the name of a box of ``key`` in a file; a partial box is ``key[0:64,32:64]``."""
    if shape == whole:
        return key
    box = ",".join(f"{o}:{o + n}" for o, n in zip(offset, shape, strict=True))
    return f"{key}[{box}]"


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes in row-major order; copies only if not contiguous or not on the CPU."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in the header of a file; ``start``: bytes from the beginning of the file."""

    dtype: torch.dtype
    shape: Shape
    start: int
    num_bytes: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file by name; reads only the header and the file size.

    Raises CheckpointError if the file cannot be read or is not a safetensors file.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if length > min(_MAX_HEADER_BYTES, max(0, size - LENGTH_BYTES)):
                raise CheckpointDamaged(
                    f"{path} is no safetensors file: its header would be {length} B and it has "
                    f"{size} B"
                )
            header = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    return parse_header(path, header, size - LENGTH_BYTES - length)


def parse_header(path: Path, header: bytes, data_bytes: int) -> dict[str, TensorEntry]:
    """Return the tensors described by ``header``, the JSON of file ``path``, by name.

    Raises CheckpointDamaged unless the tensors fill ``data_bytes`` without gaps or overlaps, and
    each has the size of its shape; CheckpointError for a dtype that torch does not have.
    """
    entries = json_object(header, f"{path} is no safetensors file: its header")
    entries.pop("__metadata__", None)
    begin = LENGTH_BYTES + len(header)
    tensors = {name: _tensor_entry(path, name, entry, begin) for name, entry in entries.items()}
    end = begin
    # Empty tensors sort before a non-empty one with the same start.
    for name, tensor in sorted(
        tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)
    ):
        if tensor.start != end:
            raise CheckpointDamaged(
                f"{path} is damaged: {name} begins at byte {tensor.start}, not at {end}"
            )
        end += tensor.num_bytes
    if end != begin + data_bytes:
        raise CheckpointDamaged(
            f"{path} is damaged: it has {begin + data_bytes} B, its tensors take {end} B"
        )
    return tensors


def _tensor_entry(path: Path, name: str, entry: object, begin: int) -> TensorEntry:
    fields = entry if isinstance(entry, dict) else {}
    kind, sizes, offsets = (fields.get(field) for field in ("dtype", "shape", "data_offsets"))
    if not isinstance(kind, str) or not are_counts(sizes) or not are_counts(offsets):
        raise CheckpointDamaged(f"{path} is damaged: its header does not describe {name}")
    dtype = DTYPES.get(kind)
    if dtype is None:
        raise CheckpointError(f"{path}: {name} has dtype {kind}, which torch lacks")
    low, high = offsets if len(offsets) == 2 else (1, 0)
    if high - low != prod(sizes) * dtype.itemsize:
        raise CheckpointDamaged(
            f"{path} is damaged: {name} has {high - low} B for {kind} {list(sizes)}"
        )
    return TensorEntry(dtype, tuple(sizes), begin + low, high - low)


def _layout(tensors: Sequence[LazyTensor], metadata: dict[str, str]) -> tuple[bytes, list[int]]:
    """Return the header, and the position in the file where each tensor begins."""
    entries: JsonObject = {"__metadata__": metadata}
    begins = []
    end = 0
    for tensor in tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{tensor.name}: a checkpoint cannot hold {tensor.dtype}")
        begin = end
        end = end + tensor.num_bytes
        begins.append(begin)
        entries[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    assert len(entries) == len(tensors) + 1, "two pieces of one file have the same name"
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return header, [len(header) + begin for begin in begins]


def _write_blocks(file: BinaryIO, tensor: LazyTensor, *, flips: bool) -> list[int]:
    """Write ``tensor`` block by block, while the block is in the CPU cache from its checksum.

    ``flips``: flip one bit, as a faulty disk would (fault injection).
    """
    values = tensor.make()
    found = (values.dtype, values.shape)
    expected = (tensor.dtype, tensor.shape)
    assert found == expected, f"{tensor.name} is {found}, expected {expected}"
    data = bytes_of(values)
    checksums = []
    for begin in range(0, len(data), BLOCK_BYTES):
        block = data[begin : begin + BLOCK_BYTES]
        checksums.append(crc32(block))
        file.write(flip_bit(block) if flips else block)
    return checksums
