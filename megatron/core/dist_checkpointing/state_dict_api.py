"""``dist_checkpointing.save`` and ``load`` of sharded state dicts, with Megatron-LM's signatures.

A sharded state dict is a tree of dicts and lists.  Each rank saves its shards of the
`ShardedTensor` entries; the main replica saves each `ShardedObject`.  All other values are
*common*: equal on all ranks, and saved by rank 0.  Files have this project's format, without
pickle, so objects and common values must be tensors or plain values (numbers, text, lists, dicts).

Order of collectives.  Save: gather reports, broadcast the verdict.  Load: as in
`serialization.load`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject, Nested, StateDict
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.commit import attempt_id
from megatron.core.dist_checkpointing.formats import (
    SAFETENSORS_DIST,
    Contents,
    RankSave,
    files_of,
    open_reader,
)
from megatron.core.dist_checkpointing.manifest import (
    MANIFEST,
    Manifest,
    fsync_folder,
    write_manifest,
)
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
    to_write,
)
from megatron.core.dist_checkpointing.plain_values import decode, encode
from megatron.core.dist_checkpointing.validation import StrictHandling, shorten
from megatron.core.parallel.collectives import broadcast_json, gather_json, rank_in

logger = logging.getLogger(__name__)

_COMMON = "state_dict"
_OBJECTS = "sharded_objects"
_METADATA = "content_metadata"
_COMMON_TENSOR = "common."  # prefix of the keys of common tensors


def save(
    sharded_state_dict: StateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: object = None,
    common_strategy: object = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[StateDict], StateDict] | None = None,
    content_metadata: JsonObject | None = None,
) -> None:
    """Write ``sharded_state_dict`` into the existing folder ``checkpoint_dir``.  Collective.

    Every element of every tensor needs exactly one main replica; this is always checked,
    whatever ``validate_access_integrity`` is.  Raises CheckpointError on every rank alike.
    """
    del validate_access_integrity, preprocess_common_before_consistancy_check
    _only_default_strategies(sharded_strategy, common_strategy)
    if async_sharded_save:
        raise CheckpointError("async_sharded_save=True is not available: call save without it")
    group, folder = _world(), Path(checkpoint_dir)
    written, common = _write(sharded_state_dict, folder, group)
    reports = gather_json(written, group)
    error = None
    if reports is not None:
        error = _complete(folder, reports, {**common, _METADATA: content_metadata})
    error = broadcast_json(error, group)
    if error:
        raise CheckpointError(f"{folder} was not saved: {error}")


def load(
    sharded_state_dict: StateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: object = None,
    common_strategy: object = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Return the state dict in ``checkpoint_dir``: common values and requested sharded entries.

    Tensors are read into the memory of the tensors in ``sharded_state_dict``; the checkpoint may
    have any layout.  ``strict`` selects how differing keys are handled (`StrictHandling`); its
    ``return_*`` modes return (state dict, missing keys, unexpected keys).  Collective.  Raises
    CheckpointError on every rank alike.
    """
    del validate_access_integrity
    _only_default_strategies(sharded_strategy, common_strategy)
    group, folder = _world(), Path(checkpoint_dir)
    mode = StrictHandling(strict)
    built: dict[int, object] = {}
    wanted = [
        entry
        for _, entry in _leaves(_build(sharded_state_dict, built))
        if isinstance(entry, ShardedTensor)
    ]
    differences = serialization.load(
        folder,
        wanted,
        group,
        # Megatron-LM's default allows unused keys in the checkpoint.
        strictness="raise_unexpected"
        if mode is StrictHandling.ASSUME_OK_UNEXPECTED
        else mode.value,
        leave_out=(_COMMON_TENSOR,),
    )
    with open_reader(folder) as reader:
        content = reader.common()
        objects = content.get(_OBJECTS, {})
        common = decode(content.get(_COMMON, {}), reader.read)

        def loaded(entry: object) -> object:
            if isinstance(entry, ShardedObject):
                if entry.unique_key not in objects:
                    raise CheckpointError(f"{folder} holds no object {entry.unique_key}")
                return decode(objects[entry.unique_key], reader.read)
            if isinstance(entry, LocalNonpersistentObject):
                return entry.unwrap()
            if isinstance(entry, ShardedTensor) and entry.key not in differences.absent:
                return entry.data
            return _ABSENT  # common values are loaded from the checkpoint

        state: StateDict = _filled(sharded_state_dict, common, loaded, built)
    if mode.value.startswith("return"):
        return state, set(differences.unused), set(differences.absent)
    return state


