"""Token sequences on disk, read: ``prefix.bin`` (raw tokens) and ``prefix.idx`` (the index).

The format is in ``indexed_format.py``, the writer in ``indexed_dataset_builder.py``.  These modules
need numpy alone, so that preprocessing never loads torch.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from megatron.core.config.errors import DataError
from megatron.core.datasets.indexed_dataset_builder import (
    IndexedDatasetBuilder as IndexedDatasetBuilder,
)
from megatron.core.datasets.indexed_format import DType as DType
from megatron.core.datasets.indexed_format import SequenceIndex
from megatron.core.datasets.indexed_format import get_bin_path as get_bin_path
from megatron.core.datasets.indexed_format import get_idx_path as get_idx_path
from megatron.core.datasets.object_storage_utils import (
    ObjectStorageConfig,
    RangeReader,
    cached_index_path,
    is_object_storage_path,
    open_range_reader,
)


class _MMapReader:
    """Reads through a memory map: no copy, pages come and go with the page cache."""

    def __init__(self, bin_path: str) -> None:
        self._buffer = np.memmap(bin_path, mode="r") if os.path.getsize(bin_path) else b""

    def read(self, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
        if count == 0:
            return np.empty(0, dtype)
        return np.frombuffer(self._buffer, dtype, count, offset)


class _FileReader:
    """Opens and reads per call: no address space, no open file is kept (--no-mmap-bin-files)."""

    def __init__(self, bin_path: str) -> None:
        self._bin_path = bin_path

    def read(self, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
        sequence = np.empty(count, dtype)
        buffer = sequence.view(np.uint8).data
        descriptor = os.open(self._bin_path, os.O_RDONLY)
        try:
            while buffer:  # one call reads at most 2 GiB
                num_bytes = os.preadv(descriptor, [buffer], offset)
                if num_bytes == 0:
                    raise DataError(f"{self._bin_path} was cut short meanwhile: copy it again")
                buffer, offset = buffer[num_bytes:], offset + num_bytes
        finally:
            os.close(descriptor)
        return sequence


class _ObjectStorageReader:
    """Reads ranges of an object in S3 or behind the Multi-Storage Client."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader = reader

    def read(self, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
        return np.frombuffer(self._reader.read(offset, count * dtype.itemsize), dtype)


class IndexedDataset:
    """The sequences of a path prefix as numpy arrays; read only.

    ``dataset[i]`` is sequence i, ``dataset[a:b]`` a list of arrays; with ``multimodal`` both come
    with their mode(s).  ``s3://`` and ``msc://`` prefixes need ``object_storage_config``.
    Raises DataError when the files are missing, damaged, or do not belong together.
    """

    def __init__(
        self,
        path_prefix: str,
        multimodal: bool = False,
        mmap: bool = True,
        object_storage_config: ObjectStorageConfig | None = None,
    ) -> None:
        self._open(path_prefix, multimodal, mmap, object_storage_config)
        self.index.check_arrays(get_bin_path(path_prefix), self._bin_bytes)

    def _open(
        self,
        path_prefix: str,
        multimodal: bool,
        mmap: bool,
        object_storage_config: ObjectStorageConfig | None,
    ) -> None:
        self.path_prefix = path_prefix
        self.multimodal = multimodal
        self.mmap = mmap
        self.object_storage_config = object_storage_config
        idx_path, bin_path = get_idx_path(path_prefix), get_bin_path(path_prefix)
        self.bin_reader: _MMapReader | _FileReader | _ObjectStorageReader
        if is_object_storage_path(path_prefix):
            if object_storage_config is None:
                raise DataError(
                    f"{path_prefix} lies in object storage: give --object-storage-cache-path, "
                    "a local directory for the .idx files"
                )
            idx_path = cached_index_path(idx_path, object_storage_config)
            ranges = open_range_reader(bin_path, object_storage_config.bin_chunk_nbytes)
            self.bin_reader, self._bin_bytes = _ObjectStorageReader(ranges), ranges.num_bytes
        else:
            self.bin_reader = self._open_local(bin_path, mmap)
        self.index = SequenceIndex(idx_path, multimodal)

    def _open_local(self, bin_path: str, mmap: bool) -> _MMapReader | _FileReader:
        try:
            self._bin_bytes = os.path.getsize(bin_path)
            return _MMapReader(bin_path) if mmap else _FileReader(bin_path)
        except OSError as error:
            raise DataError(
                f"{bin_path}: {error.strerror or error}; a data path is named without "
                ".bin or .idx, with a weight before each of several or before none"
            ) from error

    def __getstate__(self) -> tuple[Any, ...]:
        return self.path_prefix, self.multimodal, self.mmap, self.object_storage_config

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._open(*state)  # checked already where it was pickled

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, idx: int | np.integer | slice) -> Any:
        if isinstance(idx, slice):
            return self._get_slice(*idx.indices(len(self)))
        return self.get(int(idx))

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        """``length`` tokens (default: all that are left) of sequence ``idx`` from ``offset`` on."""
        pointer, num_tokens, mode = self.index[idx]
        if length is None:
            length = int(num_tokens) - offset
        dtype = self.index.dtype
        sequence = self.bin_reader.read(dtype, length, int(pointer) + offset * dtype.itemsize)
        return sequence if mode is None else (sequence, mode)

    def _get_slice(self, start: int, stop: int, step: int) -> Any:
        """Sequences [start, stop) with one read; they must lie one after the other in .bin."""
        if step != 1:
            raise ValueError(f"slices of an IndexedDataset need step 1, got {step}")
        if stop <= start:
            return ([], np.empty(0, np.int8)) if self.multimodal else []
        lengths = self.index.sequence_lengths[start:stop]
        total = int(lengths.sum(dtype=np.int64))
        flat = self.bin_reader.read(
            self.index.dtype, total, int(self.index.sequence_pointers[start])
        )
        sequences = np.split(flat, np.cumsum(lengths[:-1], dtype=np.int64))
        modes = self.index.sequence_modes
        return sequences if modes is None else (sequences, modes[start:stop])

    @property
    def sequence_lengths(self) -> np.ndarray:
        """i32[S]: tokens in each sequence."""
        return self.index.sequence_lengths

    @property
    def document_indices(self) -> np.ndarray:
        """i64[D]: the first sequence of each document, and at the end the number of sequences."""
        return self.index.document_indices

    @property
    def sequence_modes(self) -> np.ndarray | None:
        """i8[S] for multimodal data, else None."""
        return self.index.sequence_modes

    def get_document_indices(self) -> np.ndarray:
        """The same as ``document_indices``."""
        return self.index.document_indices

    def set_document_indices(self, document_indices: np.ndarray) -> None:
        """Look at the sequences under another document index; the files stay as they are."""
        self.index.document_indices = document_indices

    @staticmethod
    def exists(path_prefix: str) -> bool:
        """Whether both files of a local path prefix are there."""
        return all(os.path.exists(p(path_prefix)) for p in (get_idx_path, get_bin_path))
