"""``dist_checkpointing.save`` and ``load`` of sharded state dicts, with Megatron Core's signatures.

A sharded state dict is a tree of dicts and lists.  The main replica of each `ShardedTensor` and
`ShardedObject` is saved.  All other values are *common*: equal on all ranks, and saved by rank 0.
Files have our own format, without pickle, in which objects and common values must be tensors or
plain values (numbers, text, lists, dicts); or format torch_dist, which Megatron Core reads.

A strategy is (format, version), or an object with a ``backend``, which names the format.

Order of collectives.  Save: gather reports, broadcast the verdict.  Load: gather differences,
broadcast the verdict; read; gather errors, broadcast the verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject, Nested, StateDict
from megatron.core.dist_checkpointing import all_ranks
from megatron.core.dist_checkpointing.async_requests import AsyncRequest
from megatron.core.dist_checkpointing.background import HostBuffer, detach, snapshot
from megatron.core.dist_checkpointing.commit import attempt_id
from megatron.core.dist_checkpointing.formats import LIBRARY, Contents, Format, format_of
from megatron.core.dist_checkpointing.library_files import COMMON_TENSOR, LibraryReader
from megatron.core.dist_checkpointing.manifest import (
    FORMAT,
    FileEntries,
    Manifest,
    fsync_folder,
    read_manifest,
    write_manifest,
)
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
    leaves,
    map_leaves,
)
from megatron.core.dist_checkpointing.records import Replica, TensorRecord
from megatron.core.dist_checkpointing.validation import StrictHandling, parse_strict_flag
from megatron.core.parallel.collectives import all_or_none, gather_json, rank_in
from megatron.core.registry import Registry

_METADATA = "content_metadata"  # key among the common values
Strategy: TypeAlias = Any  # (format, version), an object with a ``backend``, or None


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: Strategy = None,
    common_strategy: Strategy = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[StateDict], StateDict] | None = None,
    content_metadata: StateDict | None = None,
) -> AsyncRequest | None:
    """Write ``sharded_state_dict`` into the existing folder ``checkpoint_dir``.  Collective.

    Every element of every tensor needs exactly one main replica.  Without
    ``validate_access_integrity``, tensors of which all ranks have copies only are not noticed.
    That common values are equal on all ranks is not checked.
    Raises CheckpointError on every rank alike.  With ``async_sharded_save`` all values are copied,
    and the returned request writes them.
    """
    del preprocess_common_before_consistancy_check, common_strategy
    group = _world()
    begun: all_ranks.PendingSave = _FolderSave(
        folder=Path(checkpoint_dir),
        rank=rank_in(group),
        tensors=(),
        contents=Contents(tensors=()),
        iteration=0,
        attempt=attempt_id(),
        format=_WRITERS[format_name(sharded_strategy)],
    )
    written: JsonObject = {}
    try:
        if not begun.folder.is_dir():
            raise CheckpointError("this folder does not exist: make it first")
        begun = _with_contents(
            begun, sharded_state_dict, content_metadata, notice_copies=validate_access_integrity
        )
        if async_sharded_save:
            begun = snapshot(detach(begun), HostBuffer())
    except (*all_ranks.REPORTED, AttributeError, TypeError, ValueError) as error:
        # Also errors of factories and of copies of objects: other ranks must not wait forever.
        written |= all_ranks.not_written(error)

    def write() -> None:
        written.update(written or all_ranks.write(begun))

    def conclude() -> None:
        elsewhere = RuntimeError("the request ran in another process: run it in a thread of this")
        reports = gather_json(written or all_ranks.not_written(elsewhere), group)
        verdict = None if reports is None else all_ranks.complete(begun, reports)
        all_ranks.conclude(begun, verdict, group)

    if async_sharded_save:
        return AsyncRequest(write, (), [conclude])
    write()
    conclude()
    return None


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: Strategy = None,
    common_strategy: Strategy = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Return the state dict in ``checkpoint_dir``: common values and requested sharded entries.

    Tensors are read into the memory of the tensors in ``sharded_state_dict``, in their dtype; the
    checkpoint may have any layout, and also be one of the application.  ``strict`` selects how
    differing keys are handled (`StrictHandling`); its ``return_*`` modes return (state dict,
    missing keys, unexpected keys), where missing ones are in the checkpoint alone.  Collective.
    Raises CheckpointError on every rank alike.  Strategies and ``validate_access_integrity`` have
    no effect: the folder tells its format, and overlapping shards may be loaded.
    """
    del validate_access_integrity, common_strategy
    format_name(sharded_strategy)
    group = _world()
    folder = Path(checkpoint_dir)
    mode = parse_strict_flag(strict)
    built: dict[int, Nested] = {}
    entries = list(leaves(_build(sharded_state_dict, built)))
    asked = {_key_of(entry): entry for entry in entries if isinstance(entry, ShardedBase)}
    records = [_to_load(entry) for entry in entries if isinstance(entry, ShardedTensor)]
    # Megatron Core's default allows unused keys in the checkpoint.
    is_default = mode is StrictHandling.ASSUME_OK_UNEXPECTED
    how = StrictHandling.RAISE_UNEXPECTED if is_default else mode
    reader, differences = all_ranks.open_agreed(
        open_files, folder, records, list(asked), group, how.value, (COMMON_TENSOR,), cast=True
    )
    with reader:
        present = asked.keys() - set(differences.absent)

        def read() -> tuple[StateDict, StateDict]:
            all_ranks.fill(records, reader, cast=True)
            objects = {
                key: reader.object(key)
                for key, entry in asked.items()
                if isinstance(entry, ShardedObject) and key in present
            }
            return objects, reader.state()

        objects, common = all_or_none(read, folder, group)

    def loaded(entry: object) -> object:
        if isinstance(entry, LocalNonpersistentObject):
            return entry.unwrap()
        if isinstance(entry, ShardedBase) and (key := _key_of(entry)) in present:
            return objects[key] if isinstance(entry, ShardedObject) else entry.data
        return _ABSENT  # common values are loaded from the checkpoint

    state: StateDict = _filled(sharded_state_dict, common, loaded, built)
    if not StrictHandling.requires_returning_mismatch_keys(mode):
        return state
    missing = set(differences.unused) if mode is StrictHandling.RETURN_ALL else set()
    return state, missing, set(differences.absent) & set(asked)


