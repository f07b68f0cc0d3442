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
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron.core.config.value_types import Arguments, StateDict
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
    FileEntry,
    PieceEntry,
    PlaceEntry,
    TensorEntry,
    adopt_file,
    write_text,
)
from megatron.core.dist_checkpointing.mapping import LazyPiece, Piece, ShardedTensor, split_rows
from megatron.core.dist_checkpointing.megatron_formats.archive import (
    compact,
    full_disk_errors,
    write_archive,
)
from megatron.core.dist_checkpointing.megatron_formats.foreign_reader import (
    STATE_PREFIX,
    layout_of,
)
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
from megatron.core.dist_checkpointing.megatron_formats.optimizer_order import (
    group_of,
)
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
from megatron.core.dist_checkpointing.validation import AMAX_HISTORY
from megatron.core.parallel.rank_grid import RankGrid


class DcpFile(DefaultSavePlanner):
    """Values of one data file, which torch's FileSystemWriter asks for when it writes them.

    ``add`` and ``add_box`` return the index entry of a value; `write` completes it with the
    position in the file.
    """

    def __init__(self, folder: Path, rank: int, step: int) -> None:
        super().__init__()
        self._folder = folder
        self._step = step
        self._prefix = f"__{rank}_"
        self._values: list[Callable[[], object]] = []
        self._items: list[WriteItem] = []
        self._entries: list[PlaceEntry | PieceEntry] = []

    def add(self, value: object) -> PlaceEntry:
        """Add an object other than a tensor."""
        entry = cast(PlaceEntry, {})
        self._add(entry, WriteItem(self._next(), WriteItemType.BYTE_IO), lambda: value)
        return entry

    def add_box(
        self,
        offset: Sequence[int],
        shape: Sequence[int],
        dtype: torch.dtype,
        make: Callable[[], Tensor],
    ) -> PieceEntry:
        """Add the box of a tensor that begins at ``offset``; ``make`` computes its values."""
        chunk = ChunkStorageMetadata(Size(offset), Size(shape))
        data = TensorWriteData(chunk, TensorProperties(dtype), Size(shape))
        entry = cast(PieceEntry, {"offset": list(offset), "shape": list(shape)})
        self._add(entry, WriteItem(self._next(), WriteItemType.TENSOR, tensor_data=data), make)
        return entry

    def _next(self) -> MetadataIndex:
        return MetadataIndex(str(len(self._items)))

    def _add(
        self, entry: PlaceEntry | PieceEntry, item: WriteItem, make: Callable[[], object]
    ) -> None:
        self._items.append(item)
        self._values.append(make)
        self._entries.append(entry)

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        fault_point("save.tensor", step=self._step)
        value = self._values[int(write_item.index.fqn)]()
        data = write_item.tensor_data
        if data is not None and isinstance(value, Tensor):
            return compact(value.to(data.properties.dtype).reshape(data.size))
        buffer = BytesIO()
        write_archive(buffer, value)
        return buffer

    def write(self) -> dict[str, FileEntry]:
        """Write and fsync the file; return its manifest entry.  Raises OSError.

        The entry has the size but no checksum of the contents: each torch.save archive has its own.
        """
        plan = SavePlan(self._items, storage_data=_StoragePrefix(self._prefix))
        with full_disk_errors():
            results = _Writer(self._folder).write_data(plan, self).wait()
        for result in results:
            place, entry = result.storage_data, self._entries[int(result.index.fqn)]
            entry["file"] = place.relative_path
            entry["start"] = place.offset
            entry["num_bytes"] = place.length
        name = f"{self._prefix}0.distcp"
        fault_point("save.before_fsync", step=self._step)
        with open(self._folder / name, "rb") as file:
            os.fsync(file.fileno())
            return {name: FileEntry(os.fstat(file.fileno()).st_size, 0, 0)}


