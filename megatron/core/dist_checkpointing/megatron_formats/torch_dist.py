"""Read the formats in files of torch.distributed.checkpoint, as Megatron-LM core_v0.14 writes them.

Formats ``torch_dcp`` and ``fsdp_dtensor`` are a nested state dict, whose values, including the
command line, are all saved by torch.  Optimizer state is stored by parameter number as in format
``torch``, or by parameter name.

Format ``torch_dist`` has common.pt and metadata.json besides.  Equal tensors of all layers are
stacked, with the layer as first dimension, unless the layers differ; equal tensors of the experts
of a layer are stacked by expert number.  A distributed optimizer saves each rank's range of a
flattened shard: a tensor of shape [X, Y] with shards [x, y] is stored with shape
[X/x, Y/y, x*y], and its original shape is stored in the index.  Vocabulary padding is written.

``fully_sharded_bucket_space``: each bucket of an optimizer's buffer, padding included, is one flat
tensor over the data-parallel ranks:

    {group}gbuf_idx_{b}.dtype_({param dtype}, {grad dtype}).bucket_idx_{n}.{kind}

``group``: ``optimizer.distributed.dp_group_idx_{g}.``; ``kind``: param, exp_avg, exp_avg_sq.  The
object ``{group}per_bucket_numel_unpadded`` is a list with one dictionary for each buffer, from
(param dtype, grad dtype) to the number of elements of each bucket.  No such file of Megatron-LM was
available: the format is inferred from public descriptions of core_v0.14.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, product
from math import prod
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.config.value_types import Arguments, Nested, Shape, StateDict, Unpickled
from megatron.core.dist_checkpointing.manifest import (
    COMMON_FILE,
    METADATA,
    RNG_STATE,
    Layout,
    parsing,
)
from megatron.core.dist_checkpointing.megatron_formats.archive import StoredArray, load_archive
from megatron.core.dist_checkpointing.megatron_formats.dcp_index import (
    DcpIndex,
    DcpTensor,
    ForeignPiece,
)
from megatron.core.dist_checkpointing.megatron_formats.foreign_reader import (
    STATE_PREFIX,
    ForeignReader,
    check_args,
    degree,
    span_of,
)
from megatron.core.dist_checkpointing.megatron_formats.names import (
    OUTPUT,
    blocks_of,
    is_buffer,
    our_name,
    sharding_of,
    split_block,
    split_half,
    split_stack,
    split_state,
    stage_names,
)
from megatron.core.dist_checkpointing.megatron_formats.optimizer_order import State, optimizer_state
from megatron.core.parallel.rank_grid import RankGrid
from megatron.core.params.param_info import flat_boxes

_GROUP = r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\."
_GATHERED = re.compile(_GROUP + r"param_state/")
_BUCKET = re.compile(_GROUP + r"gbuf_idx_(\d+)\.dtype_\((.+)\)\.bucket_idx_(\d+)\.(\w+)")
_SIZES = re.compile(_GROUP + r"per_bucket_numel_unpadded(?:/|$)")
_EXPERTS = re.compile(r"\.experts\.experts\.(?!\d)")
_Weights = Mapping[str, tuple[torch.dtype, Sequence[ForeignPiece]]]


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
                if _BUCKET.fullmatch(key):
                    continue
                for name, piece in pieces_of(key, tensor, self.args):
                    self._add(name, tensor.dtype, piece)
            self._add_gathered()
            self._finish()

    def _add_gathered(self) -> None:
        """Add optimizer state stored in flat buffers.

        It is an object that the first data-parallel rank gathered, or one tensor per bucket.
        """
        weights = {key: found for key, found in self._found.items() if not split_state(key)[0]}
        index = self._index
        buffers: dict[int, Unpickled] = {}
        for key in (*sorted(index.objects), *index.tensors):
            found = _GATHERED.match(key) or _BUCKET.fullmatch(key)
            if found and found[1] == "1":
                raise CheckpointError(
                    f"{self.folder}: {key} is the state of experts, gathered or saved bucket by "
                    "bucket, which is not read; --no-load-optim does without"
                )
            if found and key in index.objects:
                (buffers[int(found[2])],) = index.load(key)  # every object is stored in a list
        for group, stored in (buffers | read_buckets(index)).items():
            stage, rank = divmod(group, degree(self.args, "tensor"))
            what = f"{self.folder}: the optimizer's state of dp_group_idx_{group}"
            chunks = self._params_of(stage, weights)
            for kind, name, array in optimizer_state(what, {}, stored, chunks, self.args, stage):
                self._place(f"{STATE_PREFIX}{kind}.", name, rank, array)

    def _params_of(self, stage: int, weights: _Weights) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Yield, for each model chunk of a stage, each parameter and a rank's shard (no values)."""
        pp = degree(self.args, "pipeline")
        experts = () if degree(self.args, "expert") > 1 else None
        for chunk in range(int(self.args.get("virtual_pipeline_model_parallel_size") or 1)):
            names = stage_names(weights, self.args, chunk * pp + stage, experts=experts)
            yield (
                (OUTPUT if local == OUTPUT else name, self._shard(name, *weights[name]))
                for local, name in names
                if name and not is_buffer(name)
            )

    def _shard(self, name: str, dtype: torch.dtype, pieces: Sequence[ForeignPiece]) -> Tensor:
        whole = torch.empty(span_of(pieces), dtype=dtype, device="meta")
        dim = sharding_of(name, self.args).dim
        return whole if dim is None else whole.chunk(degree(self.args, "tensor"), dim)[0]

    def _rng_state(self, rank: int) -> Unpickled | None:
        key, at = rng_shard(self.manifest.layout, rank)
        if key not in self._index.objects:
            return None
        (states,) = self._index.load(key)
        return states[at["dp"] % len(states)]


