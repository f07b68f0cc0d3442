"""Read token sequences from disk: ``prefix.bin`` (raw tokens) and ``prefix.idx`` (the index).

The file format is in ``indexed_format.py``, the writer in ``indexed_dataset_builder.py``.  These
modules import numpy but not torch, so that preprocessing starts fast.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any

import numpy as np

from megatron.core.config.errors import DataError
from megatron.core.datasets.block_checksums import BinReader, Checksums, VerifyingReader
from megatron.core.datasets.index_cache import warn_once
from megatron.core.datasets.indexed_dataset_builder import (
    IndexedDatasetBuilder as IndexedDatasetBuilder,
)
from megatron.core.datasets.indexed_format import DType as DType
from megatron.core.datasets.indexed_format import SequenceIndex, unreadable
from megatron.core.datasets.indexed_format import get_bin_path as get_bin_path
from megatron.core.datasets.indexed_format import get_idx_path as get_idx_path
from megatron.core.datasets.object_storage_utils import (
    ObjectStorageConfig,
    RangeReader,
    cached_index_path,
    is_object_storage_path,
)

_SETTINGS = ("path_prefix", "multimodal", "mmap", "object_storage_config", "verify_data")


class _FileReader:
    """Read a .bin file with ``preadv``.

    The file stays open, or is opened for each read with --no-mmap-bin-files.  There is no memory
    map: when another process truncates the file, a read returns fewer bytes and raises DataError,
    while access to a map would kill the process with SIGBUS.
    """

    def __init__(self, bin_path: str, keeps_open: bool) -> None:
        self._bin_path = bin_path
        self._descriptor: int | None = None
        if keeps_open:
            self._descriptor = os.open(bin_path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)

    def read(self, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
        if self._descriptor is not None:  # preadv moves no offset: forks may share it
            return self._read(self._descriptor, dtype, count, offset)
        descriptor = os.open(self._bin_path, os.O_RDONLY)
        try:
            return self._read(descriptor, dtype, count, offset)
        finally:
            os.close(descriptor)

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
    and with ``verify_data`` each block of .bin is checked before its first read.
    Raises DataError when the files are missing, damaged, or do not belong together.
    """

    def __init__(
        self,
        path_prefix: str,
        multimodal: bool = False,
        mmap: bool = True,
        object_storage_config: ObjectStorageConfig | None = None,
        verify_data: bool = False,
    ) -> None:
        self.path_prefix = path_prefix
        self.multimodal = multimodal
        self.mmap = mmap
        self.object_storage_config = object_storage_config
        self.verify_data = verify_data
        self._open()
        self.index.check_arrays(get_bin_path(path_prefix), self._bin_bytes)
        if self._checksums is not None:
            self._checksums.check_sizes(path_prefix, self._bin_bytes, self.index.num_bytes)
            self._checksums.check_index(path_prefix, self.index.data())

    def _open(self) -> None:
        path_prefix = self.path_prefix
        idx_path, bin_path = get_idx_path(path_prefix), get_bin_path(path_prefix)
        self.bin_reader: BinReader
        self._checksums: Checksums | None = None
        if is_object_storage_path(path_prefix):
            if self.object_storage_config is None:
                raise DataError(
                    f"{path_prefix} lies in object storage: give --object-storage-cache-path, "
                    "a local directory for the .idx files"
                )
            idx_path = cached_index_path(idx_path, self.object_storage_config)
            ranges = RangeReader.open(bin_path, self.object_storage_config.bin_chunk_nbytes)
            self.bin_reader, self._bin_bytes = ranges, ranges.num_bytes
        else:
            self.bin_reader = self._open_local(bin_path)
        self.index = SequenceIndex(idx_path, self.multimodal)
        if self.verify_data and self._checksums is not None:
            self.bin_reader = VerifyingReader(self.bin_reader, path_prefix, self._checksums)
        elif self.verify_data:
            cure = f"write them with python tools/verify_data.py --write {path_prefix}"
            if is_object_storage_path(path_prefix):
                cure = "those of data in object storage are not read"
            warn_once(f"--verify-data: {path_prefix} has no checksums: {cure}", logging.INFO)

    def _open_local(self, bin_path: str) -> _FileReader:
        try:
            self._bin_bytes = os.path.getsize(bin_path)
            reader = _FileReader(bin_path, keeps_open=self.mmap)
        except (OSError, ValueError) as error:
            raise unreadable(bin_path, error) from error
        self._checksums = Checksums.read(self.path_prefix)
        return reader

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in _SETTINGS}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._open()  # the pickling process has checked the files

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
        dtype = self.index.dtype
        sequence = self.bin_reader.read(dtype, length, int(pointer) + offset * dtype.itemsize)
        return sequence if mode is None else (sequence, mode)

    def _get_slice(self, start: int, stop: int, step: int) -> Any:
        """Return sequences [start, stop) with one read; they must be contiguous in .bin."""
        if step != 1:
            raise ValueError(f"slices of an IndexedDataset need step 1, got {step}")
        if stop <= start:
            return ([], np.empty(0, np.int8)) if self.multimodal else []
        lengths = self.sequence_lengths[start:stop]
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