def load_common_state_dict(checkpoint_dir: str | Path) -> StateDict:
    """Return the common values of a checkpoint: all but sharded entries.  Not collective."""
    with open_files(checkpoint_dir) as reader:
        return reader.state()


def load_content_metadata(
    checkpoint_dir: str | Path | None = None, *, preloaded_state_dict: StateDict | None = None
) -> StateDict | None:
    """Return the ``content_metadata`` that `save` stored, or None.  Not collective.

    ``preloaded_state_dict``: what `load_common_state_dict` returned.
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise ValueError("give checkpoint_dir or preloaded_state_dict")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    return preloaded_state_dict.get(_METADATA)


def load_tensors_metadata(
    checkpoint_dir: str | Path, sharded_strategy: Strategy = None
) -> ShardedStateDict:
    """Return an entry without data, of the complete tensor, for each key.  Not collective."""
    del sharded_strategy
    with open_files(checkpoint_dir) as reader:
        return {
            key: ShardedTensor.from_rank_offsets(
                key, torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            ).without_data()
            for key, stored in reader.tensors.items()
            if not key.startswith(COMMON_TENSOR)
        }


def load_sharded_metadata(
    checkpoint_dir: str | Path, sharded_strategy: Strategy = None, common_strategy: Strategy = None
) -> ShardedStateDict:
    """Return what `load_tensors_metadata` does, and an entry without data for each object."""
    del common_strategy
    with open_files(checkpoint_dir) as reader:
        objects = {key: ShardedObject.empty_from_unique_key(key) for key in reader.objects}
    return {**load_tensors_metadata(checkpoint_dir, sharded_strategy), **objects}


def load_plain_tensors(checkpoint_dir: str | Path) -> StateDict:
    """Return the complete tensors of a checkpoint on every rank, by their keys."""
    with open_files(checkpoint_dir) as reader:
        keys = [key for key in reader.tensors if not key.startswith(COMMON_TENSOR)]
        return {key: reader.read(key) for key in keys}


def check_is_distributed_checkpoint(checkpoint_dir: str | Path) -> bool:
    """Return whether the folder holds a checkpoint that `load` reads in its format."""
    return format_of(Path(checkpoint_dir)) in (FORMAT, "torch_dist")


def open_files(checkpoint_dir: str | Path) -> LibraryReader:
    """Open the checkpoint in a folder under Megatron Core's keys.

    Raises CheckpointError, CheckpointDamaged.
    """
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise CheckpointError(f"Checkpoint directory {folder} does not exist")
    name = format_of(folder) or ""
    if name == FORMAT and (manifest := read_manifest(folder)) is not None:
        name = LIBRARY if manifest.layout.get(LIBRARY) else name
    return _READERS[name if name in _READERS else FORMAT](folder)


_HERE = "megatron.core.dist_checkpointing"
_WRITERS: Registry[Format] = Registry(
    "--ckpt-format",
    {
        FORMAT: f"{_HERE}.library_files:STATE_DICT",
        "torch_dist": f"{_HERE}.megatron_formats.library:STATE_DICT",
    },
)
_READERS: Registry[type[LibraryReader]] = Registry(
    "--ckpt-format",
    {
        LIBRARY: f"{_HERE}.library_files:SafetensorsFiles",
        "torch_dist": f"{_HERE}.megatron_formats.library:TorchDistFiles",
        FORMAT: f"{_HERE}.megatron_formats.library:ApplicationFiles",
    },
)
_ABSENT = object()  # marks an entry to remove from the state dict


def format_name(strategy: Strategy) -> str:
    """Return the format that a strategy selects.  Raises CheckpointError for an unknown one."""
    if strategy is None:
        return FORMAT
    name = strategy[0] if isinstance(strategy, tuple) else getattr(strategy, "backend", strategy)
    if name not in _WRITERS:
        raise CheckpointError(
            f"strategy {strategy!r} is not available: leave it out, or give one of format "
            f"{FORMAT} or torch_dist"
        )
    return str(name)


def _world() -> ProcessGroup | None:
    """Return the group of all ranks, or None if torch.distributed is not initialized."""
    return dist.group.WORLD if dist.is_initialized() else None


def _key_of(entry: ShardedBase) -> str:
    return entry.unique_key if isinstance(entry, ShardedObject) else entry.key


@dataclass(frozen=True, kw_only=True)
class _FolderSave(all_ranks.PendingSave):
    """One rank's view of a save into a folder of the caller, which may have other files."""

    def publish(self, files: FileEntries) -> Path:
        """Write the manifest of our own format; others have written their index."""
        if not self.format.is_foreign:
            manifest = Manifest(
                iteration=0,
                attempt=self.attempt,
                published_at_ns=time.time_ns(),
                layout={LIBRARY: True},
                files=files,
            )
            write_manifest(self.folder, manifest)
        fsync_folder(self.folder)
        return self.folder

    def abandon(self) -> list[str]:
        """Leave the folder to the caller."""
        return []

    def retire(self) -> tuple[list[int], list[str]]:
        """Delete nothing."""
        return [], []

    def failed(self, reason: str) -> all_ranks.SaveFailed:
        """Return the error of this save."""
        return all_ranks.SaveFailed(f"{self.folder} was not saved: {reason}")


