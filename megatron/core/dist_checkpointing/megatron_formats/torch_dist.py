"""Format ``torch_dist``, as Megatron-LM core_v0.14 reads and writes it.

PyTorch distributed checkpoint files, common.pt and metadata.json.

Equal tensors of all layers are stacked, with the layer as first dimension, unless the layers
differ; those of all experts of a layer likewise, by expert number.  A distributed optimizer saves
each rank's range of a flattened shard: a tensor of shape [X, Y] with shards [x, y] is stored with
shape [X/x, Y/y, x*y], and its original shape is stored in the index.  Vocabulary padding is
written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.config.value_types import Arguments, JsonObject, StateDict, Unpickled
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
    TensorEntry,
    adopt_file,
    parsing,
    write_text,
)
from megatron.core.dist_checkpointing.mapping import ShardedTensor, split_rows
from megatron.core.dist_checkpointing.megatron_formats.archive import (
    ArrayView,
    load_archive,
    write_archive,
)
from megatron.core.dist_checkpointing.megatron_formats.bucket_space import is_bucket, read_buckets
from megatron.core.dist_checkpointing.megatron_formats.dcp import (
    DcpFile,
    DcpIndex,
    DcpTensor,
    ForeignPiece,
    write_metadata,
)
from megatron.core.dist_checkpointing.megatron_formats.foreign_reader import (
    STATE_PREFIX,
    ForeignReader,
    check_args,
    degree,
    layout_of,
    span_of,
)
from megatron.core.dist_checkpointing.megatron_formats.names import (
    OUTPUT,
    blocks_of,
    fused_name,
    is_buffer,
    layers_are_alike,
    ordered_names,
    our_name,
    sharding_of,
    split_block,
    split_expert,
    split_layer,
    split_stack,
    split_state,
)
from megatron.core.dist_checkpointing.megatron_formats.optimizer_order import optimizer_state
from megatron.core.dist_checkpointing.megatron_formats.reference_values import (
    RERUN_SHARDS,
    grad_scaler,
    has_two_optimizers,
    is_distributed,
    is_half,
    param_groups,
    reference_mode,
    reference_rerun,
    reference_rng,
    reference_values,
    rerun_state_of,
)
from megatron.core.dist_checkpointing.validation import AMAX_HISTORY
from megatron.core.parallel.rank_grid import RankGrid
from megatron.core.params.param_info import flat_boxes

_GATHERED = re.compile(r"(?:chained_0\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.param_state/")
_EXPERTS = re.compile(r"\.experts\.experts\.(?!\d)")
_Weights = Mapping[str, tuple[torch.dtype, Sequence[ForeignPiece]]]
_HALVES = {"_w": 0, "_v": 1}  # suffixes of the two halves of a gated layer, if saved separately


class TorchDistReader(ForeignReader):
    """Reader of a checkpoint in format torch_dist."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.values = load_archive(self._map(folder / COMMON_FILE))
        if not isinstance(self.values, dict):
            raise CheckpointDamaged(f"{folder / COMMON_FILE} is damaged: it holds no dictionary")
        self._index = DcpIndex(folder, self._map)
        with parsing(folder / COMMON_FILE):
            check_args(self.args)
        with parsing(folder / METADATA):
            for key, tensor in self._index.tensors.items():
                if is_bucket(key):
                    continue
                for name, piece in _pieces(key, tensor, self.args):
                    self._add(name, tensor.dtype, piece)
            self._add_gathered()
            self._finish()

    def _add_gathered(self) -> None:
        """Add optimizer state stored in flat buffers.

        It is an object that the first data-parallel rank gathered, or one tensor per bucket.
        """
        weights = {key: found for key, found in self._found.items() if not split_state(key)[0]}
        for key in sorted(self._index.objects):
            if key.startswith("chained_1.") and ".param_state/" in key:
                raise CheckpointError(
                    f"{self.folder}: {key} is the state of experts, gathered by their first "
                    "replica, which is not read; --no-load-optim does without"
                )
            if found := _GATHERED.match(key):
                (buffers,) = self._index.object(key)
                self._add_buffers(key, int(found[1]), buffers, weights)
        for group, buffers in read_buckets(self._index):
            self._add_buffers(f"its dp_group_idx_{group}", group, buffers, weights)

    def _add_buffers(self, what: str, group: int, buffers: Unpickled, weights: _Weights) -> None:
        """Add the optimizer buffers of one tensor-parallel rank of one pipeline stage."""
        stage, rank = divmod(group, degree(self.args, "tensor"))
        chunks = self._params_of(stage, weights)
        what = f"{self.folder}: {what}"
        for kind, name, array in optimizer_state(what, {}, buffers, chunks, self.args, stage):
            self._place(f"{STATE_PREFIX}{kind}.", name, rank, array)

    def _params_of(self, stage: int, weights: _Weights) -> Iterator[Iterator[tuple[str, _Share]]]:
        """Yield, for each model chunk of a stage, each parameter and the shard of a rank."""
        tp, pp = degree(self.args, "tensor"), degree(self.args, "pipeline")
        num_stages = pp * int(self.args.get("virtual_pipeline_model_parallel_size") or 1)
        size = int(self.args["num_layers"]) // num_stages
        for virtual in range(stage, num_stages, pp):
            names = ordered_names(
                weights,
                self.args,
                experts=range(0 if degree(self.args, "expert") > 1 else len(weights)),
                layers=range(virtual * size, (virtual + 1) * size),
                is_first=virtual == 0,
                is_last=virtual == num_stages - 1,
            )
            yield (
                (OUTPUT if local == OUTPUT else name, _share(weights[name], self._cut(name), tp))
                for local, name in names
                if name and not is_buffer(name)
            )

    def _cut(self, name: str) -> int | None:
        return sharding_of(name, self.args).dim

    def _rng_state(self, rank: int) -> Unpickled | None:
        at, sizes = self._coordinate(rank), dict(self.manifest.layout["dense"])
        key = f"rng_state/shard_{at['pp']}.{at['tp']}_{sizes['pp']}.{sizes['tp']}"
        if key not in self._index.objects:
            return None
        (states,) = self._index.object(key)  # every object is stored in a list
        return states[at["dp"] % len(states)]

    def _rerun_state(self, rank: int) -> JsonObject | None:
        key = f"{RERUN_SHARDS}/shard_{rank}_{self.manifest.layout['world_size']}"
        return rerun_state_of(self._index.object(key)[0]) if key in self._index.objects else None


