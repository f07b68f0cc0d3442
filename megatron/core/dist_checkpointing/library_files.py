"""Sharded state dicts in our own format: the folder of `formats` with other common values.

    common.json   "state_dict": the common values, "sharded_objects": each object by its unique key

Tensors among the common values are tensors of the checkpoint whose keys begin with ``common.``.
In the `Contents` of such a save, ``rank_state`` has this rank's objects by their unique keys.
Nothing in this module communicates.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject, Nested, StateDict
from megatron.core.dist_checkpointing.formats import SAFETENSORS_DIST, Format, RankReport, RankSave
from megatron.core.dist_checkpointing.manifest import FORMAT, MANIFEST, Common, FileEntries
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.plain_values import decode, encode
from megatron.core.dist_checkpointing.reader import CheckpointReader

logger = logging.getLogger(__name__)

COMMON_TENSOR = "common."  # prefix of the keys of common tensors
_COMMON = "state_dict"
_OBJECTS = "sharded_objects"


class LibraryReader(CheckpointReader):
    """Reader of a checkpoint under Megatron Core's keys."""

    objects: frozenset[str] = frozenset()  # unique keys

    def __enter__(self) -> LibraryReader:
        return self

    @property
    def keys(self) -> Set[str]:
        return self.tensors.keys() | self.objects

    @abstractmethod
    def state(self) -> StateDict:
        """Return the common values."""

    def object(self, key: str) -> Nested:
        """Return the object with this unique key.  Raises CheckpointError."""
        raise CheckpointError(f"{self.folder} holds no object {key}")


def write_rank_files(rank_save: RankSave) -> RankReport:
    """Write and fsync the files of one rank.

    Raises OSError, and CheckpointError for a value that is not saved.
    """
    contents = rank_save.contents
    objects = contents.rank_state or {}
    values: JsonObject = {
        _OBJECTS: {key: encode(entry, key.rpartition("/")[0]) for key, entry in objects.items()}
    }
    tensors: dict[str, Tensor] = {}
    if rank_save.rank == 0:
        values[_COMMON] = encode(contents.common, "", tensors)
    more = [
        ShardedTensor.from_rank_offsets(COMMON_TENSOR + place, tensor).record()
        for place, tensor in tensors.items()
    ]
    rank_save = replace(
        rank_save,
        tensors=[*rank_save.tensors, *more],
        contents=replace(contents, rank_state=None),
    )
    return replace(SAFETENSORS_DIST.write_rank_files(rank_save), objects=values)


def write_common_files(folder: Path, reports: Sequence[RankReport], common: Common) -> FileEntries:
    """On rank 0: write and fsync the index and the common values."""
    del common  # rank 0 has reported it
    begin_again(folder)
    values = {_COMMON: reports[0].objects[_COMMON], _OBJECTS: {}}
    for report in reports:
        values[_OBJECTS] |= report.objects[_OBJECTS]
    return SAFETENSORS_DIST.write_common_files(folder, reports, values)


def begin_again(folder: Path) -> None:
    """Delete the manifest of an earlier checkpoint in ``folder``, which is being overwritten."""
    if (folder / MANIFEST).exists():
        logger.warning("%s holds a checkpoint, which is overwritten", folder)
        (folder / MANIFEST).unlink()


STATE_DICT = Format(FORMAT, write_rank_files, write_common_files)


class SafetensorsFiles(LibraryReader):
    """Reader of a sharded state dict in our own format."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        content = self.common()
        self._values: JsonObject = content[_COMMON]
        self._objects: JsonObject = content[_OBJECTS]
        self.objects = frozenset(self._objects)

    def state(self) -> StateDict:
        """Return the common values."""
        values: StateDict = decode(self._values, self.read)
        return values

    def object(self, key: str) -> Nested:
        """Return the object with this unique key."""
        if key in self._objects:
            return decode(self._objects[key], self.read)
        return super().object(key)