def _with_contents(
    begun: all_ranks.PendingSave,
    sharded_state_dict: ShardedStateDict,
    metadata: StateDict | None,
    *,
    notice_copies: bool,
) -> all_ranks.PendingSave:
    """Return the save with what this rank writes.

    Raises CheckpointError for an entry without data.
    """
    records: dict[object, TensorRecord] = {}
    objects = {}
    for entry in leaves(_build(sharded_state_dict, {})):
        if isinstance(entry, ShardedTensor) and is_main_replica(entry.replica_id):
            place = entry.key, entry.global_offset, str(entry.flattened_range)
            record = entry.record()
            first = records.setdefault(place, record)  # tied weights are one tensor
            if [p.data.data_ptr() for p in first.pieces] != [
                p.data.data_ptr() for p in record.pieces
            ]:
                raise CheckpointError(
                    f"{entry.key}: two entries of one rank are this part of the tensor, with "
                    "different values: give one of them another key, or a replica_id above 0"
                )
        elif isinstance(entry, ShardedTensor) and entry.data is not None and notice_copies:
            # Without values: so a tensor of which all ranks have copies only is noticed.
            records[entry.key] = replace(entry.record(), pieces=())
        elif isinstance(entry, ShardedObject) and is_main_replica(entry.replica_id):
            objects[entry.unique_key] = entry.data
    common: StateDict = {}
    if begun.rank == 0:
        common = _filled(sharded_state_dict, {}, _unless_sharded, {})
        if metadata is not None:
            common[_METADATA] = metadata
    contents = Contents(tensors=(), rank_state=objects, common=common)
    return replace(begun, tensors=list(records.values()), contents=contents)


