"""Sharded state dicts in format torch_dist, and checkpoints of the application under their keys.

Entries of sharded state dicts have Megatron Core's keys, so they are written as they are; a
flattened range becomes a range of a row of ``[layers.., shards.., elements]``, as torch_dist has
it.  What the application saved in another format is shown under Megatron Core's keys.
"""

from __future__ import annotations

import enum
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.core import enums
from megatron.core.config.value_types import (
    Arguments,
    JsonObject,
    Nested,
    Shape,
    StateDict,
    Unpickled,
)
from megatron.core.dist_checkpointing.formats import Format, RankReport, RankSave, open_reader
from megatron.core.dist_checkpointing.library_files import (
    COMMON_TENSOR,
    LibraryReader,
    SafetensorsFiles,
    begin_again,
)
from megatron.core.dist_checkpointing.manifest import (
    COMMON_FILE,
    METADATA,
    Common,
    FileEntries,
    parsing,
)
from megatron.core.dist_checkpointing.megatron_formats.archive import StoredArray, load_archive
from megatron.core.dist_checkpointing.megatron_formats.dcp_index import (
    DcpIndex,
    DcpTensor,
    ForeignPiece,
)
from megatron.core.dist_checkpointing.megatron_formats.dcp_writer import (
    Part,
    optimizer_entry,
    stacked_parts,
    write_stacked,
    write_tensors,
)
from megatron.core.dist_checkpointing.megatron_formats.foreign_reader import ForeignReader, span_of
from megatron.core.dist_checkpointing.megatron_formats.reference_values import reference_values
from megatron.core.dist_checkpointing.megatron_formats.torch_dist import boxes_of, pieces_of
from megatron.core.dist_checkpointing.megatron_formats.unpickler import Record
from megatron.core.dist_checkpointing.reader import CheckpointReader, StoredBox, StoredTensor
from megatron.core.dist_checkpointing.records import LazyPiece, Piece, TensorRecord


def write_rank_files(rank_save: RankSave) -> RankReport:
    """Write and fsync the file of one rank.  Not collective.  Raises OSError."""
    contents = rank_save.contents
    objects = contents.rank_state
    rank_save = replace(rank_save, contents=replace(contents, rank_state=None))
    return write_tensors(rank_save, parts_of=_as_they_are, objects=objects)


def _as_they_are(whole: TensorRecord, arguments: Arguments) -> Iterator[Part]:
    """Yield the tensor, or what it has of one layer and expert if these are stacked."""
    del arguments
    lead = len(whole.stacked)
    pieces = tuple(Piece(p.offset[lead:], p.data[(0,) * lead]) for p in whole.pieces)
    place = whole.pieces[0].offset[:lead] if pieces else (0,) * lead
    yield whole.key, place, replace(whole, global_shape=whole.global_shape[lead:], pieces=pieces)


def write_common_files(folder: Path, reports: Sequence[RankReport], common: Common) -> FileEntries:
    """Write and fsync the values common to all ranks and, last, ``metadata.json``."""
    begin_again(folder)
    stored = {key: place for report in reports for key, place in report.objects.items()}
    return write_stacked(folder, reports, common, stored=stored)


STATE_DICT = Format("torch_dist", write_rank_files, write_common_files, is_foreign=True)


class TorchDistFiles(ForeignReader, LibraryReader):
    """Reader of format torch_dist under the keys of its files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.values = load_archive(self._map(folder / COMMON_FILE))
        self._index = DcpIndex(folder, self._map)
        self.objects = frozenset(self._index.objects)
        with parsing(folder / METADATA):
            for key, tensor in self._index.tensors.items():
                boxes = tuple(box for chunk in tensor.chunks for box in boxes_of(tensor, chunk))
                shape = tensor.unflattened or tensor.shape
                self.tensors[key] = StoredTensor(shape, tensor.dtype, boxes)

    def state(self) -> StateDict:
        """Return the common values."""
        values: StateDict = _plain(self.values)
        return values

    def object(self, key: str) -> Nested:
        """Return the object with this unique key."""
        with parsing(self.folder):
            (value,) = self._index.load(key)  # every object is stored in a list
            return _plain(value)


def _plain(value: Unpickled) -> Nested:
    """Return an unpickled value with tensors, and namespaces of the class that wrote them."""
    if isinstance(value, StoredArray):
        return value.read()
    if isinstance(value, Record):
        kind = vars(enums).get(type(value).__name__)
        if isinstance(kind, enum.EnumMeta):
            return kind(*value.pickled_args)
        values = {name: _plain(entry) for name, entry in vars(value).items()}
        return Namespace(**values) if type(value).__name__.endswith("Namespace") else value
    if isinstance(value, dict):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_plain(entry) for entry in value)
    return value


class ApplicationFiles(ForeignReader, LibraryReader):
    """A checkpoint of the application, under Megatron Core's keys.

    A tensor is read completely for each box of it.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._reader = reader = open_reader(folder)
        self._common = reader.common()
        for key, stored in reader.tensors.items():
            lazy = LazyPiece((0,) * len(stored.shape), stored.shape, partial(reader.read, key))
            record = TensorRecord(
                key=key, global_shape=stored.shape, dtype=stored.dtype, pieces=(lazy,)
            )
            for name, place, part in stacked_parts(record, self._common.get("args", {})):
                for piece in part.pieces:
                    shape = (1,) * len(place) + piece.shape
                    values = partial(_values, piece, shape)
                    box = ForeignPiece((*place, *piece.offset), shape, values)
                    self._add(name, stored.dtype, box)
        for name, (dtype, boxes) in self._found.items():
            self.tensors[name] = StoredTensor(span_of(boxes), dtype, tuple(boxes))

    def state(self) -> StateDict:
        """Return the common values in Megatron-LM's form."""
        values = reference_values(self._common)
        if self._common.get("optimizer") is not None:
            values["optimizer"] = optimizer_entry(self._common)
        return values

    def close(self) -> None:
        self._reader.close()


def _values(piece: Piece | LazyPiece, shape: Shape) -> Tensor:
    return piece.data.view(shape)


class LibraryFiles(ForeignReader):
    """A sharded state dict in our own format, as the application's reader shows it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._reader = reader = SafetensorsFiles(folder)
        self.values = reader.state()
        for key, stored in reader.tensors.items():
            if key.startswith(COMMON_TENSOR):
                continue
            chunks = [
                ForeignPiece(p.offset, p.shape, partial(_read, reader, key, p))
                for p in stored.pieces
            ]
            tensor = DcpTensor(stored.dtype, stored.shape, tuple(chunks), None)
            for name, piece in pieces_of(key, tensor, self.args):
                self._add(name, stored.dtype, piece)
        self._finish()
        self.manifest = replace(reader.manifest, iteration=self.iteration)

    def common(self) -> JsonObject:
        """Return the values of a run, if the state dict has them as Megatron-LM's does."""
        is_run = {"args", "iteration"} <= self.values.keys()
        return super().common() if is_run else self._reader.common()

    def close(self) -> None:
        self._reader.close()


def _read(reader: CheckpointReader, key: str, piece: StoredBox) -> Tensor:
    values = torch.empty(piece.shape, dtype=reader.tensors[key].dtype)
    reader.read_box(key, piece.offset, values)
    return values
