"""Write token sequences to disk: stream tokens to ``prefix.bin``, then write ``prefix.idx``."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterable, Sequence
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from megatron.core.config.errors import DataError
from megatron.core.datasets.block_checksums import (
    BlockCrcs,
    ChecksummedFile,
    Checksums,
    get_crc_path,
    read_verified,
)
from megatron.core.datasets.indexed_format import (
    CHUNK,
    HEADER,
    MAGIC,
    DType,
    SequenceIndex,
    get_bin_path,
    get_idx_path,
)

_SPOOL_BYTES = 1 << 24  # an index array below this size stays in memory


class IndexedDatasetBuilder:
    """Writer of a .bin/.idx pair; the final file names appear only in ``finalize``.

    Memory is bounded: large index arrays spill to unnamed temporary files beside .bin.
    """

    def __init__(
        self, bin_path: str, dtype: DTypeLike = np.int32, multimodal: bool = False
    ) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        DType.code_from_dtype(self.dtype)
        self.multimodal = multimodal
        self._bin_path = bin_path
        self._temporary_path = bin_path + ".tmp"
        self._bin_crcs, self._bin = _open_checksummed(self._temporary_path)
        directory = os.path.dirname(os.path.abspath(bin_path))
        self._lengths = _ArraySpool("<i4", directory)
        self._documents = _ArraySpool("<i8", directory)
        self._modes = _ArraySpool("<i1", directory)
        self._documents.append([0])

    def add_item(self, tensor: ArrayLike, mode: int = 0) -> None:
        """Append one sequence of tokens (array, list, or CPU tensor)."""
        tokens = self._encode(tensor)
        self._bin.write(tokens.data)
        self._lengths.append([tokens.size])
        if self.multimodal:
            self._modes.append([mode])

    def add_document(
        self, tensor: ArrayLike, lengths: Sequence[int], modes: Sequence[int] | None = None
    ) -> None:
        """Append a document: its tokens concatenated, and the length of each of its sequences."""
        tokens = self._encode(tensor)
        assert sum(lengths) == tokens.size, f"{tokens.size} tokens, lengths {list(lengths)}"
        self._bin.write(tokens.data)
        self._lengths.append(lengths)
        if self.multimodal:
            self._modes.append(modes if modes is not None else [0] * len(lengths))
        self.end_document()

    def add_documents(self, tokens: ArrayLike, lengths: ArrayLike) -> None:
        """Append many documents of one sequence each: concatenated tokens, tokens per document.

        A length of 0 is an empty document (no sequence), as ``add_document([], [])`` makes.
        """
        flat = self._encode(tokens)
        sizes = np.asarray(lengths, np.int64)
        assert int(sizes.sum()) == flat.size, f"{flat.size} tokens, lengths sum to {sizes.sum()}"
        first = len(self._lengths)
        self._bin.write(flat.data)
        filled = sizes[sizes > 0]
        self._lengths.append(filled)
        self._documents.append(first + np.cumsum(sizes > 0))
        if self.multimodal:
            self._modes.append(np.zeros(len(filled), np.int8))

    def end_document(self) -> None:
        """Make one document of the sequences added since the last call."""
        self._documents.append([len(self._lengths)])

    def add_index(self, path_prefix: str) -> None:
        """Append a complete dataset; raise DataError unless it has the same token type."""
        other = SequenceIndex(get_idx_path(path_prefix), self.multimodal)
        if other.dtype != self.dtype:
            raise DataError(
                f"{path_prefix}.idx holds {other.dtype.name} tokens, the files before it "
                f"{self.dtype.name}: merge files of one token type"
            )
        bin_path = get_bin_path(path_prefix)
        first, num_bytes = len(self._lengths), file_size(bin_path)
        other.check_arrays(bin_path, num_bytes)
        _check_contiguous(other, bin_path, num_bytes)
        checksums = Checksums.read(path_prefix)
        if checksums is not None:
            checksums.check_sizes(path_prefix, num_bytes, other.num_bytes)
            checksums.check_index(path_prefix, other.data())
        for part in _chunks(other.sequence_lengths):
            self._lengths.append(part)
        for part in _chunks(other.document_indices[1:]):
            self._documents.append(first + part)
        if other.sequence_modes is not None:
            for part in _chunks(other.sequence_modes):
                self._modes.append(part)
        for piece in read_verified(path_prefix, checksums):
            self._bin.write(piece)

    def finalize(self, idx_path: str) -> None:
        """Write index and checksums, and rename all files to their final names, .idx last.

        If .idx exists, then .bin is complete and belongs to it, even if the writer is killed.
        """
        documents_end = self._documents.last
        assert documents_end == len(self._lengths), (
            f"{len(self._lengths) - documents_end} sequences follow the last end_document()"
        )
        _sync_and_close(self._bin)
        idx_crcs, idx_file = _open_checksummed(idx_path + ".tmp")
        self._write_index(idx_file)
        _sync_and_close(idx_file)
        prefix = idx_path.removesuffix(".idx")
        for path in (idx_path, get_crc_path(prefix)):
            if os.path.exists(path):
                os.remove(path)
        os.replace(self._temporary_path, self._bin_path)
        if (get_bin_path(prefix), get_idx_path(prefix)) == (self._bin_path, idx_path):
            Checksums.of(self._bin_crcs, idx_crcs).write(prefix)
        os.replace(idx_path + ".tmp", idx_path)
        _sync_directory(os.path.dirname(os.path.abspath(idx_path)))

    def _write_index(self, file: BinaryIO) -> None:
        code = DType.code_from_dtype(self.dtype)
        file.write(HEADER.pack(MAGIC, 1, code, len(self._lengths), len(self._documents)))
        for lengths in self._lengths.chunks():
            file.write(lengths.data)
        position = 0  # bytes into .bin
        for lengths in self._lengths.chunks():
            ends = position + np.cumsum(lengths.astype(np.int64) * self.dtype.itemsize)
            pointers = np.concatenate(([position], ends[:-1])).astype("<i8")
            file.write(pointers.data)
            position = int(ends[-1])
        for spool in (self._documents, self._modes):
            for part in spool.chunks():
                file.write(part.data)

    def _encode(self, tokens: ArrayLike) -> np.ndarray:
        """Convert tokens to the file's type; raise DataError if one does not fit."""
        array = np.asarray(tokens)
        if array.dtype == self.dtype or array.size == 0:
            return np.ascontiguousarray(array, self.dtype)
        if self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            low, high = array.min(), array.max()
            if low < limits.min or high > limits.max:
                raise DataError(
                    f"{self._bin_path}: token ids {low} to {high} do not fit {self.dtype.name} "
                    f"({limits.min} to {limits.max}): the vocabulary size given to the writer is "
                    "too small"
                )
        return np.ascontiguousarray(array, self.dtype)