def _unless_sharded(entry: object) -> object:
    is_sharded = isinstance(entry, ShardedBase | LocalNonpersistentObject)
    return _ABSENT if is_sharded else entry


def _to_load(entry: ShardedTensor) -> TensorRecord:
    """Return the record that a load fills; make memory for an entry without data."""
    entry.init_data(torch.get_default_device(), torch.zeros)
    return replace(entry.record(), replica=Replica())


def _build(value: Nested, built: dict[int, Nested]) -> Nested:
    """Return a copy of the tree in which each factory is replaced by the tree that it builds.

    Those trees are added to ``built``, by the id of their factory.
    """

    def build(entry: object) -> Nested:
        if not isinstance(entry, ShardedTensorFactory):
            return entry
        tree = _build(entry.build(), built)
        built[id(entry)] = tree
        return tree

    return map_leaves(build, value)


def _filled(
    requested: object,
    common: Nested,
    value_of: Callable[[object], object],
    built: Mapping[int, Nested],
) -> Nested:
    """Return the tree ``common`` with the values of the leaves of ``requested``.

    If ``value_of`` returns `_ABSENT` for a leaf, that of ``common`` stays.  A dict or list without
    any is left out; in another list None replaces it, so that the other entries keep their
    positions.  The values for a factory are passed to its ``merge_fn``, if all are there.
    """
    if isinstance(requested, ShardedTensorFactory) and id(requested) in built:
        tree = built[id(requested)]
        if any(value_of(entry) is _ABSENT for entry in leaves(tree)):
            return common
        return requested.merge_fn(_filled(tree, _ABSENT, value_of, {}))
    if isinstance(requested, dict):
        have = common if isinstance(common, dict) else {}
        values = {
            key: _filled(entry, have.get(key, _ABSENT), value_of, built)
            for key, entry in requested.items()
        }
        found = {**have, **{key: v for key, v in values.items() if v is not _ABSENT}}
        return found if found or not requested else common
    if isinstance(requested, list):
        is_same = isinstance(common, list) and len(common) == len(requested)
        pairs = zip(requested, common if is_same else [_ABSENT] * len(requested), strict=True)
        entries = [_filled(entry, other, value_of, built) for entry, other in pairs]
        if requested and all(entry is _ABSENT for entry in entries):
            return common
        return [None if entry is _ABSENT else entry for entry in entries]
    value = value_of(requested)
    return common if value is _ABSENT else value
