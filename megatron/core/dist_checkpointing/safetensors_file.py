"""One file in safetensors byte layout: 8 bytes header length, JSON header, data end to end.

Checksums are made while the bytes pass by: crc32 of each 4 MiB block of each tensor, so that a
reader can verify the part it needs.  Written with plain writes, never through a memory map: on a
full disk that would be a bus error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.manifest import crc32
from megatron.core.faults import fault_point, flipped

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
    """A tensor that is made when it is written, so that only one of a file is in memory."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Written:
    """Where one tensor lies in its file, and the crc32 of each of its blocks."""

    start: int  # bytes from the beginning of the file
    num_bytes: int
    crc32: list[int]


@dataclass(frozen=True)
class FileReport:
    """A finished file.  Header included, ``num_bytes`` long."""

    num_bytes: int
    header_bytes: int
    header_crc32: int
    tensors: list[Written]


def write_file(
    path: Path, tensors: Sequence[LazyTensor], metadata: dict[str, str], step: int
) -> FileReport:
    """Make and write one tensor after the other, and fsync.  ``step`` is for fault points.

    Raises OSError, and CheckpointError for a dtype that the format cannot hold.
    """
    header, starts = _layout(tensors, metadata)
    written: list[Written] = []
    with open(path, "wb", buffering=1 << 20) as file:
        file.write(header)
        for tensor, start in zip(tensors, starts, strict=True):
            flips = fault_point("save.tensor", step=step) == "bitflip"
            checksums = _write_blocks(file, tensor, flips=flips)
            written.append(Written(start, tensor.num_bytes, checksums))
        fault_point("save.before_fsync", step=step)
        file.flush()
        os.fsync(file.fileno())
        num_bytes = file.tell()
    return FileReport(num_bytes, len(header), crc32(header), written)


def _made(lazy: LazyTensor) -> Tensor:
    tensor = lazy.make()
    found, told = (tensor.dtype, tuple(tensor.shape)), (lazy.dtype, lazy.shape)
    assert found == told, f"{lazy.name} was to be {told} and is {found}"
    return tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """The elements in row-major order; copies only what is not contiguous or not in memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_header(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file: tensor name -> dtype, shape, data_offsets."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if length > _MAX_HEADER_BYTES:
            raise CheckpointError(f"{path} is no safetensors file: its header would be {length} B")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError:
            raise CheckpointError(f"{path} is no safetensors file: its header is no JSON") from None
    return header


def _layout(tensors: Sequence[LazyTensor], metadata: dict[str, str]) -> tuple[bytes, list[int]]:
    """The header, and where in the file each tensor begins."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    begins: list[int] = []
    end = 0
    for tensor in tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{tensor.name}: a checkpoint cannot hold {tensor.dtype}")
        begins.append(end)
        end += tensor.num_bytes
        entries[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begins[-1], end],
        }
    assert len(entries) == len(tensors) + 1, "two pieces of one file have the same name"
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return header, [len(header) + begin for begin in begins]


def _write_blocks(file: BinaryIO, tensor: LazyTensor, *, flips: bool) -> list[int]:
    """Write ``tensor`` block by block, each while it is still in the cache from its checksum.

    ``flips``: as a disk would that loses a bit.
    """
    data = bytes_of(_made(tensor))
    checksums: list[int] = []
    for begin in range(0, len(data), BLOCK_BYTES):
        block = data[begin : begin + BLOCK_BYTES]
        checksums.append(crc32(block))
        file.write(flipped(block) if flips else block)
    return checksums