class _ArraySpool:
    """An append-only array, in memory while small, then in an unnamed temporary file."""

    def __init__(self, dtype: str, directory: str) -> None:
        self.dtype = np.dtype(dtype)
        self.last = 0
        self._file = tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES, dir=directory)  # noqa: SIM115
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, values: ArrayLike) -> None:
        array = np.asarray(values, self.dtype)
        if array.size:
            self._file.write(array.tobytes())
            self._length += array.size
            self.last = int(array[-1])

    def chunks(self) -> Iterable[np.ndarray]:
        self._file.seek(0)
        while piece := self._file.read(CHUNK * self.dtype.itemsize):
            yield np.frombuffer(piece, self.dtype)


def _open_checksummed(path: str) -> tuple[BlockCrcs, io.BufferedWriter]:
    """Open a new file; return the checksums that it updates, and the file."""
    raw = ChecksummedFile(path)
    return raw.crcs, io.BufferedWriter(raw, 1 << 20)


def _chunks(array: np.ndarray) -> Iterable[np.ndarray]:
    return (array[start : start + CHUNK] for start in range(0, len(array), CHUNK))


def _check_contiguous(index: SequenceIndex, bin_path: str, bin_bytes: int) -> None:
    """Raise DataError if .bin has gaps: ``add_index`` copies the complete file."""
    used = int(index.sequence_lengths.sum(dtype=np.int64)) * index.dtype_size
    if used != bin_bytes:
        raise DataError(
            f"{bin_path} has {bin_bytes} bytes, its index names {used}: it cannot be merged "
            "completely; preprocess it again"
        )


def file_size(path: str) -> int:
    """Return the size of a file; raise DataError if it does not exist."""
    try:
        return os.path.getsize(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _sync_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
