"""Write torch_dist, torch_dcp and fsdp_dtensor: files of torch.distributed.checkpoint.

A rank writes one ``__{rank}_0.distcp``, a sequence of torch.save archives.  After all ranks, rank 0
writes other values into a file with the next number, and torch's index ``.metadata`` from the
reports of each box: key, global shape, position in the file.  A separate module, because importing
torch.distributed.checkpoint takes most of a second, which programs that only read should not wait.

In ``torch_dist`` layers are stacked unless they differ; experts of a layer are stacked too.
Optimizer state that a distributed optimizer shards is written as ranges of flattened shards
(`torch_dist`).  Vocabulary padding is written.

``torch_dcp`` is the state dict of format torch, flattened.  In ``fsdp_dtensor`` optimizer state is
stored by parameter name, and the halves of a gated MLP are two tensors, ``_w`` and ``_v``.  Its key
prefixes, these halves, and that there are no other files are known from Megatron-LM.  The
description of groups by parameter (``param_to_group_meta``) and the name of main parameters are
inferred.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

from megatron.core.config.value_types import Arguments, JsonObject, Shape, StateDict
from megatron.core.diagnostics.fault_injection import fault_point
from megatron.core.dist_checkpointing.formats import (
    Format,
    RankReport,
    RankSave,
    check_written_once,
    merge_tensors,
)
from megatron.core.dist_checkpointing.key_names import HALVES
from megatron.core.dist_checkpointing.manifest import (
    COMMON_FILE,
    MANIFEST,
    METADATA,
    RNG_STATE,
    Common,
    FileEntries,
    FileEntry,
    TensorEntries,
    adopt_file,
    write_text,
)
from megatron.core.dist_checkpointing.megatron_formats.archive import (
    compact,
    save_archive,
    write_archive,
)
from megatron.core.dist_checkpointing.megatron_formats.foreign_reader import STATE_PREFIX, layout_of
from megatron.core.dist_checkpointing.megatron_formats.names import (
    blocks_of,
    fused_name,
    is_buffer,
    layers_are_alike,
    ordered_names,
    sharding_of,
    split_expert,
    split_layer,
    split_state,
)
from megatron.core.dist_checkpointing.megatron_formats.optimizer_order import group_of, sort_of
from megatron.core.dist_checkpointing.megatron_formats.reference_values import (
    grad_scaler,
    has_two_optimizers,
    is_distributed,
    is_half,
    numbered_optimizer,
    param_groups,
    reference_rng,
    reference_values,
    rerun_entry,
)
from megatron.core.dist_checkpointing.megatron_formats.torch_dist import rng_shard
from megatron.core.dist_checkpointing.records import LazyPiece, Piece, TensorRecord, split
from megatron.core.dist_checkpointing.safetensors_file import dtype_name
from megatron.core.dist_checkpointing.validation import INSIDE_QUANTIZER


@dataclass(frozen=True)
class DcpFile:
    """A data file that is being written: torch.save archives, one after the other.

    ``add`` and ``add_box`` write a value and return its index entry.  Both raise OSError.
    """

    name: str
    step: int
    file: BinaryIO

    def add(self, value: object, key: str = "a value") -> JsonObject:
        """Add an object other than a tensor; its ``key`` is for messages."""
        fault_point("save.tensor", step=self.step)
        start = self.file.tell()
        write_archive(self.file, value, key)
        return {"file": self.name, "start": start, "num_bytes": self.file.tell() - start}

    def add_box(self, offset: Sequence[int], values: Tensor) -> JsonObject:
        """Add the box of a tensor that begins at ``offset``."""
        return {"offset": list(offset), "shape": list(values.shape), **self.add(compact(values))}


@contextmanager
def new_file(folder: Path, rank: int, step: int, files: FileEntries) -> Iterator[DcpFile]:
    """Create the data file of a rank, and fsync it at the end; add its entry to ``files``.

    The entry has the size but no checksum of the contents: each torch.save archive has its own.
    """
    name = f"__{rank}_0.distcp"
    with open(folder / name, "wb") as file:
        yield DcpFile(name, step, file)
        fault_point("save.before_fsync", step=step)
        file.flush()
        os.fsync(file.fileno())
        files[name] = FileEntry(file.tell(), 0, 0)


def write_metadata(
    folder: Path,
    tensors: TensorEntries,
    objects: Mapping[str, JsonObject],
    *,
    paths: Mapping[str, Sequence[object]] | None = None,
    unflattened: Mapping[str, Sequence[int]] | None = None,
) -> FileEntry:
    """Write and fsync ``.metadata``.

    ``paths``: path of a key in the nested dictionaries.  ``unflattened``: original shapes of
    flattened tensors (`torch_dist`), None for a plain torch checkpoint.
    """
    places: dict[MetadataIndex, JsonObject] = {}
    described: dict[str, Any] = {}
    for key, entry in tensors.items():
        pieces = entry["pieces"]
        described[key] = TensorStorageMetadata(
            TensorProperties(getattr(torch, entry["dtype"])),
            Size(entry["shape"]),
            [ChunkStorageMetadata(Size(p["offset"]), Size(p["shape"])) for p in pieces],
        )
        places |= {MetadataIndex(key, piece["offset"]): piece for piece in pieces}
    for key, place in objects.items():
        described[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = place
    stored = {
        index: _StorageInfo(place["file"], place["start"], place["num_bytes"])
        for index, place in places.items()
    }
    metadata = Metadata(described, planner_data=paths, storage_data=stored)
    if unflattened is not None:
        shapes = {key: {"nd_reformulated_orig_global_shape": s} for key, s in unflattened.items()}
        vars(metadata)["mcore_data"] = {key: shapes.get(key, {}) for key in tensors}
    with open(folder / METADATA, "wb") as file:
        pickle.dump(metadata, file)
    return adopt_file(folder / METADATA)


BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_SHARDING = "fully_sharded_model_space"
# Matrices of Megatron-LM that may have an `_extra_state` entry.
_MATRIX = re.compile(r"((?:\w+coder|mtp)\.layers\..*\b(?:linear_\w+|\w+_proj))\.weight(?:\.z)?$")


Part = tuple[str, Shape, TensorRecord]  # key, layer and expert numbers, a tensor of the file


def write_tensors(
    rank_save: RankSave,
    *,
    parts_of: Callable[[TensorRecord, Arguments], Iterator[Part]],
    objects: Mapping[str, object] | None = None,
) -> RankReport:
    """Write and fsync the file of one rank.  Not collective.  Raises OSError.

    ``parts_of`` returns the tensors of the format that a tensor of this project becomes.
    ``objects`` are written too, and the places of each are in the report.
    """
    report = RankReport(objects=dict(rank_save.contents.rank_state or {}))
    arguments = rank_save.arguments
    parts = (part for whole in rank_save.tensors for part in parts_of(whole, arguments))
    with new_file(rank_save.folder, rank_save.rank, rank_save.iteration, report.files) as file:
        for key, stack, tensor in parts:
            entry = report.tensors.setdefault(
                key,
                {
                    "shape": list(tensor.global_shape),
                    "dtype": dtype_name(tensor.dtype),
                    "pieces": [],
                    "cut": list(tensor.sharding) if tensor.is_flat else None,
                    "num_stacked": len(stack),
                    "counts": list(tensor.stacked),
                },
            )
            for offset, shape, piece in _boxes(tensor):
                values = piece.data.to(tensor.dtype).reshape((1,) * len(stack) + shape)
                entry["pieces"].append(file.add_box((*stack, *offset), values))
        for key, value in (objects or {}).items():
            report.objects[key] = file.add([value], key)
    return report


def _boxes(tensor: TensorRecord) -> Iterator[tuple[Shape, Shape, Piece | LazyPiece]]:
    """Yield offset, shape and values of the boxes; of a flat tensor for its shape in the file.

    That is [X/x, Y/y, x*y] for a tensor [X, Y] with shards [x, y].
    """
    if not tensor.is_flat:
        yield from ((piece.offset, piece.shape, piece) for piece in tensor.pieces)
        return
    dim, num_shards = tensor.sharding
    parts = [tensor]
    if num_shards > 1:
        size = tensor.global_shape[dim] // num_shards
        parts = list(split(tensor, [size] * num_shards, dim))
    for index, part in enumerate(parts):
        grid = [index if d == dim else 0 for d in range(len(part.global_shape))]
        for piece in part.pieces:
            start = sum(n * prod(part.global_shape[d + 1 :]) for d, n in enumerate(piece.offset))
            yield (*grid, start), (*[1] * len(grid), prod(piece.shape)), piece


def write_common_stacked(
    folder: Path, reports: Sequence[RankReport], common: Common
) -> FileEntries:
    """Write and fsync the values common to all ranks, in Megatron-LM's form."""
    objects: StateDict = {}
    layout = layout_of(common["args"])
    for rank, report in enumerate(reports if layout else ()):
        key, at = rng_shard(layout, rank)
        if RNG_STATE in report.objects and not (at["dp"] or at["cp"]):
            objects[key] = [reference_rng(report.objects[RNG_STATE])]
    values = reference_values(common) | rerun_entry(report.objects for report in reports)
    content: StateDict = {"chained_optim_avoid_prefix": True, "singleton_local_shards": False}
    if common.get("optimizer") is not None:
        values["optimizer"] = optimizer_entry(common)
        if is_distributed(common):
            content["distrib_optim_sharding_type"] = _SHARDING
    values["content_metadata"] = content
    return write_stacked(folder, reports, values, step=common["iteration"], objects=objects)


