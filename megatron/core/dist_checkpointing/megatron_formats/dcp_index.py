"""Read the index of a PyTorch distributed checkpoint: ``.metadata`` for ``__{rank}_{n}.distcp``.

Each box of a tensor and each object is a torch.save archive at a position in a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron.core.config.errors import CheckpointDamaged
from megatron.core.config.value_types import Shape, Unpickled
from megatron.core.dist_checkpointing.manifest import METADATA, are_counts, parsing, reading
from megatron.core.dist_checkpointing.megatron_formats.archive import (
    MappedFile,
    StoredArray,
    load_archive,
)
from megatron.core.dist_checkpointing.megatron_formats.unpickler import unpickle
from megatron.core.dist_checkpointing.reader import StoredBox
from megatron.core.text_files import path_inside


@dataclass(frozen=True)
class ForeignPiece(StoredBox):
    """A box of a tensor, and a function that returns its values, stored or in memory."""

    array: Callable[[], Any]  # a StoredArray or a Tensor


@dataclass(frozen=True)
class DcpTensor:
    """A tensor and its boxes.

    ``unflattened``: original shape, if the optimizer's flattened shards are stored (`torch_dist`).
    """

    dtype: torch.dtype
    shape: Shape
    chunks: tuple[ForeignPiece, ...]
    unflattened: Shape | None


class DcpIndex:
    """Contents of ``.metadata`` in ``folder``; ``open_map`` memory-maps a file of the folder.

    Raises CheckpointDamaged, CheckpointError.
    """

    def __init__(self, folder: Path, open_map: Callable[[Path], MappedFile]) -> None:
        self.folder, self._open_map = folder, open_map
        path = folder / METADATA
        if not path.is_file():
            raise CheckpointDamaged(f"{path} is missing")
        with reading(path):
            data = path.read_bytes()
        metadata = unpickle(data, path)
        self._loaded: dict[tuple[str, Shape | None], Unpickled] = {}
        with parsing(path):
            self._read(metadata)

    def _read(self, metadata: Unpickled) -> None:
        self._places = {
            (index.fqn, vars(index).get("offset")): info
            for index, info in metadata.storage_data.items()
        }
        self.paths: dict[str, tuple[Unpickled, ...]] = metadata.planner_data or {}
        extra = getattr(metadata, "mcore_data", {})
        self.tensors: dict[str, DcpTensor] = {}
        self.objects: set[str] = set()
        for key, entry in metadata.state_dict_metadata.items():
            if not hasattr(entry, "chunks"):
                self.objects.add(key)
                continue
            whole = extra.get(key, {}).get("nd_reformulated_orig_global_shape")
            dtype = entry.properties.pickled_state[0]
            if not isinstance(key, str) or not isinstance(dtype, torch.dtype):
                raise ValueError(f"{key!r} of {dtype!r} is no tensor")
            self.tensors[key] = DcpTensor(
                dtype,
                _counts(entry.size),
                tuple(self._chunks(key, entry.chunks, dtype)),
                whole and _counts(whole),
            )

    def _chunks(self, key: str, chunks: Unpickled, dtype: torch.dtype) -> Iterator[ForeignPiece]:
        for chunk in chunks:
            offset, shape = _counts(chunk.offsets), _counts(chunk.sizes)
            file, _, length = self._place(key, offset)
            if prod(shape) * dtype.itemsize > length:
                raise ValueError(f"{key} {list(shape)} is not in {length} bytes of {file.path}")
            yield ForeignPiece(offset, shape, partial(self._array, key, offset, shape))

    def _array(self, key: str, offset: Shape, shape: Shape) -> StoredArray:
        array = self.load(key, offset)
        dtype = self.tensors[key].dtype
        if not isinstance(array, StoredArray) or (array.dtype, array.shape) != (dtype, shape):
            raise CheckpointDamaged(
                f"{self.folder / METADATA} is damaged: {key} at {list(offset)} is {dtype} "
                f"{list(shape)} in it, and {array} in its file"
            )
        return array

    def _place(self, key: str, offset: Shape | None) -> tuple[MappedFile, int, int]:
        place = self._places.get((key, offset))
        index = self.folder / METADATA
        if place is None:
            raise CheckpointDamaged(f"{index} does not say where {key} lies")
        file = self._open_map(
            path_inside(self.folder, place.relative_path, index, error=CheckpointDamaged)
        )
        if not are_counts([place.offset, place.length]):
            raise CheckpointDamaged(f"{index} is damaged: {key} is at byte {place.offset!r}")
        end = place.offset + place.length
        if end > len(file.bytes):
            raise CheckpointDamaged(
                f"{file.path} has {len(file.bytes)} bytes, it ends before {end}"
            )
        return file, place.offset, place.length

    def load(self, key: str, offset: Shape | None = None) -> Unpickled:
        """Return the object saved under ``key``, or the array of the box at ``offset``."""
        if (key, offset) not in self._loaded:
            self._loaded[key, offset] = load_archive(*self._place(key, offset))
        return self._loaded[key, offset]


def _counts(values: Iterable[int]) -> Shape:
    if not are_counts(list(values)):
        raise ValueError(f"{values!r} are no sizes")
    return tuple(values)