class _Writer(FileSystemWriter):
    """Writer of values that are on the host; it syncs no file, as torch syncs before it flushes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)

    def storage_meta(self) -> StorageMeta:
        """Return no path and no random id, which torch would store in ``.metadata``."""
        return StorageMeta()


def write_metadata(
    folder: Path,
    tensors: Mapping[str, TensorEntry],
    objects: Mapping[str, PlaceEntry],
    *,
    paths: Mapping[str, tuple[object, ...]] | None = None,
    unflattened: Mapping[str, tuple[int, ...]] | None = None,
) -> FileEntry:
    """Write and fsync ``.metadata``.

    ``paths``: path of a key in the nested dictionaries.  ``unflattened``: original shapes of
    flattened tensors (`torch_dist`), None for a plain torch checkpoint.
    """
    metadata = Metadata({}, planner_data=paths)
    results: list[WriteResult] = []

    def add_place(index: MetadataIndex, place: PlaceEntry) -> None:
        info = _StorageInfo(place["file"], place["start"], place["num_bytes"])
        results.append(WriteResult(index, place["num_bytes"], info))

    for key, entry in tensors.items():
        chunks = [
            ChunkStorageMetadata(Size(piece["offset"]), Size(piece["shape"]))
            for piece in entry["pieces"]
        ]
        properties = TensorProperties(getattr(torch, entry["dtype"]))
        metadata.state_dict_metadata[key] = TensorStorageMetadata(
            properties, Size(entry["shape"]), chunks
        )
        for piece in entry["pieces"]:
            add_place(MetadataIndex(key, piece["offset"]), piece)
    for key, place in objects.items():
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        add_place(MetadataIndex(key), place)
    if unflattened is not None:
        vars(metadata)["mcore_data"] = {
            key: {"nd_reformulated_orig_global_shape": unflattened[key]}
            if key in unflattened
            else {}
            for key in tensors
        }
    _Writer(folder).finish(metadata, [results])
    return adopt_file(folder / METADATA)


_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# Matrices of Megatron-LM that may have an `_extra_state` entry.
_MATRIX = re.compile(r"((?:\w+coder|mtp)\.layers\..*\b(?:linear_\w+|\w+_proj))\.weight(?:\.z)?$")


def write_stacked_tensors(rank_save: RankSave) -> RankReport:
    """Write and fsync the file of one rank.  Not collective.  Raises OSError."""
    arguments = rank_save.arguments
    rank_state = rank_save.contents.rank_state
    file = DcpFile(rank_save.folder, rank_save.rank, rank_save.iteration)
    report = RankReport()
    for tensor in (part for whole in rank_save.tensors for part in _in_blocks(whole, arguments)):
        key, stack = _reference_key(tensor.key, arguments)
        is_plain = not stack and len(tensor.global_shape) < 2  # flat ranges of a vector are boxes
        is_flat = tensor.is_flat and key.startswith(STATE_PREFIX) and not is_plain
        found = report.tensors.get(key)
        entry: TensorEntry = {
            "shape": list(tensor.global_shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "pieces": [] if found is None else found["pieces"],
            "cut": list(tensor.sharding) if is_flat else None,
            "num_stacked": len(stack),
        }
        report.tensors[key] = entry
        for offset, shape, make in _split_at_shards(tensor):
            front = stack
            if is_flat:
                front += tuple(o // n for o, n in zip(offset, _shard_shape(tensor), strict=True))
                offset, shape = (_start_in_shard(offset, tensor),), (prod(shape),)
            box = [*front, *offset], (1,) * len(front) + shape
            entry["pieces"].append(file.add_box(*box, tensor.dtype, make))
    if rank_state is not None and RNG_STATE in rank_state:
        state = [[reference_rng(rank_state[RNG_STATE])]]
        report.objects[f"{RNG_STATE}/{rank_save.rank}"] = file.add(state)
    if rank_state is not None and RERUN_STATE in rank_state:
        shard = f"{RERUN_SHARDS}/shard_{rank_save.rank}_{int(arguments['world_size'])}"
        report.objects[shard] = file.add([reference_rerun(rank_state[RERUN_STATE])])
    report.files.update(file.write())
    return report


def write_common_stacked(
    folder: Path, reports: Sequence[RankReport], common: Common
) -> dict[str, FileEntry]:
    """Write and fsync the values common to all ranks: ``.metadata``, common.pt, metadata.json."""
    tensors = merge_tensors(report.tensors for report in reports)
    states = {key: place for report in reports for key, place in report.objects.items()}
    objects = {shard: states[key] for key, shard in _rng_shards(common).items() if key in states}
    reruns = {key: place for key, place in states.items() if key.startswith(RERUN_SHARDS)}
    objects |= reruns
    unflattened: dict[str, tuple[int, ...]] = {}
    matrices: dict[str, list[int]] = {}  # matrix -> numbers of stacked layers and experts
    for key, entry in tensors.items():
        counts = [
            1 + max(piece["offset"][dim] for piece in entry["pieces"])
            for dim in range(entry["num_stacked"])
        ]
        own = entry["shape"]
        entry["shape"] = [*counts, *own]
        if found := _MATRIX.match(key):
            matrices[found[1]] = counts
        if entry["cut"] is not None:
            unflattened[key] = tuple(entry["shape"])
            entry["shape"] = _flat_shape(counts, own, entry["cut"])
        check_written_once(key, entry)
    extra = DcpFile(folder, len(reports), common["iteration"])
    for matrix, counts in matrices.items():
        shape = ".".join(map(str, counts or [1]))
        for place in product(*map(range, counts or [1])):
            shard = f"_extra_state/shard_{'.'.join(map(str, place))}_{shape}"
            objects[f"{matrix}.{shard}"] = extra.add([None])
    write_archive(folder / COMMON_FILE, _common_file(common, has_reruns=bool(reruns)))
    files = extra.write()
    return {
        **files,
        METADATA: write_metadata(folder, tensors, objects, unflattened=unflattened),
        COMMON_FILE: adopt_file(folder / COMMON_FILE),
        MANIFEST: write_text(folder / MANIFEST, json.dumps(_BACKENDS)),
    }


TORCH_DIST = Format("torch_dist", write_stacked_tensors, write_common_stacked, is_foreign=True)


def _common_file(common: Common, *, has_reruns: bool) -> StateDict:
    values = reference_values(common)
    if has_reruns:
        values[RERUN_STATE] = reference_mode()
    content: StateDict = {"chained_optim_avoid_prefix": True, "singleton_local_shards": False}
    if common.get("optimizer") is not None:
        values["optimizer"] = _optimizer(common)
        if is_distributed(common):
            content["distrib_optim_sharding_type"] = "fully_sharded_model_space"
    return values | {"content_metadata": content}


def _optimizer(common: Common) -> Mapping[int, StateDict] | StateDict:
    """Return the optimizer's entry; two, by number, if experts have a separate optimizer."""
    if has_two_optimizers(common):
        return {n: _one_optimizer(common, is_expert=bool(n)) for n in range(2)}
    return _one_optimizer(common)