def rng_shard(layout: Layout, rank: int) -> tuple[str, dict[str, int]]:
    """Return the key of the random states of a rank, and its coordinate.

    The ranks with the same stage and tensor-parallel rank share a key.
    """
    sizes = dict(layout["dense"])
    at = RankGrid(sizes).coordinate(rank)
    return f"{RNG_STATE}/shard_{at['pp']}.{at['tp']}_{sizes['pp']}.{sizes['tp']}", at


def pieces_of(
    key: str, tensor: DcpTensor, arguments: Arguments
) -> Iterator[tuple[str, ForeignPiece]]:
    """Yield the boxes of a stored tensor with our keys, one per layer and expert."""
    prefix, name = split_state(key)
    name, half = split_half(name)
    name, block = split_block(name)
    pattern, dims = _insert_placeholders(name)
    first = 0  # first row of the stored part in the complete tensor
    if half:
        first = (tensor.unflattened or tensor.shape)[dims]
    elif block:
        blocks = blocks_of(name, arguments)
        first = sum(list(blocks.values())[: list(blocks).index(block)])
    for chunk in tensor.chunks:
        for box in boxes_of(tensor, chunk):
            offset = box.offset
            if first:
                offset = (*offset[:dims], offset[dims] + first, *offset[dims + 1 :])
            for place in product(*map(range, box.shape[:dims])):
                numbers = map(sum, zip(place, offset, strict=False))
                own = our_name(_fill_placeholders(pattern, numbers))
                array = partial(_select, box.array, place)
                yield prefix + own, ForeignPiece(offset[dims:], box.shape[dims:], array)


def _insert_placeholders(name: str) -> tuple[str, int]:
    """Return the name with {} for stacked layer and expert numbers, and how many there are.

    >>> _insert_placeholders("decoder.layers.mlp.experts.experts.linear_fc1.weight")
    ('decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc1.weight', 2)
    """
    if "{}" in name:
        raise CheckpointDamaged(f"{METADATA} is damaged: {name} is no name of a tensor")
    if stack := split_stack(name):
        name = f"{stack[0]}.{{}}.{stack[1]}"
    name = _EXPERTS.sub(".experts.local_experts.{}.", name)
    return name, name.count("{}")


def _fill_placeholders(pattern: str, numbers: Iterable[int]) -> str:
    """Fill the {} of ``pattern``.  Not with str.format: the other text comes from a file."""
    first, *others = pattern.split("{}")
    return first + "".join(f"{number}{text}" for number, text in zip(numbers, others, strict=True))


def boxes_of(tensor: DcpTensor, chunk: ForeignPiece) -> Iterator[ForeignPiece]:
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
        make = partial(lambda array, *place: array().flat(*place), chunk.array, done, shape)
        yield ForeignPiece(moved, shape, make)
        done += prod(shape)


def _select(array: Callable[[], StoredArray], place: Shape) -> StoredArray:
    return array()[place]


def read_buckets(index: DcpIndex) -> dict[int, Unpickled]:
    """Return the buffers of each data-parallel group, as in distrib_optim.pt of format torch."""
    sizes = {int(match[2]): key for key in index.objects if (match := _SIZES.match(key))}
    matches = map(_BUCKET.fullmatch, index.tensors)
    found = sorted(
        (int(match[2]), int(match[3]), match[4], match[6], int(match[5]), match.string)
        for match in matches
        if match
    )
    groups: dict[int, Unpickled] = {}
    for (group, number, dtypes, kind), buckets in groupby(found, key=itemgetter(0, 1, 2, 3)):
        (unpadded,) = index.load(sizes[group])
        by_name = {str(key): (key, lengths) for key, lengths in unpadded[number].items()}
        key, lengths = by_name[f"({dtypes})"]
        buffer = groups.setdefault(group, {}).setdefault(number, {}).setdefault(key, {})
        buffer[kind] = _concatenate([index.tensors[name] for *_, name in buckets], lengths)
    return groups


def _concatenate(buckets: Sequence[DcpTensor], lengths: Sequence[int]) -> StoredArray:
    """Concatenate the buckets, each without its padding."""
    parts = []
    done = 0
    for tensor, length in zip(buckets, lengths, strict=True):
        for chunk in tensor.chunks:
            first = chunk.offset[-1]
            if len(tensor.shape) > 1:
                first += tensor.shape[-1] * chunk.offset[0]
            last = min(first + chunk.shape[-1], length)
            if first < last:
                parts.append((done + first, done + last, chunk.array))
        done += length
    flat = torch.empty(done, dtype=buckets[0].dtype, device="meta")
    return StoredArray(flat, partial(_joined, parts, flat.dtype))


