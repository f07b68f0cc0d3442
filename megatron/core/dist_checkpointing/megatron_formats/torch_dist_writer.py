"""Write format ``torch_dist`` as Megatron-LM core_v0.14 does: its keys, shapes and offsets.

Layers are stacked unless they differ; experts of a layer are stacked too (`names`).  Optimizer
state that a distributed optimizer shards is written as ranges of flattened shards (`torch_dist`).
Vocabulary padding is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path

from torch import Tensor

from megatron.core.config.value_types import Arguments, StateDict
from megatron.core.dist_checkpointing.format import (
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
    TensorEntry,
    adopt_file,
    write_text,
)
from megatron.core.dist_checkpointing.mapping import ShardedTensor, split_rows
from megatron.core.dist_checkpointing.megatron_formats.dcp_writer import DcpFile, write_metadata
from megatron.core.dist_checkpointing.megatron_formats.foreign_reader import STATE_PREFIX, layout_of
from megatron.core.dist_checkpointing.megatron_formats.names import (
    blocks_of,
    fused_name,
    layers_are_alike,
    split_expert,
    split_layer,
    split_state,
)
from megatron.core.dist_checkpointing.megatron_formats.pickler import write_archive
from megatron.core.dist_checkpointing.megatron_formats.reference_values import (
    grad_scaler,
    has_two_optimizers,
    is_distributed,
    is_half,
    param_groups,
    reference_rng,
    reference_values,
)
from megatron.core.dist_checkpointing.megatron_formats.rerun_values import (
    RERUN_SHARDS,
    reference_mode,
    reference_rerun,
)
from megatron.core.dist_checkpointing.validation import AMAX_HISTORY
from megatron.core.parallel.rank_grid import RankGrid

_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_RNG = "rng_state"
# Matrices of Megatron-LM that may have an `_extra_state` entry.
_MATRIX = re.compile(r"((?:\w+coder|mtp)\.layers\..*\b(?:linear_\w+|\w+_proj))\.weight(?:\.z)?$")


def write_rank_files(rank_save: RankSave) -> RankReport:
    """Write and fsync the file of one rank.  Not collective.  Raises OSError."""
    arguments, rank_state = rank_save.arguments, rank_save.rank_state
    file = DcpFile(rank_save.folder, rank_save.rank, 0, rank_save.iteration)
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
        for offset, values in _boxes(tensor):
            front = stack
            values = values.to(tensor.dtype)
            if is_flat:
                front += _shard_index(offset, tensor)
                offset, values = (_start_in_shard(offset, tensor),), values.reshape(-1)
            whole = (1,) * len(front) + tuple(values.shape)
            entry["pieces"].append(file.add_box(values.reshape(whole), [*front, *offset]))
    if rank_state is not None and RNG_STATE in rank_state:
        state = [[reference_rng(rank_state[RNG_STATE])]]
        report.objects[f"{_RNG}/{rank_save.rank}"] = file.add(state)
    if rank_state is not None and RERUN_STATE in rank_state:
        shard = f"{RERUN_SHARDS}/shard_{rank_save.rank}_{int(arguments['world_size'])}"
        report.objects[shard] = file.add([reference_rerun(rank_state[RERUN_STATE])])
    report.files[file.name] = file.close()
    return report


def complete(folder: Path, reports: Sequence[RankReport], common: Common) -> dict[str, FileEntry]:
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
    extra = DcpFile(folder, 0, 1, common["iteration"])
    for matrix, counts in matrices.items():
        shape = ".".join(map(str, counts or [1]))
        for place in product(*map(range, counts or [1])):
            shard = f"_extra_state/shard_{'.'.join(map(str, place))}_{shape}"
            objects[f"{matrix}.{shard}"] = extra.add([None])
    write_archive(folder / COMMON_FILE, _common_file(common, has_reruns=bool(reruns)))
    return {
        extra.name: extra.close(),
        METADATA: write_metadata(folder, tensors, objects, unflattened=unflattened),
        COMMON_FILE: adopt_file(folder / COMMON_FILE),
        MANIFEST: write_text(folder / MANIFEST, json.dumps(_BACKENDS)),
    }


TORCH_DIST = Format("torch_dist", write_rank_files, complete, is_foreign=True)


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
        f"{_RNG}/{grid.rank(**{**dict.fromkeys(grid.sizes, 0), 'pp': p, 'tp': t})}": (
            f"{_RNG}/shard_{p}.{t}_{pp}.{tp}"
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


def _boxes(tensor: ShardedTensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield offset and values of the pieces, split so that none crosses a shard boundary."""
    dim, num_shards = tensor.sharding
    for piece in tensor.pieces:
        if not tensor.global_shape:
            yield (), piece.data
            continue
        shard_size = tensor.global_shape[dim] // num_shards
        begin, end = piece.offset[dim], piece.offset[dim] + piece.shape[dim]
        while begin < end:
            stop = min(end, (begin // shard_size + 1) * shard_size)
            offset = (*piece.offset[:dim], begin, *piece.offset[dim + 1 :])
            yield offset, piece.data.narrow(dim, begin - piece.offset[dim], stop - begin)
            begin = stop


def _shard_shape(tensor: ShardedTensor) -> list[int]:
    dim, num_shards = tensor.sharding
    return [n // num_shards if d == dim else n for d, n in enumerate(tensor.global_shape)]


def _shard_index(offset: tuple[int, ...], tensor: ShardedTensor) -> tuple[int, ...]:
    """Return the index of the shard at ``offset`` along each dimension."""
    return tuple(o // n for o, n in zip(offset, _shard_shape(tensor), strict=True))


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
