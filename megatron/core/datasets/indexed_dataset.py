"""Token sequences on disk: ``prefix.bin`` (raw tokens) and ``prefix.idx`` (the index).

The file formats are in ``indexed_format.py``.  Both modules import numpy but not torch, so that
preprocessing starts fast.
"""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from megatron.core.config.errors import DataError
from megatron.core.datasets.index_cache import warn_once
from megatron.core.datasets.indexed_format import (
    BLOCK_BYTES,
    CHUNK,
    HEADER,
    MAGIC,
    ChecksummedFile,
    Checksums,
    SequenceIndex,
    get_crc_path,
    read_blocks,
    unreadable,
)
from megatron.core.datasets.indexed_format import DType as DType
from megatron.core.datasets.indexed_format import get_bin_path as get_bin_path
from megatron.core.datasets.indexed_format import get_idx_path as get_idx_path
from megatron.core.datasets.object_storage_utils import (
    ObjectStorageConfig,
    RangeReader,
    cached_index_path,
    is_object_storage_path,
)


class _FileReader:
    """Read a .bin file with ``preadv``.

    The file stays open, or is opened for each read with --no-mmap-bin-files.  There is no memory
    map: when another process truncates the file, a read returns fewer bytes and raises DataError,
    while access to a map would kill the process with SIGBUS.
    """

    def __init__(self, bin_path: str, keeps_open: bool) -> None:
        self._bin_path = bin_path
        self._descriptor: int | None = None
        try:
            self.num_bytes = os.path.getsize(bin_path)
            if keeps_open:
                self._descriptor = os.open(bin_path, os.O_RDONLY)
                weakref.finalize(self, os.close, self._descriptor)
        except (OSError, ValueError) as error:
            raise unreadable(bin_path, error) from error

    def read(self, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
        if self._descriptor is not None:  # preadv moves no offset: forks may share it
            return self._read(self._descriptor, dtype, count, offset)
        with open(self._bin_path, "rb", buffering=0) as file:
            return self._read(file.fileno(), dtype, count, offset)

    def _read(self, descriptor: int, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
        sequence = np.empty(count, dtype)
        buffer = sequence.view(np.uint8).data
        while buffer:  # one call reads at most 2 GiB
            num_bytes = os.preadv(descriptor, [buffer], offset)
            if num_bytes == 0:
                raise DataError(
                    f"{self._bin_path} ends at byte {offset}: it was cut short after it was "
                    "opened; copy it again"
                )
            buffer, offset = buffer[num_bytes:], offset + num_bytes
        return sequence


class IndexedDataset:
    """Token sequences of one path prefix, as numpy arrays; read-only.

    ``dataset[i]`` is sequence i and ``dataset[a:b]`` a list of sequences; with ``multimodal`` both
    come as a tuple with their mode(s).  ``s3://`` and ``msc://`` prefixes need
    ``object_storage_config``.  If ``prefix.crc`` exists, the constructor checks .idx against it,
    and with ``verify_data`` each block of .bin is checked before its first read.  Without
    ``checks_index`` the arrays of .idx are not read: opening takes the same time for any size.
    Raises DataError when the files are missing, damaged, or do not belong together.
    """

    def __init__(
        self,
        path_prefix: str,
        multimodal: bool = False,
        mmap: bool = True,
        object_storage_config: ObjectStorageConfig | None = None,
        s3_config: ObjectStorageConfig | None = None,  # Megatron Core's former name of it
        verify_data: bool = False,
        checks_index: bool = True,
    ) -> None:
        object_storage_config = object_storage_config or s3_config
        self.path_prefix = path_prefix
        self.multimodal = multimodal
        self.mmap = mmap
        self.object_storage_config = object_storage_config
        self.verify_data = verify_data
        self.checks_index = checks_index
        idx_path, bin_path = get_idx_path(path_prefix), get_bin_path(path_prefix)
        self.bin_reader: _FileReader | RangeReader
        self.checksums: Checksums | None = None
        cure = f"write them with python tools/verify_data.py --write {path_prefix}"
        if is_object_storage_path(path_prefix):
            if object_storage_config is None:
                raise DataError(
                    f"{path_prefix} lies in object storage: give --object-storage-cache-path, "
                    "a local directory for the .idx files"
                )
            idx_path = cached_index_path(idx_path, object_storage_config)
            self.bin_reader = RangeReader(bin_path, object_storage_config.bin_chunk_nbytes)
            cure = "those of data in object storage are not read"
        else:
            self.bin_reader = _FileReader(bin_path, keeps_open=mmap)
            self.checksums = Checksums.read(path_prefix)
        self.index = SequenceIndex(idx_path, multimodal)
        if checks_index:
            self.index.check_arrays(bin_path, self.bin_reader.num_bytes)
        if self.checksums is not None:
            idx = self.index.data() if checks_index else None
            self.checksums.check(path_prefix, self.bin_reader.num_bytes, self.index.num_bytes, idx)
            self._is_verified = np.zeros(len(self.checksums.blocks), bool)
        elif verify_data:
            warn_once(f"--verify-data: {path_prefix} has no checksums: {cure}", logging.INFO)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[object, ...]]:
        rest = self.multimodal, self.mmap, self.object_storage_config
        return type(self), (self.path_prefix, *rest, None, self.verify_data, self.checks_index)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, idx: int | np.integer | slice) -> Any:
        if isinstance(idx, slice):
            return self._get_slice(*idx.indices(len(self)))
        return self.get(int(idx))

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        """Return ``length`` tokens of sequence ``idx`` starting at ``offset``.

        Without ``length``: all tokens from ``offset`` to the end.  Multimodal: (tokens, mode).
        """
        pointer, num_tokens, mode = self.index[idx]
        if length is None:
            length = int(num_tokens) - offset
        sequence = self._read(length, int(pointer) + offset * self.index.dtype_size)
        return sequence if mode is None else (sequence, mode)

    def _read(self, count: int, offset: int) -> np.ndarray:
        """Read tokens at byte ``offset``; with ``verify_data`` verify blocks not read before."""
        if self.checksums is not None and self.verify_data:
            end = offset + count * self.index.dtype_size
            for block in range(offset // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
                if not self._is_verified[block]:
                    self._verify(self.checksums, block)
        return self.bin_reader.read(self.index.dtype, count, offset)

    def _verify(self, checksums: Checksums, block: int) -> None:
        start = block * BLOCK_BYTES
        size = min(BLOCK_BYTES, self.bin_reader.num_bytes - start)
        data = self.bin_reader.read(np.dtype(np.uint8), size, start)
        checksums.check_blocks(self.path_prefix, block, data.data)
        self._is_verified[block] = True

    def _get_slice(self, start: int, stop: int, step: int) -> Any:
        """Return sequences [start, stop) with one read; they must be contiguous in .bin."""
        if step != 1:
            raise ValueError(f"slices of an IndexedDataset need step 1, got {step}")
        if stop <= start:
            return ([], np.empty(0, np.int8)) if self.multimodal else []
        lengths = self.sequence_lengths[start:stop]
        total = int(lengths.sum(dtype=np.int64))
        flat = self._read(total, int(self.index.sequence_pointers[start]))
        sequences = np.split(flat, np.cumsum(lengths[:-1], dtype=np.int64))
        modes = self.index.sequence_modes
        return sequences if modes is None else (sequences, modes[start:stop])

    @property
    def sequence_lengths(self) -> np.ndarray:
        """i32[S]: tokens in each sequence."""
        self.index.check_not_cut()
        return self.index.sequence_lengths

    @property
    def document_indices(self) -> np.ndarray:
        """i64[D]: first sequence of each document, followed by the total number of sequences."""
        self.index.check_not_cut()
        return self.index.document_indices

    @property
    def sequence_modes(self) -> np.ndarray | None:
        """i8[S]: the mode of each sequence of multimodal data; None for other data."""
        return self.index.sequence_modes

    @property
    def identity(self) -> list[int]:
        """Numbers that differ for other data: sizes, and a checksum of some lengths and documents.

        The cost does not grow with the data.
        """
        step = 1 + len(self) // _SAMPLED
        some = (self.sequence_lengths[::step], self.document_indices[::step])
        crc = zlib.crc32(b"".join(array.tobytes() for array in some))
        return [len(self), self.bin_reader.num_bytes, crc]

    def get_document_indices(self) -> np.ndarray:
        """Return ``document_indices``."""
        return self.document_indices

    def set_document_indices(self, document_indices: np.ndarray) -> None:
        """Replace the document index of this object; the files are not changed."""
        self.index.document_indices = document_indices

    @staticmethod
    def exists(path_prefix: str) -> bool:
        """Return whether both files of a local path prefix exist."""
        return all(os.path.exists(p(path_prefix)) for p in (get_idx_path, get_bin_path))


_SAMPLED = 4096  # sequences whose lengths identify data
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
        self._bin = ChecksummedFile(self._temporary_path)
        directory = os.path.dirname(os.path.abspath(bin_path))
        self._lengths = _ArraySpool("<i4", directory)
        self._documents = _ArraySpool("<i8", directory)
        self._modes = _ArraySpool("<i1", directory)
        self._documents.append([0])

    def add_item(self, tensor: ArrayLike, mode: int = 0) -> None:
        """Append one sequence of tokens (array, list, or CPU tensor)."""
        tokens = np.asarray(tensor)
        self._append(tokens, [tokens.size], [mode])

    def add_document(
        self, tensor: ArrayLike, lengths: Sequence[int], modes: Sequence[int] | None = None
    ) -> None:
        """Append a document: its tokens concatenated, and the length of each of its sequences."""
        self._append(tensor, lengths, modes)
        self.end_document()

    def add_documents(
        self, tokens: ArrayLike, lengths: ArrayLike, num_sequences: ArrayLike
    ) -> None:
        """Append many documents: concatenated tokens, tokens per sequence, sequences per document.

        A document of 0 sequences is empty, as ``add_document([], [])`` makes it.
        """
        first = len(self._lengths)
        self._append(tokens, lengths)
        self._documents.append(first + np.cumsum(num_sequences))

    def _append(
        self, tensor: ArrayLike, lengths: ArrayLike, modes: ArrayLike | None = None
    ) -> None:
        tokens = self._encode(tensor)
        sizes = np.asarray(lengths, np.int64)
        assert sizes.sum() == tokens.size, f"{tokens.size} tokens, lengths sum to {sizes.sum()}"
        self._bin.write(tokens.data)
        self._lengths.append(sizes)
        if self.multimodal:
            self._modes.append(np.zeros(len(sizes)) if modes is None else modes)

    def end_document(self) -> None:
        """Make one document of the sequences added since the last call."""
        self._documents.append([len(self._lengths)])

    def add_index(self, path_prefix: str) -> None:
        """Append a complete dataset; raise DataError unless it has the same token type."""
        data = IndexedDataset(path_prefix, self.multimodal)
        other = data.index
        if other.dtype != self.dtype:
            raise DataError(
                f"{path_prefix}.idx holds {other.dtype.name} tokens, the files before it "
                f"{self.dtype.name}: merge files of one token type"
            )
        num_bytes = data.bin_reader.num_bytes
        used = int(other.sequence_lengths.sum(dtype=np.int64)) * other.dtype_size
        if used != num_bytes:
            raise DataError(
                f"{path_prefix}.bin has {num_bytes} bytes, its index names {used}: it cannot be "
                "merged completely; preprocess it again"
            )
        first = len(self._lengths)
        for part in _chunks(other.sequence_lengths):
            self._lengths.append(part)
        for part in _chunks(other.document_indices[1:]):
            self._documents.append(first + part)
        if other.sequence_modes is not None:
            for part in _chunks(other.sequence_modes):
                self._modes.append(part)
        for first_block, piece in read_blocks(get_bin_path(path_prefix)):
            if data.checksums is not None:
                data.checksums.check_blocks(path_prefix, first_block, piece)
            self._bin.write(piece)

    def finalize(self, idx_path: str) -> None:
        """Write index and checksums, and rename all files to their final names, .idx last.

        If .idx exists, then .bin is complete and belongs to it, even if the writer is killed.
        """
        documents_end = self._documents.last
        assert documents_end == len(self._lengths), (
            f"{len(self._lengths) - documents_end} sequences follow the last end_document()"
        )
        self._bin.sync_and_close()
        idx_file = ChecksummedFile(idx_path + ".tmp")
        self._write_index(idx_file)
        idx_file.sync_and_close()
        prefix = idx_path.removesuffix(".idx")
        for path in (idx_path, get_crc_path(prefix)):
            if os.path.exists(path):
                os.remove(path)
        os.replace(self._temporary_path, self._bin_path)
        if (get_bin_path(prefix), get_idx_path(prefix)) == (self._bin_path, idx_path):
            Checksums.of(self._bin.crcs, idx_file.crcs).write(prefix)
        os.replace(idx_path + ".tmp", idx_path)
        descriptor = os.open(os.path.dirname(os.path.abspath(idx_path)), os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

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


def _chunks(array: np.ndarray) -> Iterable[np.ndarray]:
    return (array[start : start + CHUNK] for start in range(0, len(array), CHUNK))
