"""Write torch_dist, torch_dcp and fsdp_dtensor through torch.distributed.checkpoint.

A rank writes one ``__{rank}_0.distcp``, a sequence of torch.save archives.  After all ranks, rank 0
writes values that are not theirs into a file with the next number, and ``.metadata`` from their
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
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from itertools import product
from math import prod
from operator import floordiv
from pathlib import Path
from typing import cast

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    DefaultSavePlanner,
    FileSystemWriter,
    Metadata,
    SavePlan,
    TensorStorageMetadata,
    WriteItem,
)
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron.core.config.value_types import Arguments, JsonObject, Shape, StateDict
from megatron.core.diagnostics.fault_injection import fault_point
from megatron.core.dist_checkpointing.formats import (
    Format,
    RankReport,
    RankSave,
    check_written_once,
    merge_tensors,
)
from megatron.core.dist_checkpointing.manifest import (
    COMMON_FILE,
    MANIFEST,
    METADATA,
    RERUN_STATE,
    RNG_STATE,
    Common,
    FileEntries,
    FileEntry,
    TensorEntries,
    adopt_file,
    write_text,
)
from megatron.core.dist_checkpointing.mapping import LazyPiece, Piece, ShardedTensor, split_rows
from megatron.core.dist_checkpointing.megatron_formats.archive import (
    compact,
    full_disk_errors,
    save_archive,
    write_archive,
)
from megatron.core.dist_checkpointing.megatron_formats.foreign_reader import (
    STATE_PREFIX,
    layout_of,
)
from megatron.core.dist_checkpointing.megatron_formats.names import (
    HALVES,
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
    RERUN_SHARDS,
    grad_scaler,
    has_two_optimizers,
    is_distributed,
    is_half,
    numbered_optimizer,
    param_groups,
    reference_mode,
    reference_rerun,
    reference_rng,
    reference_values,
)
from megatron.core.dist_checkpointing.megatron_formats.torch_dist import rng_shard
from megatron.core.dist_checkpointing.safetensors_file import dtype_name
from megatron.core.dist_checkpointing.validation import AMAX_HISTORY


class DcpFile(DefaultSavePlanner):
    """Values of one data file, which torch's FileSystemWriter asks for when it writes them.

    ``add`` and ``add_box`` return the index entry of a value; `write` completes it with the
    position in the file.
    """

    def __init__(self, folder: Path, rank: int, step: int) -> None:
        super().__init__()
        self._folder = folder
        self._prefix = f"__{rank}_"
        self._step = step
        self._items: list[WriteItem] = []
        self._values: list[tuple[JsonObject, Callable[[], object]]] = []

    def add(self, value: object) -> JsonObject:
        """Add an object other than a tensor."""
        return self._add({}, lambda: value, WriteItemType.BYTE_IO)

    def add_box(
        self,
        offset: Sequence[int],
        shape: Sequence[int],
        dtype: torch.dtype,
        make: Callable[[], Tensor],
    ) -> JsonObject:
        """Add the box of a tensor that begins at ``offset``; ``make`` computes its values."""
        size = Size(shape)
        data = TensorWriteData(
            ChunkStorageMetadata(Size(offset), size), TensorProperties(dtype), size
        )
        return self._add(
            {"offset": list(offset), "shape": list(shape)},
            lambda: compact(make().to(dtype).reshape(size)),
            WriteItemType.TENSOR,
            data,
        )

    def _add(
        self,
        entry: JsonObject,
        make: Callable[[], object],
        kind: WriteItemType,
        data: TensorWriteData | None = None,
    ) -> JsonObject:
        self._items.append(WriteItem(MetadataIndex(str(len(self._items))), kind, tensor_data=data))
        self._values.append((entry, make))
        return entry

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        fault_point("save.tensor", step=self._step)
        value = self._values[int(write_item.index.fqn)][1]()
        if write_item.tensor_data is not None:
            return cast(Tensor, value)
        buffer = BytesIO()
        write_archive(buffer, value)
        return buffer

    def write(self) -> FileEntries:
        """Write and fsync the file; return its manifest entry.  Raises OSError.

        The entry has the size but no checksum of the contents: each torch.save archive has its own.
        """
        plan = SavePlan(self._items, storage_data=_StoragePrefix(self._prefix))
        # torch syncs before it flushes, so it syncs nothing; the values are on the host already.
        writer = _Writer(self._folder, sync_files=False, per_thread_copy_ahead=0)
        with full_disk_errors():
            results = writer.write_data(plan, self).wait()
        for result in results:
            place = result.storage_data
            entry, _ = self._values[int(result.index.fqn)]
            entry |= {
                "file": place.relative_path,
                "start": place.offset,
                "num_bytes": place.length,
            }
        name = f"{self._prefix}0.distcp"
        fault_point("save.before_fsync", step=self._step)
        with open(self._folder / name, "rb") as file:
            os.fsync(file.fileno())
            return {name: FileEntry(os.fstat(file.fileno()).st_size, 0, 0)}


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        """Return no path and no random id, which torch would store in ``.metadata``."""
        return StorageMeta()


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
    metadata = Metadata({}, planner_data=paths)
    places: list[tuple[MetadataIndex, JsonObject]] = []
    for key, entry in tensors.items():
        pieces = entry["pieces"]
        metadata.state_dict_metadata[key] = TensorStorageMetadata(
            TensorProperties(getattr(torch, entry["dtype"])),
            Size(entry["shape"]),
            [ChunkStorageMetadata(Size(p["offset"]), Size(p["shape"])) for p in pieces],
        )
        places += [(MetadataIndex(key, piece["offset"]), piece) for piece in pieces]
    for key, place in objects.items():
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        places.append((MetadataIndex(key), place))
    if unflattened is not None:
        shapes = {key: {"nd_reformulated_orig_global_shape": s} for key, s in unflattened.items()}
        vars(metadata)["mcore_data"] = {key: shapes.get(key, {}) for key in tensors}
    results = [
        WriteResult(index, size, _StorageInfo(place["file"], place["start"], size))
        for index, place in places
        for size in (place["num_bytes"],)
    ]
    _Writer(folder).finish(metadata, [results])
    return adopt_file(folder / METADATA)


_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_SHARDING = "fully_sharded_model_space"
# Matrices of Megatron-LM that may have an `_extra_state` entry.
_MATRIX = re.compile(r"((?:\w+coder|mtp)\.layers\..*\b(?:linear_\w+|\w+_proj))\.weight(?:\.z)?$")


def write_stacked_tensors(rank_save: RankSave) -> RankReport:
    """Write and fsync the file of one rank.  Not collective.  Raises OSError."""
    arguments = rank_save.arguments
    file = DcpFile(rank_save.folder, rank_save.rank, rank_save.iteration)
    report = RankReport()
    for tensor in (part for whole in rank_save.tensors for part in _in_blocks(whole, arguments)):
        key, stack = _reference_key(tensor.key, arguments)
        is_stacked = bool(stack) or len(tensor.global_shape) > 1
        # Flat ranges of a vector are boxes.
        is_flat = tensor.is_flat and key.startswith(STATE_PREFIX) and is_stacked
        entry = report.tensors.setdefault(
            key,
            {
                "shape": list(tensor.global_shape),
                "dtype": dtype_name(tensor.dtype),
                "pieces": [],
                "cut": list(tensor.sharding) if is_flat else None,
                "num_stacked": len(stack),
            },
        )
        shard = _shard_shape(tensor)
        for offset, shape, make in _split_at_shards(tensor):
            front = stack
            if is_flat:
                front += tuple(map(floordiv, offset, shard))
                start = sum(
                    o % n * prod(shard[d + 1 :])
                    for d, (o, n) in enumerate(zip(offset, shard, strict=True))
                )
                offset = (start,)
                shape = (prod(shape),)
            box = (*front, *offset), (1,) * len(front) + shape
            entry["pieces"].append(file.add_box(*box, tensor.dtype, make))
    state = rank_save.contents.rank_state or {}
    layout = layout_of(arguments)
    if RNG_STATE in state and layout:
        key, at = rng_shard(layout, rank_save.rank)
        if not (at["dp"] or at["cp"]):
            report.objects[key] = file.add([[reference_rng(state[RNG_STATE])]])
    if RERUN_STATE in state:
        key = f"{RERUN_SHARDS}/shard_{rank_save.rank}_{int(arguments['world_size'])}"
        report.objects[key] = file.add([reference_rerun(state[RERUN_STATE])])
    report.files.update(file.write())
    return report


def write_common_stacked(
    folder: Path, reports: Sequence[RankReport], common: Common
) -> FileEntries:
    """Write and fsync the values common to all ranks: ``.metadata``, common.pt, metadata.json."""
    tensors = merge_tensors(report.tensors for report in reports)
    objects = {key: place for report in reports for key, place in report.objects.items()}
    unflattened: dict[str, list[int]] = {}
    extra = DcpFile(folder, len(reports), common["iteration"])
    for key, entry in tensors.items():
        counts = [
            1 + max(piece["offset"][dim] for piece in entry["pieces"])
            for dim in range(entry["num_stacked"])
        ]
        own = entry["shape"]
        entry["shape"] = [*counts, *own]
        if found := _MATRIX.match(key):
            counts_text = ".".join(map(str, counts or [1]))
            for place in product(*map(range, counts or [1])):
                shard = f"_extra_state/shard_{'.'.join(map(str, place))}_{counts_text}"
                objects[f"{found[1]}.{shard}"] = extra.add([None])
        if entry["cut"] is not None:
            # A tensor [X, Y] with shards [x, y] is stored with shape [X/x, Y/y, x*y].
            dim, num_shards = entry["cut"]
            unflattened[key] = entry["shape"]
            grid = [num_shards if d == dim else 1 for d in range(len(own))]
            entry["shape"] = [*counts, *grid, prod(own) // num_shards]
        check_written_once(key, entry)
    values = reference_values(common)
    if any(key.startswith(RERUN_SHARDS) for key in objects):
        values[RERUN_STATE] = reference_mode()
    content: StateDict = {"chained_optim_avoid_prefix": True, "singleton_local_shards": False}
    if common.get("optimizer") is not None:
        values["optimizer"] = _optimizer(common)
        if is_distributed(common):
            content["distrib_optim_sharding_type"] = _SHARDING
    return {
        **extra.write(),
        METADATA: write_metadata(folder, tensors, objects, unflattened=unflattened),
        COMMON_FILE: save_archive(folder / COMMON_FILE, {**values, "content_metadata": content}),
        MANIFEST: write_text(folder / MANIFEST, json.dumps(_BACKENDS)),
    }


TORCH_DIST = Format("torch_dist", write_stacked_tensors, write_common_stacked, is_foreign=True)


def _optimizer(common: Common) -> Mapping[int, StateDict] | StateDict:
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


def _in_blocks(tensor: ShardedTensor, arguments: Arguments) -> Iterator[ShardedTensor]:
    """Yield one tensor for each block of a mixer tensor; other tensors unchanged."""
    blocks = blocks_of(split_state(tensor.key)[1], arguments)
    if not blocks:
        yield tensor
        return
    sharding = (0, tensor.sharding[1] // len(blocks))
    for block, part in zip(blocks, split_rows(tensor, list(blocks.values())), strict=True):
        yield replace(part, key=f"{tensor.key}.{block}", sharding=sharding)


def _reference_key(key: str, arguments: Arguments) -> tuple[str, Shape]:
    """Return Megatron-LM's key, and the layer and expert numbers at which the tensor is stacked."""
    if key.endswith(AMAX_HISTORY):  # not in Megatron-LM, and not in every layer
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


