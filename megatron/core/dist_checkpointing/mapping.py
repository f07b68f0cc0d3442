"""Which part of which tensor a rank holds, without a word about the layout it came from.

A tensor of the model or the optimizer has a layout-free key and a global shape.  A rank holds
boxes of it: a box is an offset in the global tensor and a view of the rank's memory.  The same
records serve both ways: saving reads the views, loading fills them.  Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron.core.param_info import ParamInfo
from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True, eq=False)
class Piece:
    """A box of a tensor: ``data`` is a view whose first element lies at ``offset``."""

    offset: tuple[int, ...]
    data: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of the box, the same in local and in global coordinates."""
        return tuple(self.data.shape)


@dataclass(frozen=True)
class Replica:
    """This rank's number among the ranks that hold the same pieces.

    ``among`` names the group; records with equal ``among`` and ``count`` come in the same order
    on all its members, so that each can tell by itself who writes what.
    """

    index: int = 0
    count: int = 1
    among: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedTensor:
    """What this rank holds of one tensor.  ``replica`` is None if another rank always writes it."""

    key: str
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    replica: Replica | None = Replica()

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's pieces; vocabulary padding is not among them."""
        return sum(piece.data.numel() for piece in self.pieces) * self.dtype.itemsize


def from_param(
    key: str, info: ParamInfo, tensor: Tensor, replica: Replica | None = Replica()
) -> ShardedTensor:
    """Record a tensor with the shape of the parameter that ``info`` describes (or a moment of it).

    ``tensor``: the rank's share; rows of vocabulary padding are left out of the pieces.
    """
    shape = tuple(tensor.shape)
    _check_shape(key, info, shape)
    origin = (0,) * len(shape)
    pieces = _globalize(info, shape, origin, tensor.detach())
    return ShardedTensor(
        key=key,
        global_shape=tuple(info.global_shape),
        dtype=tensor.dtype,
        pieces=tuple(pieces),
        replica=replica,
    )


def from_flat_range(
    key: str, info: ParamInfo, local_shape: Sequence[int], start: int, flat: Tensor
) -> ShardedTensor:
    """Record elements ``[start, start + len(flat))`` of the rank's share, flattened row by row.

    This is what one rank of a distributed optimizer owns of a parameter of ``local_shape``.
    """
    shape = tuple(local_shape)
    _check_shape(key, info, shape)
    pieces: list[Piece] = []
    done = 0
    for offset, box in flat_boxes(shape, start, start + flat.numel()):
        view = flat.detach()[done : done + prod(box)].view(box)
        done += prod(box)
        pieces += _globalize(info, shape, offset, view)
    return ShardedTensor(
        key=key, global_shape=tuple(info.global_shape), dtype=flat.dtype, pieces=tuple(pieces)
    )


def flat_boxes(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut flat elements [start, stop) of a row-major tensor into boxes (offset, extent), in order.

    >>> list(flat_boxes((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first_whole, end_whole = -(-start // row), stop // row

    def part_of_row(
        r: int, begin: int, end: int
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        for offset, box in flat_boxes(shape[1:], begin - r * row, end - r * row):
            yield (r, *offset), (1, *box)

    if first_whole > end_whole:  # begins and ends inside one row
        yield from part_of_row(end_whole, start, stop)
        return
    if start < first_whole * row:
        yield from part_of_row(first_whole - 1, start, first_whole * row)
    if first_whole < end_whole:
        offset = (first_whole, *(0 for _ in shape[1:]))
        yield offset, (end_whole - first_whole, *shape[1:])
    if stop > end_whole * row:
        yield from part_of_row(end_whole, end_whole * row, stop)


def replica_of(info: ParamInfo, groups: ProcessGroupCollection) -> Replica | None:
    """Who else holds the values of a parameter: the ranks that reduce its gradient together.

    None where another tensor-parallel rank, or the owner of a shared embedding, writes it.
    """
    tp_group = groups.expt_tp if info.is_expert else groups.tp
    if info.is_duplicate or (info.counts_once_per_tp_group and tp_group.rank() > 0):
        return None
    group = groups.expt_dp if info.is_expert else groups.dp_cp
    return Replica(group.rank(), group.size(), "expt_dp" if info.is_expert else "dp_cp")


def to_write(tensors: Iterable[ShardedTensor], share_work: bool = True) -> list[ShardedTensor]:
    """The records this rank writes: each held by one writer, none twice.

    With ``share_work`` the replicas take turns, largest tensors first, each time the replica that
    has the fewest bytes; all of them compute the same, so nothing is said.  Else replica 0 writes.
    """
    loads: dict[tuple[str, int], list[int]] = {}
    mine: list[ShardedTensor] = []
    ordered = sorted(tensors, key=lambda t: (-t.num_bytes, t.key)) if share_work else tensors
    for tensor in ordered:
        if tensor.replica is None:
            continue
        replica = tensor.replica
        load = loads.setdefault((replica.among, replica.count), [0] * replica.count)
        writer = load.index(min(load)) if share_work else 0
        load[writer] += tensor.num_bytes
        if writer == replica.index:
            mine.append(tensor)
    return sorted(mine, key=lambda t: t.key)


def _globalize(
    info: ParamInfo, local_shape: tuple[int, ...], offset: tuple[int, ...], view: Tensor
) -> Iterator[Piece]:
    """Pieces of ``view``, a box at ``offset`` of the local share: one per block it touches."""
    if not local_shape:
        yield Piece((), view)
        return
    dim = 0 if info.shard_dim is None else info.shard_dim
    begin, end = offset[dim], offset[dim] + view.shape[dim]
    for local, global_ in _joined(info.slices(local_shape)):
        low, high = max(begin, local.start), min(end, local.stop)
        if low < high and view.numel():
            moved = list(offset)
            moved[dim] = global_.start + low - local.start
            yield Piece(tuple(moved), view.narrow(dim, low - begin, high - low))


def _joined(slices: Iterable[tuple[slice, slice]]) -> Iterator[tuple[slice, slice]]:
    """Neighbours both here and in the whole tensor become one: blocks that nobody cuts."""
    held: tuple[slice, slice] | None = None
    for local, global_ in slices:
        if held and (held[0].stop, held[1].stop) == (local.start, global_.start):
            local, global_ = slice(held[0].start, local.stop), slice(held[1].start, global_.stop)
        elif held:
            yield held
        held = (local, global_)
    if held:
        yield held


def _check_shape(key: str, info: ParamInfo, local_shape: tuple[int, ...]) -> None:
    dim = 0 if info.shard_dim is None else info.shard_dim
    same = len(local_shape) == len(info.global_shape) and all(
        local == whole
        for d, (local, whole) in enumerate(zip(local_shape, info.global_shape, strict=True))
        if d != dim
    )
    assert same, f"{key}: a share of shape {local_shape} cannot be cut from {info.global_shape}"