_Parts = Sequence[tuple[int, int, Callable[[], StoredArray]]]  # begin, end, values


def _joined(parts: _Parts, dtype: torch.dtype, offset: int, count: int) -> Tensor:
    """Return the values from ``offset`` of a flat array that is stored in ``parts``."""
    flat, missing = torch.empty(count, dtype=dtype), count
    for begin, end, array in parts:
        low = max(begin, offset)
        high = min(end, offset + count)
        if low < high:
            flat[low - offset : high - offset] = array().flat(low - begin, (high - low,)).read()
            missing -= high - low
    if missing:
        raise CheckpointDamaged(f"{missing} elements of a bucket of the optimizer are missing")
    return flat


# Names of main parameters in the optimizer of --use-megatron-fsdp.
_MAIN = ("param", "master_param", "fp32_param")


class TorchDcpReader(ForeignReader):
    """Reader of a checkpoint in format torch_dcp or fsdp_dtensor."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with parsing(folder / METADATA):
            self._read_index(DcpIndex(folder, self._map))

    def _read_index(self, index: DcpIndex) -> None:
        """Set ``values`` and ``tensors`` from the index."""
        self.values = state = _unflatten(index)
        model = state.get("model")
        if not isinstance(model, Mapping):
            raise CheckpointError(
                f"{self.folder / METADATA} holds no model: it is not a checkpoint of Megatron-LM "
                "in format torch_dcp or fsdp_dtensor"
            )
        check_args(self.args)
        params = [(name, tensor) for name, tensor in model.items() if isinstance(tensor, DcpTensor)]
        for name, tensor in params:
            self._add_tensor("", name, tensor)
        optimizer = state.get("optimizer")
        if isinstance(optimizer, Mapping):
            trained = [param for param in params if not is_buffer(param[0])]
            for kind, name, tensor in self._optimizer_state(optimizer, trained):
                self._add_tensor(f"{STATE_PREFIX}{kind}.", name, tensor)
        self._finish()

    def _rng_state(self, rank: int) -> Unpickled | None:
        """Return the random states of ``rank``, or None.

        Megatron-LM saves only those of rank 0.  Its data-parallel peers use them too; ranks with
        another tensor- or pipeline-parallel rank have none.
        """
        states, world_size = self.values.get("rng_state"), self.manifest.layout["world_size"]
        if not states or rank >= world_size:
            return None
        if len(states) < world_size:
            at = self._coordinate(rank)
            if at["tp"] or at["pp"]:
                return None
            rank = 0
        return _with_arrays(states[rank])

    def _optimizer_state(
        self, optimizer: Unpickled, params: list[tuple[str, DcpTensor]]
    ) -> Iterator[State]:
        by_name = optimizer.get("optimizer", optimizer).get("state", {})
        if not any(isinstance(key, str) for key in by_name):
            what = f"{self.folder}: the optimizer's state"
            yield from optimizer_state(what, optimizer, None, [params], self.args, 0)
            return
        for name, kinds in by_name.items():
            for kind, tensor in kinds.items():
                if kind != "step" and isinstance(tensor, DcpTensor):
                    yield "fp32_param" if kind in _MAIN else kind, name, tensor

    def _add_tensor(self, prefix: str, name: str, tensor: DcpTensor) -> None:
        key = prefix + re.sub(r"^(module\.)+", "", name)
        for our_key, piece in pieces_of(key, tensor, self.args):
            self._add(our_key, tensor.dtype, piece)


def _unflatten(index: DcpIndex) -> StateDict:
    """Rebuild the state dict that was flattened; tensors stay `DcpTensor` records."""
    root: StateDict = {}
    for key in (*index.tensors, *index.objects):
        steps = index.paths.get(key) or key.split(".", 1)
        path = [int(step) if str(step).isdecimal() else step for step in steps]
        at: Nested = root
        for step in path[:-1]:
            at = at.setdefault(step, {})
        at[path[-1]] = index.tensors[key] if key in index.tensors else index.load(key)
    for name in ("args", "iteration", "checkpoint_version", "opt_param_scheduler"):
        if isinstance(root.get(name), DcpTensor):
            root[name] = root[name].chunks[0].array()
    return {name: _dicts_to_lists(value, name) for name, value in root.items()}


def _dicts_to_lists(tree: Nested, name: object) -> Nested:
    """Convert dicts with integer keys, left by flattening, back to lists.

    The ``state`` of an optimizer stays a dict.
    """
    if not isinstance(tree, dict):
        return tree
    items = {key: _dicts_to_lists(value, key) for key, value in tree.items()}
    is_list = items and name != "state" and all(isinstance(key, int) for key in items)
    return [items[key] for key in sorted(items)] if is_list else items


def _with_arrays(tree: Nested) -> Nested:
    if isinstance(tree, DcpTensor):
        return tree.chunks[0].array()  # small, and written by one rank
    if isinstance(tree, Mapping):
        return {key: _with_arrays(value) for key, value in tree.items()}
    return tree