class _Share(NamedTuple):
    """Shape and dtype of a tensor-parallel rank's shard of a parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _share(found: tuple[torch.dtype, Sequence[ForeignPiece]], dim: int | None, tp: int) -> _Share:
    dtype, pieces = found
    shape = list(span_of(pieces))
    if dim is not None:
        shape[dim] //= tp
    return _Share(tuple(shape), dtype)


def _pieces(
    key: str, tensor: DcpTensor, arguments: Arguments
) -> Iterator[tuple[str, ForeignPiece]]:
    """Yield the boxes of a stored tensor with our keys, one per layer and expert."""
    prefix, name = split_state(key)
    half = _HALVES.get(name[-2:])
    name, block = split_block(name if half is None else name[:-2])
    pattern, dims = _numbered(name)
    first = 0  # first row of the stored part in the complete tensor
    if half:
        first = (tensor.unflattened or tensor.shape)[dims]
    elif block:
        blocks = blocks_of(name, arguments)
        first = sum(list(blocks.values())[: list(blocks).index(block)])
    for chunk in tensor.chunks:
        for box in _boxes(tensor, chunk):
            offset = box.offset
            if first:
                offset = (*offset[:dims], offset[dims] + first, *offset[dims + 1 :])
            for place in product(*map(range, box.shape[:dims])):
                numbers = map(sum, zip(place, offset, strict=False))
                own = our_name(_with_numbers(pattern, numbers))
                array = partial(_entry, box.array, place)
                yield prefix + own, ForeignPiece(offset[dims:], box.shape[dims:], array)


def _numbered(name: str) -> tuple[str, int]:
    """Return the name with {} for stacked layer and expert numbers, and how many there are.

    >>> _numbered("decoder.layers.mlp.experts.experts.linear_fc1.weight")
    ('decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc1.weight', 2)
    """
    if "{}" in name:
        raise CheckpointDamaged(f"{METADATA} is damaged: {name} is no name of a tensor")
    if stack := split_stack(name):
        name = f"{stack[0]}.{{}}.{stack[1]}"
    name = _EXPERTS.sub(".experts.local_experts.{}.", name)
    return name, name.count("{}")


def _with_numbers(pattern: str, numbers: Iterable[int]) -> str:
    """Fill the {} of ``pattern``.  Not with str.format: the other text comes from a file."""
    first, *others = pattern.split("{}")
    return first + "".join(f"{number}{text}" for number, text in zip(numbers, others, strict=True))


def _boxes(tensor: DcpTensor, chunk: ForeignPiece) -> Iterator[ForeignPiece]:
    """Yield the boxes of the original (unflattened) tensor that a chunk contains."""
    if tensor.unflattened is None:
        yield chunk
        return
    shard_shape = tuple(
        n // count for n, count in zip(tensor.unflattened, tensor.shape, strict=False)
    )
    first = tuple(i * n for i, n in zip(chunk.offset, shard_shape, strict=False))
    begin = chunk.offset[-1]
    done = 0
    for offset, shape in flat_boxes(shard_shape, begin, begin + chunk.shape[-1]):
        moved = tuple(map(sum, zip(first, offset, strict=True)))
        yield ForeignPiece(moved, shape, partial(_stretch, chunk.array, done, shape))
        done += prod(shape)


def _entry(array: Callable[[], ArrayView], place: tuple[int, ...]) -> ArrayView:
    found = array()
    for index in place:
        found = found.select(index)
    return found


def _stretch(array: Callable[[], ArrayView], begin: int, shape: tuple[int, ...]) -> ArrayView:
    return array().flat(begin, shape)


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
        for offset, values in _split_at_shards(tensor):
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


def _split_at_shards(tensor: ShardedTensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
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