def write_stacked(
    folder: Path,
    reports: Sequence[RankReport],
    values: Common,
    *,
    step: int = 0,
    objects: Mapping[str, object] = MappingProxyType({}),
    stored: Mapping[str, JsonObject] = MappingProxyType({}),
) -> FileEntries:
    """Write and fsync ``.metadata``, common.pt with ``values``, and metadata.json.

    ``objects`` are written; ``stored`` has the places of those that the ranks have written.
    """
    files: FileEntries = {}
    with new_file(folder, len(reports), step, files) as extra:
        tensors, places, unflattened = merge_stacked(reports, extra)
        places |= {key: extra.add([value]) for key, value in objects.items()}
    return {
        **files,
        METADATA: write_metadata(folder, tensors, {**places, **stored}, unflattened=unflattened),
        COMMON_FILE: save_archive(folder / COMMON_FILE, values),
        MANIFEST: write_text(folder / MANIFEST, json.dumps(BACKENDS)),
    }


def merge_stacked(
    reports: Sequence[RankReport], extra: DcpFile
) -> tuple[TensorEntries, dict[str, JsonObject], dict[str, list[int]]]:
    """Return the entries of all tensors, of empty extra states, and shapes before flattening.

    Writes the extra states that Megatron-LM expects of matrices to ``extra``.
    """
    tensors = merge_tensors(report.tensors for report in reports)
    objects: dict[str, JsonObject] = {}
    unflattened: dict[str, list[int]] = {}
    for key, entry in tensors.items():
        counts = entry["counts"] or [
            1 + max(piece["offset"][dim] for piece in entry["pieces"])
            for dim in range(entry["num_stacked"])
        ]
        cut = entry["cut"]
        own = entry["shape"]
        entry["shape"] = [*counts, *own]
        if found := _MATRIX.match(key):
            lead = counts or [1]
            counts_text = ".".join(map(str, lead))
            for place in product(*map(range, lead)):
                shard = f"_extra_state/shard_{'.'.join(map(str, place))}_{counts_text}"
                objects[f"{found[1]}.{shard}"] = extra.add([None])
        if cut is not None:  # see `_boxes`
            dim, num_shards = cut
            unflattened[key] = entry["shape"]
            grid = [num_shards if d == dim else 1 for d in range(len(own))]
            entry["shape"] = [*counts, *grid, prod(own) // num_shards]
        check_written_once(key, entry)
    return tensors, objects, unflattened


def optimizer_entry(common: Common) -> Mapping[int, StateDict] | StateDict:
    """Return the optimizer's entry; two, by number, if experts have a separate optimizer."""
    if has_two_optimizers(common):
        return {n: _one_optimizer(common, is_expert=bool(n)) for n in range(2)}
    return _one_optimizer(common)


def _one_optimizer(common: Common, *, is_expert: bool | None = None) -> StateDict:
    is_sharded = is_distributed(common)
    groups = param_groups(common, with_step=is_sharded, is_expert=is_expert)
    if is_sharded:
        kind = {"param_state_sharding_type": _SHARDING}
        return {"optimizer": {"param_groups": groups}, **grad_scaler(common), **kind}
    step = Tensor([common["optimizer"]["step"]])[0]
    inner = {"state": {"common_step": step}, "param_groups": groups}
    return {"optimizer": inner, **grad_scaler(common)} if is_half(common) else inner


def stacked_parts(whole: TensorRecord, arguments: Arguments) -> Iterator[Part]:
    """Yield the tensor, or one for each block of a mixer tensor."""
    parts = [whole]
    if blocks := blocks_of(split_state(whole.key)[1], arguments):
        sharding = (0, whole.sharding[1] // len(blocks))
        parts = [
            replace(part, key=f"{whole.key}.{block}", sharding=sharding)
            for block, part in zip(blocks, split(whole, list(blocks.values())), strict=True)
        ]
    for part in parts:
        key, stack = _reference_key(part.key, arguments)
        # Flat ranges of a vector are boxes.
        is_matrix = bool(stack) or len(part.global_shape) > 1
        is_flat = part.is_flat and key.startswith(STATE_PREFIX) and is_matrix
        yield key, stack, replace(part, is_flat=is_flat)


def _reference_key(key: str, arguments: Arguments) -> tuple[str, Shape]:
    """Return Megatron-LM's key, and the layer and expert numbers at which the tensor is stacked."""
    if INSIDE_QUANTIZER in key:  # not in Megatron-LM, and not in every layer
        return key, ()
    prefix, name = split_state(key)
    name, stack = fused_name(name, arguments), []
    layer = split_layer(name)
    if layer is not None and layers_are_alike(arguments):
        name = f"{layer[0]}.{layer[2]}"
        stack.append(layer[1])
    if expert := split_expert(name):
        name = f"{expert[0]}.experts.{expert[2]}"
        stack.append(expert[1])
    return prefix + name, tuple(stack)


@dataclass(frozen=True)
class _Stored:
    """Reference to a tensor that the ranks have written."""

    key: str


def _state_dict_parts(
    whole: TensorRecord, arguments: Arguments, *, in_halves: bool
) -> Iterator[Part]:
    """Yield the tensor, or with ``in_halves`` the halves of a gated MLP: ``_w`` and ``_v``."""
    parts = {"": whole}
    if in_halves and sharding_of(split_state(whole.key)[1], arguments).blocks == (1, 1):
        halves = split(whole, [whole.global_shape[0] // 2] * 2)
        parts = dict(zip(HALVES, halves, strict=True))
    for suffix, part in parts.items():
        yield whole.key + suffix, (), replace(part, is_flat=False)


def write_common_state(
    folder: Path, reports: Sequence[RankReport], common: Common, *, by_name: bool
) -> FileEntries:
    """Write and fsync the values common to all ranks, and ``.metadata``."""
    stored = merge_tensors(report.tensors for report in reports)
    for key, entry in stored.items():
        check_written_once(key, entry)
    state = _state_dict(stored, common, by_name=by_name)
    if states := [r.objects[RNG_STATE] for r in reports if RNG_STATE in r.objects]:
        state[RNG_STATE] = list(map(reference_rng, states))
    state |= rerun_entry(report.objects for report in reports)
    tensors = {}
    objects: dict[str, JsonObject] = {}
    paths = {}
    files: FileEntries = {}

    def add(path: Sequence[object], leaf: object) -> None:
        name = ".".join(map(str, path))
        paths[name] = path
        if isinstance(leaf, _Stored):
            tensors[name] = stored[leaf.key]
        elif isinstance(leaf, Tensor):
            piece = extra.add_box([0] * leaf.dim(), leaf)
            dtype = dtype_name(leaf.dtype)
            tensors[name] = {"shape": piece["shape"], "dtype": dtype, "pieces": [piece]}
        else:
            objects[name] = extra.add(leaf)

    with new_file(folder, len(reports), common["iteration"], files) as extra:
        traverse_state_dict(state, add, lambda value: isinstance(value, _Stored))
    return {**files, METADATA: write_metadata(folder, tensors, objects, paths=paths)}


def _state_dict(stored: TensorEntries, common: Common, *, by_name: bool) -> StateDict:
    """Return the nested state dict, with `_Stored` for the ranks' tensors.

    ``by_name``: that of ``fsdp_dtensor``, else of ``torch_dcp``.
    """
    arguments = common["args"]
    weights = {name.removesuffix("_w").removesuffix("_v") for name in stored}
    names = [
        (local + half, name + half)
        for local, name in ordered_names(weights, arguments)
        for half in ("", *HALVES)
        if name and name + half in stored
    ]
    state = reference_values(common)
    prefix = "module." if by_name else ""
    state["model"] = {prefix + local: _Stored(name) for local, name in names}
    if common.get("optimizer") is None:
        return state
    params = [
        (local, name, len(stored[name]["shape"])) for local, name in names if not is_buffer(name)
    ]
    if not by_name:
        kinds = {key.split(".")[2] for key in stored if key.startswith(STATE_PREFIX)}
        state["optimizer"] = numbered_optimizer(
            common,
            [param[1:] for param in params],
            kinds - {"fp32_param"},
            lambda kind, name: _Stored(f"{STATE_PREFIX}{kind}.{name}"),
        )
        return state
    step = torch.tensor(float(common["optimizer"]["step"]))
    groups = {sort_of(group): group for group in param_groups(common)}
    of_param = {}
    meta = {}
    for local, name, num_dims in params:
        inside = f"module.module.module.{local}"
        keys = {theirs: f"{STATE_PREFIX}{kind}.{name}" for kind, theirs in _KINDS.items()}
        found = {theirs: _Stored(key) for theirs, key in keys.items() if key in stored}
        of_param[inside] = {"step": step, **found}
        meta[inside] = groups[group_of(name, num_dims, arguments)]
    inner = {"state": of_param, "param_to_group_meta": meta}
    state["optimizer"] = {**inner, **grad_scaler(common)}
    return state


_KINDS = {
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "momentum_buffer": "momentum_buffer",
    "fp32_param": "master_param",
}

TORCH_DIST = Format(
    "torch_dist",
    partial(write_tensors, parts_of=stacked_parts),
    write_common_stacked,
    is_foreign=True,
)
TORCH_DCP = Format(
    "torch_dcp",
    partial(write_tensors, parts_of=partial(_state_dict_parts, in_halves=False)),
    partial(write_common_state, by_name=False),
    is_foreign=True,
)
FSDP_DTENSOR = Format(
    "fsdp_dtensor",
    partial(write_tensors, parts_of=partial(_state_dict_parts, in_halves=True)),
    partial(write_common_state, by_name=True),
    is_foreign=True,
)