def load_common_state_dict(checkpoint_dir: str | Path) -> StateDict:
    """Return the common values of a checkpoint: all but sharded entries.  Not collective."""
    with open_reader(Path(checkpoint_dir)) as reader:
        common: StateDict = decode(reader.common().get(_COMMON, {}), reader.read)
    return common


def load_content_metadata(checkpoint_dir: str | Path) -> JsonObject | None:
    """Return the ``content_metadata`` that `save` stored, or None.  Not collective."""
    with open_reader(Path(checkpoint_dir)) as reader:
        return reader.common().get(_METADATA)


_ABSENT = object()  # marks an entry to remove from the state dict


def _world() -> ProcessGroup | None:
    """Return the group of all ranks, or None if torch.distributed is not initialized."""
    return dist.group.WORLD if dist.is_initialized() else None


def _only_default_strategies(*strategies: object) -> None:
    for strategy in strategies:
        if strategy is not None:
            raise CheckpointError(
                f"strategy {strategy!r} is not available: leave it out; the format is that of "
                "--ckpt-format safetensors_dist"
            )


def _write(
    sharded_state_dict: StateDict, folder: Path, group: ProcessGroup | None
) -> tuple[JsonObject, JsonObject]:
    """Write this rank's files; return its report as JSON, and on rank 0 the common values."""
    rank = rank_in(group)
    objects = {}
    tensors: dict[str, ShardedTensor] = {}
    common_tensors: dict[str, Tensor] = {}
    common = {}
    try:
        if not folder.is_dir():
            raise CheckpointError("this folder does not exist: make it first")
        built = _build(sharded_state_dict, {})
        for path, entry in _leaves(built):
            if isinstance(entry, ShardedTensor):
                tensors.setdefault(entry.key, entry)  # tied weights are one tensor
            elif isinstance(entry, ShardedObject) and is_main_replica(entry.replica_id):
                objects[entry.unique_key] = encode(entry.data, path)
        if rank == 0:
            sharded = (ShardedTensor, ShardedObject, LocalNonpersistentObject)
            plain = _filled(built, {}, lambda e: _ABSENT if isinstance(e, sharded) else e, {})
            common = {_COMMON: encode(plain, _COMMON, common_tensors)}
        records = to_write(list(tensors.values()), share_work=False)
        for place, tensor in common_tensors.items():
            records.append(ShardedTensor.from_rank_offsets(_COMMON_TENSOR + place, tensor))
        rank_save = RankSave(
            folder=folder,
            rank=rank,
            tensors=records,
            contents=Contents(tensors=()),
            iteration=0,
            attempt=attempt_id(),
        )
        report = replace(SAFETENSORS_DIST.write_rank_files(rank_save), objects=objects)
    except serialization.REPORTED as error:
        return serialization.not_written(error), common
    return asdict(report), common


def _complete(folder: Path, written: Sequence[JsonObject], common: JsonObject) -> str | None:
    """On rank 0: write the index, the common values and, last, the manifest.

    Returns an error message, or None.
    """
    reports, errors = serialization.reports_of(written)
    if errors:
        return shorten(errors)
    objects = {key: value for report in reports for key, value in report.objects.items()}
    try:
        if (folder / MANIFEST).exists():
            logger.warning("%s holds a checkpoint, which is overwritten", folder)
            (folder / MANIFEST).unlink()
        more = SAFETENSORS_DIST.write_common_files(folder, reports, {**common, _OBJECTS: objects})
        manifest = Manifest(
            iteration=0,
            attempt=attempt_id(),
            published_at_ns=time.time_ns(),
            layout={},
            files={**files_of(reports), **more},
        )
        write_manifest(folder, manifest)
        fsync_folder(folder)
    except serialization.REPORTED as error:
        return str(error)
    return None


def _build(value: object, built: dict[int, object]) -> object:
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

    If ``value_of`` returns `_ABSENT` for a leaf, that of ``common`` stays.  A dict without any is
    left out; in a list None replaces it, so that the other entries keep their positions.  The
    values for a factory are passed to its ``merge_fn``.
    """
    if isinstance(requested, ShardedTensorFactory) and id(requested) in built:
        found = _filled(built[id(requested)], common, value_of, {})
        return found if found is _ABSENT else requested.merge_fn(found)
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
        return [None if entry is _ABSENT else entry for entry in entries]
    value = value_of(requested)
    return common if value is _ABSENT else value


def _leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the entries that are neither dict nor list, with their path for messages."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _leaves(entry, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from _leaves(entry, f"{path}.{number}")
    else:
        yield path, value
