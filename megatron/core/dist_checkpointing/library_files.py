"""Sharded state dicts in our own format: the folder of `formats` with other common values.

    common.json   "state_dict": the common values, "sharded_objects": each object by its unique key

Tensors among the common values are tensors of the checkpoint whose keys begin with ``common.``.
Nothing in this module communicates.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject, Nested, StateDict
from megatron.core.dist_checkpointing.commit import attempt_id
from megatron.core.dist_checkpointing.formats import (
    LIBRARY,
    SAFETENSORS_DIST,
    RankReport,
    RankSave,
    files_of,
)
from megatron.core.dist_checkpointing.manifest import Manifest, write_manifest
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.plain_values import decode, encode
from megatron.core.dist_checkpointing.reader import CheckpointReader

COMMON_TENSOR = "common."  # prefix of the keys of common tensors
_COMMON = "state_dict"
_OBJECTS = "sharded_objects"


class LibraryReader(CheckpointReader):
    """Reader of a checkpoint under Megatron Core's keys."""

    objects: frozenset[str] = frozenset()  # unique keys

    def __enter__(self) -> LibraryReader:
        return self

    @abstractmethod
    def state(self) -> StateDict:
        """Return the common values."""

    @abstractmethod
    def object(self, key: str) -> Nested:
        """Return the object with this unique key."""


class StateDictFormat(NamedTuple):
    """How the files of sharded state dicts are written and read.

    ``write_rank(rank_save, objects, common)`` writes one rank's files; objects are by unique key,
    and the common values are None on all ranks but 0.  ``complete(folder, reports, common)`` runs
    on rank 0 after all ranks.  Both fsync, and raise OSError and CheckpointError.
    """

    write_rank: Callable[[RankSave, StateDict, StateDict | None], RankReport]
    complete: Callable[[Path, Sequence[RankReport], StateDict], None]
    open: Callable[[Path], LibraryReader]


def write_rank(rank_save: RankSave, objects: StateDict, common: StateDict | None) -> RankReport:
    """Write and fsync the files of one rank.  ``common``: rank 0 only.

    Raises OSError, and CheckpointError for a value that is not saved.
    """
    values: JsonObject = {
        _OBJECTS: {key: encode(entry, key.rpartition("/")[0]) for key, entry in objects.items()}
    }
    tensors: dict[str, Tensor] = {}
    if common is not None:
        values[_COMMON] = encode(common, "", tensors)
    more = [
        ShardedTensor.from_rank_offsets(COMMON_TENSOR + place, tensor).record()
        for place, tensor in tensors.items()
    ]
    rank_save = replace(rank_save, tensors=[*rank_save.tensors, *more])
    return replace(SAFETENSORS_DIST.write_rank_files(rank_save), objects=values)


def complete(folder: Path, reports: Sequence[RankReport], common: StateDict) -> None:
    """On rank 0: write and fsync the index, the common values and, last, the manifest."""
    del common  # rank 0 has reported it
    values = {_COMMON: reports[0].objects[_COMMON], _OBJECTS: {}}
    for report in reports:
        values[_OBJECTS] |= report.objects[_OBJECTS]
    manifest = Manifest(
        iteration=0,
        attempt=attempt_id(),
        published_at_ns=time.time_ns(),
        layout={LIBRARY: True},
        files={**files_of(reports), **SAFETENSORS_DIST.write_common_files(folder, reports, values)},
    )
    write_manifest(folder, manifest)


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
        if key not in self._objects:
            raise CheckpointError(f"{self.folder} holds no object {key}")
        return decode(self._objects[key], self.read)


SAFETENSORS_DIST_STATE = StateDictFormat(write_rank, complete, SafetensorsFiles)