def _one_optimizer(common: Common, *, is_expert: bool | None = None) -> StateDict:
    groups = param_groups(common, with_step=is_distributed(common), is_expert=is_expert)
    if is_distributed(common):
        kind = {"param_state_sharding_type": "fully_sharded_model_space"}
        return {"optimizer": {"param_groups": groups}, **grad_scaler(common), **kind}
    step = Tensor([common["optimizer"]["step"]])[0]
    inner = {"state": {"common_step": step}, "param_groups": groups}
    return {"optimizer": inner, **grad_scaler(common)} if is_half(common) else inner


def _rng_shards(common: Common) -> dict[str, str]:
    """Map the key of a rank's random states to Megatron-LM's, for one rank of each (pp, tp)."""
    layout = layout_of(common["args"])
    if not layout:
        return {}
    grid = RankGrid(dict(layout["dense"]))
    pp, tp = grid.sizes["pp"], grid.sizes["tp"]
    return {
        f"{RNG_STATE}/{grid.rank(**{**dict.fromkeys(grid.sizes, 0), 'pp': p, 'tp': t})}": (
            f"{RNG_STATE}/shard_{p}.{t}_{pp}.{tp}"
        )
        for p in range(pp)
        for t in range(tp)
    }


def _in_blocks(tensor: ShardedTensor, arguments: Arguments) -> Iterator[ShardedTensor]:
    """Yield one tensor for each block of a mixer tensor; other tensors unchanged."""
    blocks = blocks_of(split_state(tensor.key)[1], arguments)
    if not blocks:
        yield tensor
        return
    parts = split_rows(tensor, list(blocks.values()))
    for block, part in zip(blocks, parts, strict=True):
        sharding = (0, tensor.sharding[1] // len(blocks))
        yield replace(part, key=f"{tensor.key}.{block}", sharding=sharding)


def _reference_key(key: str, arguments: Arguments) -> tuple[str, tuple[int, ...]]:
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
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Callable[[], Tensor]]]:
    """Yield offset, shape and values of the pieces, split so that none crosses a shard boundary."""
    dim, num_shards = tensor.sharding
    for piece in tensor.pieces:
        if not tensor.global_shape:
            yield (), (), partial(getattr, piece, "data")
            continue
        shard_size = tensor.global_shape[dim] // num_shards
        begin, end = piece.offset[dim], piece.offset[dim] + piece.shape[dim]
        while begin < end:
            stop = min(end, (begin // shard_size + 1) * shard_size)
            offset, shape = (
                (*box[:dim], value, *box[dim + 1 :])
                for box, value in ((piece.offset, begin), (piece.shape, stop - begin))
            )
            first = begin - piece.offset[dim]
            yield offset, shape, partial(_rows, piece, dim, first, stop - begin)
            begin = stop


def _rows(piece: Piece | LazyPiece, dim: int, first: int, count: int) -> Tensor:
    return piece.data.narrow(dim, first, count)


def _shard_shape(tensor: ShardedTensor) -> list[int]:
    dim, num_shards = tensor.sharding
    return [n // num_shards if d == dim else n for d, n in enumerate(tensor.global_shape)]


def _start_in_shard(offset: tuple[int, ...], tensor: ShardedTensor) -> int:
    """Return the index of the element at ``offset`` in the flattened shard."""
    shape = _shard_shape(tensor)
    return sum(
        o % n * prod(shape[d + 1 :]) for d, (o, n) in enumerate(zip(offset, shape, strict=True))
    )


def _flat_shape(stacked: list[int], own: list[int], cut: list[int]) -> list[int]:
    """Return the stored shape [X/x, Y/y, x*y] of a tensor [X, Y] with shards [x, y].

    The dimensions of stacked layers and experts come first.
    """
    dim, num_shards = cut
    counts = [num_shards if d == dim else 1 for d in range(len(own))]
    return [*stacked, *counts, prod(own) // num_shards]


_HALVES = ("_w", "_v")


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
        has_halves = in_halves and sharding_of(
            split_state(tensor.key)[1], rank_save.arguments
        ).blocks == (1, 1)
        parts = iter([tensor])
        if has_halves:
            parts = split_rows(tensor, [tensor.global_shape[0] // 2] * 2)
        for suffix, part in zip(_HALVES if has_halves else ("",), parts, strict=True):
            report.tensors[tensor.key + suffix] = {
                "shape": list(part.global_shape),
                "dtype": str(part.dtype).removeprefix("torch."),
                "pieces": [
                    file.add_box(p.offset, p.shape, part.dtype, partial(getattr, p, "data"))
                    for p in part.pieces
                ],
            }
    report.objects.update(rank_save.contents.rank_state or {})
    report.files.update(file.write())
    return report


def write_common_state(
    folder: Path,
    reports: Sequence[RankReport],
    common: Common,
    *,
    state_dict: Callable[[Mapping[str, TensorEntry], Common], StateDict],
) -> dict[str, FileEntry]:
    """Write and fsync the values common to all ranks, and ``.metadata``."""
    stored = merge_tensors(report.tensors for report in reports)
    states = [report.objects[RNG_STATE] for report in reports if RNG_STATE in report.objects]
    for key, entry in stored.items():
        check_written_once(key, entry)
    state = state_dict(stored, common)
    if states:
        state[RNG_STATE] = list(map(reference_rng, states))
    reruns = [report.objects.get(RERUN_STATE) for report in reports]
    if any(reruns):
        state[RERUN_STATE] = json.dumps(reruns)
    extra = DcpFile(folder, len(reports), common["iteration"])
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, PlaceEntry] = {}
    paths: dict[str, tuple[object, ...]] = {}
    for name, path, leaf in _flatten(state):
        paths[name] = path
        if isinstance(leaf, _Stored):
            tensors[name] = stored[leaf.key]
        elif isinstance(leaf, Tensor):
            whole = [0] * leaf.dim(), leaf.shape
            piece = extra.add_box(*whole, leaf.dtype, partial(torch.clone, leaf))
            dtype = str(leaf.dtype).removeprefix("torch.")
            tensors[name] = {"shape": list(leaf.shape), "dtype": dtype, "pieces": [piece]}
        else:
            objects[name] = extra.add(leaf)
    files = extra.write()
    return {**files, METADATA: write_metadata(folder, tensors, objects, paths=paths)}


def _by_name(stored: Mapping[str, TensorEntry], common: Common) -> StateDict:
    """Return the nested state dict of ``fsdp_dtensor``, with `_Stored` for the ranks' tensors."""
    arguments = common["args"]
    every = range(int(arguments.get("num_experts") or 0))
    weights = {name.removesuffix("_w").removesuffix("_v") for name in stored}
    names = [
        (local + suffix, name + suffix)
        for local, name in ordered_names(weights, arguments, experts=every)
        for suffix in ("", *_HALVES)
        if name and name + suffix in stored
    ]
    state = reference_values(common)
    state["model"] = {f"module.{local}": _Stored(name) for local, name in names}
    if common.get("optimizer") is None:
        return state
    step = torch.tensor(float(common["optimizer"]["step"]))
    groups = {
        (float(group["wd_mult"]), bool(group["is_decoupled_lr"])): group
        for group in param_groups(common, with_step=False)
    }
    of_param: dict[str, dict[str, Tensor | _Stored]] = {}
    meta: dict[str, StateDict] = {}
    for local, name in names:
        if is_buffer(name):
            continue
        inside = f"module.module.module.{local}"
        keys = {kind: f"{STATE_PREFIX}{kind}.{name}" for kind in _KINDS}
        found = {_KINDS[kind]: _Stored(key) for kind, key in keys.items() if key in stored}
        of_param[inside] = {"step": step, **found}
        meta[inside] = groups[group_of(name, len(stored[name]["shape"]), arguments)]
    inner = {"state": of_param, "param_to_group_meta": meta}
    state["optimizer"] = {**inner, **grad_scaler(common)}
    return state


_KINDS = {
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "momentum_buffer": "momentum_buffer",
    "fp32_param": "master_param",
}


def _numbered(stored: Mapping[str, TensorEntry], common: Common) -> StateDict:
    """Return the nested state dict of ``torch_dcp``, with `_Stored` for the ranks' tensors."""
    arguments = common["args"]
    every = range(int(arguments.get("num_experts") or 0))
    names = [pair for pair in ordered_names(stored, arguments, experts=every) if pair[1]]
    state = reference_values(common)
    state["model"] = {local: _Stored(name) for local, name in names}
    if common.get("optimizer") is None:
        return state
    shapes = [(name, len(stored[name]["shape"])) for _, name in names if not is_buffer(name)]
    kinds = {key.removeprefix(STATE_PREFIX).split(".")[0] for key in stored if split_state(key)[0]}
    state["optimizer"] = numbered_optimizer(
        common,
        shapes,
        kinds - {"fp32_param"},
        lambda kind, name: _Stored(f"{STATE_PREFIX}{kind}.{name}"),
    )
    return state


TORCH_DCP = Format(
    "torch_dcp",
    write_state_dict,
    partial(write_common_state, state_dict=_numbered),
    is_foreign=True,
)
FSDP_DTENSOR = Format(
    "fsdp_dtensor",
    partial(write_state_dict, in_halves=True),
    partial(write_common_state, state_dict=_by_name),
    is_foreign=True,
)


def _flatten(
    tree: object, path: tuple[object, ...] = ()
) -> Iterator[tuple[str, tuple[object, ...], object]]:
    """Yield (key, path, leaf) as torch flattens: lists and tuples of plain values are leaves."""
    if isinstance(tree, Mapping):
        steps: list[tuple[object, object]] = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list) and any(isinstance(v, Mapping | list | _Stored) for v in tree):
        steps = list(enumerate(tree))
    else:
        yield ".".join(map(str, path)), path, tree
        return
    for step, value in steps:
        yield from _flatten(value, (*path, step))
