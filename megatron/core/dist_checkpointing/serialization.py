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

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject, Nested, StateDict
from megatron.core.dist_checkpointing import all_ranks
from megatron.core.dist_checkpointing.async_requests import AsyncRequest
from megatron.core.dist_checkpointing.background import HostBuffer, copy_out
from megatron.core.dist_checkpointing.commit import attempt_id
from megatron.core.dist_checkpointing.formats import (
    LIBRARY,
    Contents,
    RankReport,
    RankSave,
    format_of,
)
from megatron.core.dist_checkpointing.library_files import (
    COMMON_TENSOR,
    LibraryReader,
    StateDictFormat,
)
from megatron.core.dist_checkpointing.manifest import (
    FORMAT,
    MANIFEST,
    fsync_folder,
    read_manifest,
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
)
from megatron.core.dist_checkpointing.reader import mismatch
from megatron.core.dist_checkpointing.records import Replica, TensorRecord, TensorRecords
from megatron.core.dist_checkpointing.validation import (
    StrictHandling,
    agree,
    parse_strict_flag,
    shorten,
)
from megatron.core.parallel.collectives import (
    all_or_none,
    broadcast_json,
    error_as_json,
    gather_json,
    rank_in,
)
from megatron.core.registry import Registry

logger = logging.getLogger(__name__)

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

    Every element of every tensor needs exactly one main replica; this is always checked,
    whatever ``validate_access_integrity`` is.  That common values are equal on all ranks is not.
    Raises CheckpointError on every rank alike.  With ``async_sharded_save`` all values are copied,
    and the returned request writes them.
    """
    del validate_access_integrity, preprocess_common_before_consistancy_check, common_strategy
    writer = _FORMATS[format_name(sharded_strategy)]
    group, folder = _world(), Path(checkpoint_dir)
    error, part = None, _Part(folder, rank_in(group))
    try:
        if not folder.is_dir():
            raise CheckpointError("this folder does not exist: make it first")
        part = part.of(sharded_state_dict, content_metadata)
        if async_sharded_save:
            part = part.copied()
    except all_ranks.REPORTED as problem:
        error = all_ranks.not_written(problem)
    written: JsonObject = error or {}
    write = partial(_write, part, writer, written)
    conclude = partial(_conclude, part, writer, written, group)
    if async_sharded_save:
        return AsyncRequest(None if error else write, (), [conclude])
    if error is None:
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
    group, folder, mode = _world(), Path(checkpoint_dir), parse_strict_flag(strict)
    built: dict[int, object] = {}
    entries = [entry for _, entry in leaves(_build(sharded_state_dict, built))]
    asked = {_key_of(entry): entry for entry in entries if isinstance(entry, ShardedBase)}
    records = [_to_load(entry) for entry in entries if isinstance(entry, ShardedTensor)]
    reader, plan = _plan(folder, records, list(asked))
    stored = set() if reader is None else {*reader.tensors, *reader.objects}
    stored = {key for key in stored if _EXTRA_STATE not in key or key in asked}
    # Megatron Core's default allows unused keys in the checkpoint.
    is_default = mode is StrictHandling.ASSUME_OK_UNEXPECTED
    how = StrictHandling.RAISE_UNEXPECTED if is_default else mode
    differences = agree(folder, plan, stored, group, how.value, (COMMON_TENSOR,))
    assert reader is not None
    with reader:
        present = {key for key in asked if key in stored}

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
    manifest = read_manifest(folder) if name == FORMAT else None
    if name == "torch_dist" or (manifest is not None and manifest.layout.get(LIBRARY)):
        return _FORMATS[name].open(folder)
    return _FORMATS["application"].open(folder)


_HERE = "megatron.core.dist_checkpointing"
_FORMATS: Registry[StateDictFormat] = Registry(
    "--ckpt-format",
    {
        FORMAT: f"{_HERE}.library_files:SAFETENSORS_DIST_STATE",
        "torch_dist": f"{_HERE}.megatron_formats.library:TORCH_DIST_STATE",
        "application": f"{_HERE}.megatron_formats.library:OF_APPLICATION",
    },
)
_ABSENT = object()  # marks an entry to remove from the state dict
_EXTRA_STATE = "_extra_state/"  # Megatron Core's empty objects, which modules here do not have


def format_name(strategy: Strategy) -> str:
    """Return the format that a strategy selects.  Raises CheckpointError for an unknown one."""
    if strategy is None:
        return FORMAT
    name = strategy[0] if isinstance(strategy, tuple) else getattr(strategy, "backend", strategy)
    if name not in (FORMAT, "torch_dist"):
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


@dataclass(frozen=True)
class _Part:
    """What one rank writes.  ``common`` is None on all ranks but 0."""

    folder: Path
    rank: int
    records: TensorRecords = ()
    objects: StateDict = field(default_factory=dict)
    common: StateDict | None = None

    def of(self, sharded_state_dict: ShardedStateDict, metadata: StateDict | None) -> _Part:
        """Return the part of this rank.  Raises CheckpointError for an entry without data."""
        built = _build(sharded_state_dict, {})
        records: dict[object, TensorRecord] = {}
        objects = {}
        for _, entry in leaves(built):
            if isinstance(entry, ShardedTensor) and is_main_replica(entry.replica_id):
                place = entry.key, entry.global_offset, str(entry.flattened_range)
                records.setdefault(place, entry.record())  # tied weights are one tensor
            elif isinstance(entry, ShardedObject) and is_main_replica(entry.replica_id):
                objects[entry.unique_key] = entry.data
        common = None
        if self.rank == 0:
            sharded = (ShardedBase, LocalNonpersistentObject)
            plain = partial(_unless, sharded)
            common = _filled(sharded_state_dict, {}, plain, {})
            if metadata is not None:
                common[_METADATA] = metadata
        return replace(self, records=list(records.values()), objects=objects, common=common)

    def copied(self) -> _Part:
        """Return the part with copies of all values, which training does not change."""
        return replace(
            self,
            records=copy_out(self.records, HostBuffer()),
            objects=copy.deepcopy(self.objects),
            common=copy.deepcopy(self.common),
        )


def _unless(types: tuple[type, ...], entry: object) -> object:
    return _ABSENT if isinstance(entry, types) else entry


def _write(part: _Part, writer: StateDictFormat, written: JsonObject) -> None:
    """Write the files of this rank; put its report, or its error, into ``written``."""
    rank_save = RankSave(
        folder=part.folder,
        rank=part.rank,
        tensors=part.records,
        contents=Contents(tensors=()),
        iteration=0,
        attempt=attempt_id(),
    )
    try:
        written |= asdict(writer.write_rank(rank_save, part.objects, part.common))
    except all_ranks.REPORTED as error:
        written |= all_ranks.not_written(error)


def _conclude(
    part: _Part, writer: StateDictFormat, written: JsonObject, group: ProcessGroup | None
) -> None:
    """Complete the folder on rank 0, or raise CheckpointError on all ranks.  Collective."""
    if not written:
        ran_apart = RuntimeError("the request ran in another process: run it in a thread of this")
        written = all_ranks.not_written(ran_apart)
    gathered = gather_json(written, group)
    error = None
    if gathered is not None:
        reports, errors = all_ranks.reports_of(gathered)
        error = shorten(errors) if errors else _complete(part, writer, reports)
    error = broadcast_json(error, group)
    if error:
        raise CheckpointError(f"{part.folder} was not saved: {error}")


def _complete(part: _Part, writer: StateDictFormat, reports: Sequence[RankReport]) -> str | None:
    """On rank 0: write what remains.  Returns an error message, or None."""
    assert part.common is not None, "rank 0 has the common values"
    try:
        if (part.folder / MANIFEST).exists():
            logger.warning("%s holds a checkpoint, which is overwritten", part.folder)
            (part.folder / MANIFEST).unlink()
        writer.complete(part.folder, reports, part.common)
        fsync_folder(part.folder)
    except all_ranks.REPORTED as error:
        return str(error)
    return None


def _to_load(entry: ShardedTensor) -> TensorRecord:
    """Return the record that a load fills; make memory for an entry without data."""
    entry.init_data(torch.get_default_device(), torch.zeros)
    return replace(entry.record(), replica=Replica())


def _plan(
    folder: Path, records: TensorRecords, keys: Sequence[str]
) -> tuple[LibraryReader | None, JsonObject]:
    """Open the checkpoint and compare it with ``records``; return the report for rank 0."""
    try:
        reader = open_files(folder)
    except (CheckpointError, OSError) as error:
        return None, {"error": error_as_json(error)}
    stored = reader.tensors
    found = (mismatch(t, stored[t.key], cast=True) for t in records if t.key in stored)
    return reader, {"problems": [problem for problem in found if problem], "wanted": [*keys]}


def _build(value: object, built: dict[int, object]) -> Any:
    """Return a copy of the tree in which each factory is replaced by the tree that it builds.

    Those trees are added to ``built``, by the id of their factory.
    """
    if isinstance(value, dict):
        return {key: _build(entry, built) for key, entry in value.items()}
    if isinstance(value, list):
        return [_build(entry, built) for entry in value]
    if isinstance(value, ShardedTensorFactory):
        tree = _build(value.build(), built)
        built[id(value)] = tree
        return tree
    return value


def _filled(
    requested: object,
    common: Nested,
    value_of: Callable[[object], object],
    built: Mapping[int, object],
) -> Nested:
    """Return the tree ``common`` with the values of the leaves of ``requested``.

    If ``value_of`` returns `_ABSENT` for a leaf, that of ``common`` stays.  A dict or list without
    any is left out; in another list None replaces it, so that the other entries keep their
    positions.  The values for a factory are passed to its ``merge_fn``, if all are there.
    """
    if isinstance(requested, ShardedTensorFactory) and id(requested) in built:
        tree = built[id(requested)]
        if any(value_of(entry) is _ABSENT for _, entry in leaves(tree)):
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
