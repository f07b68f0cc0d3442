"""Checksums of token files: ``prefix.crc`` holds a CRC-32 of each MiB of .bin, and one of .idx.

Layout, little-endian: magic, u32 CRC-32 of all bytes after it, u32 bytes per block, u64 bytes of
.bin, u64 bytes of .idx, u32 checksum of .idx (the CRC-32 of the CRC-32s of its blocks), u32[B]
CRC-32 of each block of .bin.  Megatron-LM does not read the file and works without it.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron.core.config.errors import DataError
from megatron.core.datasets.index_cache import write_atomically
from megatron.core.datasets.indexed_format import get_bin_path, get_idx_path

Bytes = bytes | memoryview | mmap.mmap

BLOCK_BYTES = 1 << 20
_MAGIC = b"MMIDCRC1"
_START = struct.Struct("<8sI")
_HEADER = struct.Struct("<IQQI")
_READ_BYTES = 16 * BLOCK_BYTES


class BinReader(Protocol):
    """Reader of ``count`` values at byte ``offset`` of a .bin file."""

    def read(self, dtype: np.dtype, count: int, offset: int) -> np.ndarray: ...


def get_crc_path(path_prefix: str) -> str:
    """Return the path of the checksum file of a path prefix."""
    return path_prefix + ".crc"


class BlockCrcs:
    """Running CRC-32 of each block of a byte stream."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._crcs = array("Q")

    def add(self, data: Bytes) -> None:
        """Append ``data`` to the stream."""
        rest = memoryview(data).cast("B")
        while rest:
            in_block = self.num_bytes % BLOCK_BYTES
            part = rest[: BLOCK_BYTES - in_block]
            if in_block == 0:
                self._crcs.append(0)
            self._crcs[-1] = zlib.crc32(part, self._crcs[-1])
            self.num_bytes += len(part)
            rest = rest[len(part) :]

    def blocks(self) -> np.ndarray:
        """Return u32[B], the CRC-32 of each block so far; the last block may be incomplete."""
        return np.array(self._crcs, "<u4")

    def checksum(self) -> int:
        """Return one checksum of all bytes so far: the CRC-32 of the block CRCs."""
        return zlib.crc32(self.blocks().tobytes())