def _split_at_shards(
    tensor: ShardedTensor,
) -> Iterator[tuple[Shape, Shape, Callable[[], Tensor]]]:
    """Yield offset, shape and values of the pieces, split so that none crosses a shard boundary."""
    dim = tensor.sharding[0]
    for piece in tensor.pieces:
        if not tensor.global_shape:
            yield (), (), partial(getattr, piece, "data")
            continue
        size = _shard_shape(tensor)[dim]
        first = begin = piece.offset[dim]
        end = begin + piece.shape[dim]
        while begin < end:
            stop = min(end, (begin // size + 1) * size)
            offset, shape = (
                (*box[:dim], value, *box[dim + 1 :])
                for box, value in ((piece.offset, begin), (piece.shape, stop - begin))
            )
            yield offset, shape, partial(_rows, piece, dim, begin - first, stop - begin)
            begin = stop


def _rows(piece: Piece | LazyPiece, dim: int, first: int, count: int) -> Tensor:
    return piece.data.narrow(dim, first, count)


def _shard_shape(tensor: ShardedTensor) -> list[int]:
    dim, num_shards = tensor.sharding
    return [n // num_shards if d == dim else n for d, n in enumerate(tensor.global_shape)]


@dataclass(frozen=True)
class _Stored:
    """Reference to a tensor that the ranks have written."""

    key: str


def write_state_dict(rank_save: RankSave, *, in_halves: bool = False) -> RankReport:
    """Write and fsync the file of one rank.  Not collective.  Raises OSError.

    ``in_halves``: write the halves of gated MLPs as two tensors, ``_w`` and ``_v``.
    """
    file = DcpFile(rank_save.folder, rank_save.rank, rank_save.iteration)
    report = RankReport()
    for tensor in rank_save.tensors:
        parts = {"": tensor}
        blocks = sharding_of(split_state(tensor.key)[1], rank_save.arguments).blocks
        if in_halves and blocks == (1, 1):
            halves = split_rows(tensor, [tensor.global_shape[0] // 2] * 2)
            parts = dict(zip(HALVES, halves, strict=True))
        for suffix, part in parts.items():
            report.tensors[tensor.key + suffix] = {
                "shape": list(part.global_shape),
                "dtype": dtype_name(part.dtype),
                "pieces": [
                    file.add_box(p.offset, p.shape, part.dtype, partial(getattr, p, "data"))
                    for p in part.pieces
                ],
            }
    report.objects.update(rank_save.contents.rank_state or {})
    report.files.update(file.write())
    return report


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
    reruns = [report.objects.get(RERUN_STATE) for report in reports]
    if any(reruns):
        state[RERUN_STATE] = json.dumps(reruns)
    extra = DcpFile(folder, len(reports), common["iteration"])
    tensors = {}
    objects = {}
    paths = {}

    def add(path: Sequence[object], leaf: object) -> None:
        name = ".".join(map(str, path))
        paths[name] = path
        if isinstance(leaf, _Stored):
            tensors[name] = stored[leaf.key]
        elif isinstance(leaf, Tensor):
            piece = extra.add_box([0] * leaf.dim(), leaf.shape, leaf.dtype, leaf.clone)
            shape = list(leaf.shape)
            dtype = dtype_name(leaf.dtype)
            tensors[name] = {"shape": shape, "dtype": dtype, "pieces": [piece]}
        else:
            objects[name] = extra.add(leaf)

    traverse_state_dict(state, add, lambda value: isinstance(value, _Stored))
    files = extra.write()
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

TORCH_DCP = Format(
    "torch_dcp", write_state_dict, partial(write_common_state, by_name=False), is_foreign=True
)
FSDP_DTENSOR = Format(
    "fsdp_dtensor",
    partial(write_state_dict, in_halves=True),
    partial(write_common_state, by_name=True),
    is_foreign=True,
)
