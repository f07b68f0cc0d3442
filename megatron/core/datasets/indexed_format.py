"""Formats of the files beside tokens: ``prefix.idx`` (the index) and ``prefix.crc`` (checksums).

Both are little-endian.  .idx stores the position of each token sequence in .bin.  S = number of
sequences, D = entries of the document index (documents + 1): magic, u64 version, u8 dtype code,
u64 S, u64 D, then the arrays i32[S] sequence lengths (tokens), i64[S] sequence pointers (bytes into
.bin), i64[D] document index (document d is the sequences [index[d], index[d+1])), and, for
multimodal data only, i8[S] modes.

.crc holds a CRC-32 of each MiB of .bin, and one of .idx: magic, u32 CRC-32 of all bytes after it,
u32 bytes per block, u64 bytes of .bin, u64 bytes of .idx, u32 checksum of .idx (the CRC-32 of the
CRC-32s of its blocks), u32[B] CRC-32 of each block of .bin.  Megatron-LM does not read the file and
works without it.
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
from enum import Enum
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from megatron.core.config.errors import DataError
from megatron.core.datasets.index_cache import write_atomically

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, S, D
CHUNK = 1 << 20  # entries per read or write: bounds memory for any file size


class DType(Enum):
    """Token types and their codes in the .idx header."""

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float64 = 6
    float32 = 7
    uint16 = 8

    @classmethod
    def code_from_dtype(cls, dtype: DTypeLike) -> int:
        """Return the code of a numpy dtype; raise KeyError if the format has none for it."""
        return cls[np.dtype(dtype).name].value

    @classmethod
    def dtype_from_code(cls, code: int) -> np.dtype:
        """Return the little-endian numpy dtype of a code; raise ValueError for an unknown code."""
        dtype: np.dtype = np.dtype(cls(code).name).newbyteorder("<")
        return dtype

    @staticmethod
    def size(key: int | DTypeLike) -> int:
        """Return the bytes per token of a code or dtype."""
        dtype = DType.dtype_from_code(key) if isinstance(key, int) else np.dtype(key)
        return int(dtype.itemsize)

    @staticmethod
    def optimal_dtype(cardinality: int | None) -> type[np.integer]:
        """Return uint16 if a vocabulary of ``cardinality`` tokens fits, else int32."""
        return np.uint16 if cardinality is not None and cardinality < 65500 else np.int32


def get_idx_path(path_prefix: str) -> str:
    """Return the path of the index file of a path prefix."""
    return path_prefix + ".idx"


def get_bin_path(path_prefix: str) -> str:
    """Return the path of the token file of a path prefix."""
    return path_prefix + ".bin"


def unreadable(path: str, error: OSError | ValueError) -> DataError:
    """Return the error for a data file that cannot be opened; ValueError is a NUL in the path."""
    reason = getattr(error, "strerror", None) or error
    if os.path.isfile(path[:-4]) and not path[:-4].endswith((".bin", ".idx")):
        return DataError(
            f"{path[:-4]} is a file, not a prefix of .bin and .idx: only left-to-right pretraining "
            "reads text in --data-path; write the two files with tools/preprocess_data.py"
        )
    return DataError(
        f"{path}: {reason}; a data path is named without "
        ".bin or .idx, with a weight before each of several or before none"
    )


class SequenceIndex:
    """Memory-mapped arrays of an .idx file; opening does O(1) checks, ``check_arrays`` the rest."""

    def __init__(self, idx_path: str, multimodal: bool) -> None:
        self.idx_path = idx_path
        try:
            with open(idx_path, "rb", buffering=0) as file:
                num_bytes = os.fstat(file.fileno()).st_size
                map_ = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if num_bytes else None
        except (OSError, ValueError) as error:
            raise unreadable(idx_path, error) from error
        self._map = map_
        buffer = map_ or b""
        self.num_bytes = len(buffer)
        self.dtype, num_sequences, num_documents = _parse_header(idx_path, buffer)
        expected = HEADER.size + 12 * num_sequences + 8 * num_documents
        expected += num_sequences if multimodal else 0
        if num_bytes < expected:
            raise DataError(
                f"{idx_path} has {num_bytes} bytes, its header asks for {expected} "
                f"({num_sequences} sequences, multimodal {multimodal}): "
                "the file is cut short or of another kind; preprocess it again"
            )
        self.dtype_size = self.dtype.itemsize
        at = HEADER.size
        self.sequence_lengths = np.frombuffer(buffer, "<i4", num_sequences, at)
        self.sequence_pointers = np.frombuffer(buffer, "<i8", num_sequences, at + 4 * num_sequences)
        at += 12 * num_sequences
        self.document_indices = np.frombuffer(buffer, "<i8", num_documents, at)
        self.sequence_modes: np.ndarray | None = None
        if multimodal:
            at += 8 * num_documents
            self.sequence_modes = np.frombuffer(buffer, "<i1", num_sequences, at)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, idx: int) -> tuple[int, int, int | None]:
        """Return (pointer in bytes, length in tokens, mode or None) of a sequence."""
        self.check_not_cut()
        mode = None if self.sequence_modes is None else self.sequence_modes[idx]
        return self.sequence_pointers[idx], self.sequence_lengths[idx], mode

    def check_not_cut(self) -> None:
        """Raise DataError if the file became shorter: access beyond its end would raise SIGBUS."""
        if self._map is not None and (now := self._map.size()) < self.num_bytes:
            raise DataError(
                f"{self.idx_path} had {self.num_bytes} bytes when it was opened and has {now} now: "
                "it was cut short; copy it again"
            )

    def data(self) -> mmap.mmap | bytes:
        """Return all bytes of the file."""
        self.check_not_cut()
        return self._map or b""

    def check_arrays(self, bin_path: str, bin_bytes: int) -> None:
        """Raise DataError unless sequences are inside .bin, disjoint, and the document index fits.

        One pass over the arrays in chunks reads all of them; memory is constant.
        """
        self.check_not_cut()
        documents = self.document_indices
        if len(documents) == 0 or documents[0] != 0 or documents[-1] != len(self):
            raise self._damaged(
                f"its document index must run from 0 to {len(self)}, "
                f"found {documents[:1].tolist()} to {documents[-1:].tolist()}"
            )
        for start in range(0, len(documents), CHUNK):
            self.check_not_cut()
            part = documents[start : start + CHUNK + 1]
            if (part[1:] < part[:-1]).any():
                raise self._damaged("its document index must never fall")
        for start in range(0, len(self), CHUNK):
            self.check_not_cut()
            lengths = self.sequence_lengths[start : start + CHUNK].astype(np.int64)
            pointers = self.sequence_pointers[start : start + CHUNK]
            if lengths.min() < 0 or pointers.min() < 0:
                raise self._damaged("it holds a negative length or pointer")
            ends = pointers + lengths * self.dtype_size  # beyond 64 bits: below its pointer
            following = self.sequence_pointers[start + 1 : start + 1 + CHUNK]
            overlaps = np.maximum(ends, pointers)[: len(following)] > following
            if overlaps.any():
                at = start + int(np.argmax(overlaps))
                raise self._damaged(f"its sequences {at} and {at + 1} overlap in .bin")
        if len(self):
            end = int(self.sequence_pointers[-1])
            end += int(self.sequence_lengths[-1]) * self.dtype_size
            if end > bin_bytes:
                raise DataError(
                    f"{bin_path} has {bin_bytes} bytes, but {self.idx_path} points up to byte "
                    f"{end}: the two do not belong together or .bin is cut short; "
                    "copy it again or preprocess again"
                )

    def _damaged(self, what: str) -> DataError:
        return DataError(f"{self.idx_path} is damaged: {what}; copy it again or preprocess again")


def _parse_header(idx_path: str, buffer: mmap.mmap | bytes) -> tuple[np.dtype, int, int]:
    if len(buffer) < HEADER.size:
        raise DataError(
            f"{idx_path} has {len(buffer)} bytes, fewer than an index header: "
            "the file is cut short; preprocess it again"
        )
    magic, version, code, num_sequences, num_documents = HEADER.unpack_from(buffer)
    if magic != MAGIC:
        raise DataError(
            f"{idx_path} starts with {magic!r}, not {MAGIC!r}: it is no index file of "
            "tools/preprocess_data.py"
        )
    if version != 1:
        raise DataError(f"{idx_path} has format version {version}, only 1 is known")
    if code not in {member.value for member in DType}:
        raise DataError(f"{idx_path} has token type code {code}, known are 1 to 8")
    return DType.dtype_from_code(code), num_sequences, num_documents


Bytes = bytes | memoryview | mmap.mmap

BLOCK_BYTES = 1 << 20
_MAGIC = b"MMIDCRC1"
_START = struct.Struct("<8sI")
_HEADER = struct.Struct("<IQQI")
_READ_BYTES = 16 * BLOCK_BYTES


def get_crc_path(path_prefix: str) -> str:
    """Return the path of the checksum file of a path prefix."""
    return path_prefix + ".crc"


class BlockCrcs:
    """Running CRC-32 of each block of a byte stream, which begins with ``data``."""

    def __init__(self, data: Bytes = b"") -> None:
        self.num_bytes = 0
        self._crcs = array("Q")
        self.add(data)

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


class ChecksummedFile(io.BufferedWriter):
    """A new file that computes the checksums of the bytes written to it.

    A CRC of each small write would cost more than the write: they are joined.
    """

    def __init__(self, path: str) -> None:
        raw = _ChecksummedRaw(path, "w")
        super().__init__(raw, 1 << 20)
        self.crcs = raw.crcs

    def sync_and_close(self) -> None:
        """Wait until all bytes are on the disk."""
        self.flush()
        os.fsync(self.fileno())
        self.close()


class _ChecksummedRaw(io.FileIO):
    def __init__(self, path: str, mode: str) -> None:
        super().__init__(path, mode)
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
        crcs = BlockCrcs(), BlockCrcs()
        for path, found in zip((get_bin_path, get_idx_path), crcs, strict=True):
            for _, piece in read_blocks(path(path_prefix)):
                found.add(piece)
        return cls.of(*crcs)

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
            raise unreadable(path, error) from error
        magic, crc = _START.unpack_from(data.ljust(_START.size))
        content = data[_START.size :]
        if magic != _MAGIC or zlib.crc32(content) != crc or len(content) < _HEADER.size:
            raise _mismatch(path_prefix, f"{path}: its own checksum")
        block_bytes, bin_bytes, idx_bytes, idx_checksum = _HEADER.unpack_from(content)
        blocks = np.frombuffer(content[_HEADER.size :], "<u4")
        if block_bytes != BLOCK_BYTES or len(blocks) != -(-bin_bytes // BLOCK_BYTES):
            raise _mismatch(
                path_prefix, f"{path}: the number of its blocks, {len(blocks)} of {block_bytes},"
            )
        return cls(bin_bytes, idx_bytes, idx_checksum, blocks)

    def check(self, path_prefix: str, bin_bytes: int, idx_bytes: int, idx: Bytes | None) -> None:
        """Raise DataError unless sizes and, if given, the content of .idx match."""
        sizes = (bin_bytes, idx_bytes)
        known = (self.bin_bytes, self.idx_bytes)
        if sizes != known:
            raise _mismatch(path_prefix, f"the size of .bin and .idx, {sizes}, not {known},")
        if idx is not None and BlockCrcs(idx).checksum() != self.idx_checksum:
            raise _mismatch(path_prefix, f"{get_idx_path(path_prefix)}: the checksum")

    def wrong_blocks(self, first_block: int, data: Bytes) -> list[int]:
        """Return the numbers of the blocks in ``data`` whose CRC does not match.

        ``data`` starts at block ``first_block``.
        """
        pairs = zip(self.blocks[first_block:], BlockCrcs(data).blocks(), strict=False)
        return [first_block + i for i, (known, found) in enumerate(pairs) if known != found]

    def check_blocks(self, path_prefix: str, first_block: int, data: Bytes) -> None:
        """Raise DataError if the CRC of a block in ``data`` does not match."""
        if wrong := self.wrong_blocks(first_block, data):
            start = wrong[0] * BLOCK_BYTES
            end = min(start + BLOCK_BYTES, self.bin_bytes)
            path = get_bin_path(path_prefix)
            raise _mismatch(path_prefix, f"{path}, bytes {start} to {end}: the checksum")


def _mismatch(path_prefix: str, what: str) -> DataError:
    return DataError(
        f"{what} does not match {get_crc_path(path_prefix)}: the data is damaged (copy it again or "
        "preprocess again) or another program has written it since (write the checksums again: "
        f"python tools/verify_data.py --write {path_prefix})"
    )


def read_blocks(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield a file in pieces, each with the number of its first block."""
    with open(path, "rb") as file:
        for first_block in count(step=_READ_BYTES // BLOCK_BYTES):
            if not (piece := file.read(_READ_BYTES)):
                return
            yield first_block, piece