class ChecksummedFile(io.FileIO):
    """A new file that computes the checksums of the bytes written to it.

    Wrap it in an ``io.BufferedWriter``: a CRC of each small write would cost more than the write.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path, "w")
        self.crcs = BlockCrcs()

    def write(self, data: Any) -> int:
        num_bytes = super().write(data)
        self.crcs.add(memoryview(data)[:num_bytes])
        return num_bytes


@dataclass(frozen=True)
class Checksums:
    """Contents of a .crc file."""

    bin_bytes: int
    idx_bytes: int
    idx_checksum: int
    blocks: np.ndarray  # u32[B], CRC-32 of each block of .bin

    @classmethod
    def of(cls, bin_crcs: BlockCrcs, idx_crcs: BlockCrcs) -> Checksums:
        """Combine the checksums of two files that were read or written completely."""
        blocks, checksum = bin_crcs.blocks(), idx_crcs.checksum()
        return cls(bin_crcs.num_bytes, idx_crcs.num_bytes, checksum, blocks)

    @classmethod
    def of_files(cls, path_prefix: str) -> Checksums:
        """Compute the checksums of an existing .bin/.idx pair; reads both files completely."""
        return cls.of(*(_crcs_of(path(path_prefix)) for path in (get_bin_path, get_idx_path)))

    def write(self, path_prefix: str) -> None:
        """Write ``prefix.crc`` completely or not at all."""
        header = _HEADER.pack(BLOCK_BYTES, self.bin_bytes, self.idx_bytes, self.idx_checksum)
        content = header + self.blocks.astype("<u4").tobytes()
        start = _START.pack(_MAGIC, zlib.crc32(content))
        write_atomically(get_crc_path(path_prefix), lambda file: file.write(start + content))

    @classmethod
    def read(cls, path_prefix: str) -> Checksums | None:
        """Read ``prefix.crc``; return None if it is missing, raise DataError if it is damaged."""
        path = get_crc_path(path_prefix)
        try:
            with open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: {error}; {_write_again(path_prefix)}") from error
        magic, crc = _START.unpack_from(data.ljust(_START.size))
        content = data[_START.size :]
        if magic != _MAGIC or zlib.crc32(content) != crc or len(content) < _HEADER.size:
            raise DataError(f"{path} is damaged or of another kind: {_write_again(path_prefix)}")
        block_bytes, bin_bytes, idx_bytes, idx_checksum = _HEADER.unpack_from(content)
        blocks = np.frombuffer(content[_HEADER.size :], "<u4")
        if block_bytes != BLOCK_BYTES or len(blocks) != -(-bin_bytes // BLOCK_BYTES):
            raise DataError(
                f"{path} has {len(blocks)} blocks of {block_bytes} bytes for {bin_bytes} bytes, "
                f"not of {BLOCK_BYTES}: {_write_again(path_prefix)}"
            )
        return cls(bin_bytes, idx_bytes, idx_checksum, blocks)

    def check_sizes(self, path_prefix: str, bin_bytes: int, idx_bytes: int) -> None:
        """Raise DataError if the sizes do not match: the checksums belong to other data."""
        if (bin_bytes, idx_bytes) != (self.bin_bytes, self.idx_bytes):
            raise DataError(
                f"{get_crc_path(path_prefix)} was written for a .bin of {self.bin_bytes} bytes and "
                f"an .idx of {self.idx_bytes} bytes, but they have {bin_bytes} and {idx_bytes}: if "
                f"another program wrote the data, {_write_again(path_prefix)}; otherwise copy the "
                "three files again"
            )

    def check_index(self, path_prefix: str, idx: Bytes) -> None:
        """Raise DataError if the checksum of ``idx`` (the bytes of .idx) does not match."""
        crcs = BlockCrcs()
        crcs.add(idx)
        if crcs.checksum() != self.idx_checksum:
            raise damaged(path_prefix, get_idx_path(path_prefix))

    def wrong_blocks(self, first_block: int, data: Bytes) -> list[int]:
        """Return the numbers of the blocks in ``data`` whose CRC does not match.

        ``data`` starts at block ``first_block``.
        """
        crcs = BlockCrcs()
        crcs.add(data)
        found = crcs.blocks()
        known = self.blocks[first_block : first_block + len(found)]
        found = found[: len(known)]  # check_sizes finds files that are too long
        return (first_block + np.flatnonzero(known != found)).tolist()


class VerifyingReader:
    """Reader that verifies each block of .bin before its first read in this process."""

    def __init__(self, reader: BinReader, path_prefix: str, checksums: Checksums) -> None:
        self._reader = reader
        self._path_prefix = path_prefix
        self._checksums = checksums
        self._is_verified = np.zeros(len(checksums.blocks), bool)

    def read(self, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
        first, end = offset // BLOCK_BYTES, offset + count * dtype.itemsize
        for block in range(first, -(-end // BLOCK_BYTES)):
            if not self._is_verified[block]:
                self._verify(block)
        return self._reader.read(dtype, count, offset)

    def _verify(self, block: int) -> None:
        start = block * BLOCK_BYTES
        end = min(start + BLOCK_BYTES, self._checksums.bin_bytes)
        data = self._reader.read(np.dtype(np.uint8), end - start, start)
        if self._checksums.wrong_blocks(block, data.data):
            path = get_bin_path(self._path_prefix)
            raise damaged(self._path_prefix, f"{path}, bytes {start} to {end}")
        self._is_verified[block] = True


def read_blocks(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield a file in pieces, each with the number of its first block."""
    with open(path, "rb", buffering=0) as file:
        block = 0
        while piece := _read_fully(file, _READ_BYTES):
            yield block, piece
            block += _READ_BYTES // BLOCK_BYTES


def read_verified(path_prefix: str, checksums: Checksums | None) -> Iterator[bytes]:
    """Yield the bytes of .bin in pieces; raise DataError at a block with a wrong checksum."""
    path = get_bin_path(path_prefix)
    for first_block, piece in read_blocks(path):
        if checksums is not None and (wrong := checksums.wrong_blocks(first_block, piece)):
            start = wrong[0] * BLOCK_BYTES
            end = min(start + BLOCK_BYTES, checksums.bin_bytes)
            raise damaged(path_prefix, f"{path}, bytes {start} to {end}")
        yield piece


def damaged(path_prefix: str, where: str) -> DataError:
    """Return the error for a wrong checksum; ``where`` names the file and the bytes."""
    crc_path = get_crc_path(path_prefix)
    message = f"{where}: the checksum in {crc_path} does not match"
    files = (get_bin_path(path_prefix), get_idx_path(path_prefix))
    if any(os.path.getmtime(path) > os.path.getmtime(crc_path) for path in files):
        return DataError(
            f"{message}: the data is damaged, or was changed after its checksums were written; if "
            f"another program wrote it, {_write_again(path_prefix)}; otherwise copy it again or "
            "preprocess again"
        )
    return DataError(f"{message}: the data is damaged; copy it again or preprocess again")


def _write_again(path_prefix: str) -> str:
    return f"write the checksums again (python tools/verify_data.py --write {path_prefix})"


def _crcs_of(path: str) -> BlockCrcs:
    crcs = BlockCrcs()
    for _, piece in read_blocks(path):
        crcs.add(piece)
    return crcs


def _read_fully(file: io.RawIOBase, num_bytes: int) -> bytes:
    data = file.read(num_bytes) or b""
    while len(data) < num_bytes and (piece := file.read(num_bytes - len(data))):
        data += piece
    return data
