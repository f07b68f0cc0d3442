"""Layout-independent records of the tensors that a rank saves or loads.

A tensor of the model or the optimizer has a key and a global shape that do not depend on the
parallel layout.  A rank holds boxes of it: a box is an offset in the global tensor and a view of
the rank's memory.  The same records serve both directions: a save reads the views, a load fills
them.  Nothing in this module communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.config.value_types import Shape
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import ParamInfo

OPTIMIZER_PREFIX = "optimizer."  # key prefix of optimizer state


@dataclass(frozen=True, eq=False)
class Piece:
    """A box of a tensor: ``data`` is a view whose first element has the global index ``offset``."""

    offset: Shape
    data: Tensor

    @property
    def shape(self) -> Shape:
        """Shape of the box, the same in local and in global coordinates."""
        return tuple(self.data.shape)

    def fill(self, read: Callable[[Tensor], object]) -> None:
        """Call ``read(view)``, which writes the values in place."""
        read(self.data)


@dataclass(frozen=True, eq=False)
class LazyPiece:
    """A box whose values ``make`` computes when they are written, to save memory.

    ``put`` stores values that were read; None if the box cannot be loaded.
    """

    offset: Shape
    shape: Shape
    make: Callable[[], Tensor]
    put: Callable[[Tensor], None] | None = None

    @property
    def data(self) -> Tensor:
        """The values, computed at each access."""
        return self.make()

    def fill(self, read: Callable[[Tensor], object]) -> None:
        """Call ``read(buffer)``, which writes the values, and store them with ``put``."""
        assert self.put is not None, "a box of a file that is converted is not loaded"
        values = self.data
        read(values)
        self.put(values)


@dataclass(frozen=True)
class Replica:
    """This rank's index among the ranks that hold the same pieces.

    ``among`` names the group.  Records with equal ``among`` and ``count`` come in the same order on
    all its ranks, so that each rank computes the same assignment without communication.
    """

    index: int = 0
    count: int = 1
    among: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorRecord:
    """This rank's part of one tensor.  ``replica`` is None if another rank always writes it.

    ``dtype`` is that of the file; the pieces may have another one in memory.  ``sharding``:
    sharded dimension and number of shards; ``is_flat``: the rank holds a range of such a shard,
    flattened; ``is_constant``: it is not trained; ``is_buffer``: a forward pass may change it, not
    only the optimizer step.
    """

    key: str
    global_shape: Shape
    dtype: torch.dtype
    pieces: tuple[Piece | LazyPiece, ...]
    replica: Replica | None = Replica()
    sharding: tuple[int, int] = (0, 1)
    is_flat: bool = False
    is_constant: bool = False
    is_buffer: bool = False
    padded_rows: int = 0  # of the first dimension, with this run's vocabulary padding; 0: no rows
    stacked: Shape = ()  # sizes of the leading axes along which layers and experts are stacked
    may_differ: bool = False  # the stored shape may differ; what it lacks is loaded as zero

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's pieces, without vocabulary padding."""
        return sum(prod(piece.shape) for piece in self.pieces) * self.dtype.itemsize


TensorRecords = Sequence[TensorRecord]


def from_param(
    key: str,
    info: ParamInfo,
    tensor: Any,
    replica: Replica | None = Replica(),
    *,
    dtype: torch.dtype | None = None,
    padded: bool = False,
) -> TensorRecord:
    """Return the record of this rank's part of a parameter, or of its optimizer state.

    ``tensor``: a Tensor; or values stored in another form than fp32, such as split or quantized,
    with a ``shape``, ``read()`` that returns all values in fp32, and ``write(values)``.  Rows of
    vocabulary padding are left out of the pieces unless ``padded``.  ``dtype``: the dtype in the
    file, if it differs from that in memory.
    """
    shard_shape = tuple(tensor.shape) if info.part is None else info.part.shape
    dim = info.shard_dim or 0
    with_padding = list(info.global_shape)
    if shard_shape:
        with_padding[dim] = shard_shape[dim] * info.shard_count
    if padded:
        info = replace(info, global_shape=tuple(with_padding))
    return TensorRecord(
        key=key,
        global_shape=tuple(info.global_shape),
        dtype=dtype or (tensor.dtype if isinstance(tensor, Tensor) else torch.float32),
        pieces=tuple(_pieces(info, tensor)),
        replica=replica,
        sharding=(dim, info.shard_count * len(info.blocks)),
        is_flat=info.part is not None,
        padded_rows=with_padding[0] if with_padding else 0,
    )


def _pieces(info: ParamInfo, tensor: Any) -> Iterator[Piece | LazyPiece]:
    """Yield one piece per box: a view, or for values in another form a `LazyPiece`.

    A `LazyPiece` unpacks the complete tensor at each access, so only one is in memory.
    """
    if isinstance(tensor, Tensor):
        yield from (Piece(offset, view) for offset, view in info.pieces(tensor.detach()))
        return

    def box(whole: Tensor, number: int) -> Tensor:
        return [view for _, view in info.pieces(whole)][number]

    def put(number: int, values: Tensor) -> None:
        whole = tensor.read()
        box(whole, number).copy_(values)
        tensor.write(whole)

    for number, (offset, view) in enumerate(info.pieces(torch.empty(tensor.shape, device="meta"))):
        make = partial(lambda n: box(tensor.read(), n), number)
        yield LazyPiece(offset, tuple(view.shape), make, partial(put, number))


def split(tensor: TensorRecord, sizes: Sequence[int], dim: int = 0) -> Iterator[TensorRecord]:
    """Split the record along ``dim`` into consecutive tensors of ``sizes``."""

    def change(shape: Shape, value: int) -> Shape:
        return (*shape[:dim], value, *shape[dim + 1 :])

    first = 0
    for size in sizes:
        pieces: list[Piece | LazyPiece] = []
        for piece in tensor.pieces:
            begin = piece.offset[dim]
            low = max(begin, first)
            high = min(begin + piece.shape[dim], first + size)
            if low < high:
                offset = change(piece.offset, low - first)
                make = partial(_narrow, piece, dim, low - begin, high - low)
                if isinstance(piece, Piece):
                    pieces.append(Piece(offset, make()))
                else:
                    pieces.append(LazyPiece(offset, change(piece.shape, high - low), make))
        yield replace(tensor, global_shape=change(tensor.global_shape, size), pieces=tuple(pieces))
        first += size


def _narrow(piece: Piece | LazyPiece, dim: int, start: int, length: int) -> Tensor:
    return piece.data.narrow(dim, start, length)


def replica_of(info: ParamInfo, groups: ProcessGroupCollection) -> Replica | None:
    """Return this rank's `Replica`: its index among the ranks that hold the same values.

    These are the ranks that reduce its gradient together, or, if they have sharded the parameter,
    the ranks with the same shard.  None if another tensor-parallel rank, or the owner of a shared
    embedding, writes the parameter.
    """
    tp_group = groups.expt_tp if info.is_expert else groups.tp
    if info.is_duplicate or (info.counts_once_per_tp_group and tp_group.rank() > 0):
        return None
    if info.part is not None:
        return Replica(info.part.copy, info.part.num_copies, "part")
    among = "expt_dp" if info.is_expert else "dp_cp"
    group = replica_groups(groups)[among]
    return Replica(group.rank(), group.size(), among)


def replica_groups(groups: ProcessGroupCollection) -> dict[str, ProcessGroup]:
    """Return the groups whose ranks hold the same pieces of a parameter, by `Replica.among`."""
    return {"dp_cp": groups.dp_cp, "expt_dp": groups.expt_dp}


def weights_then_state(tensors: Iterable[TensorRecord]) -> tuple[list[TensorRecord], ...]:
    """Split into tensors of the model and of the optimizer, to be loaded in this order.

    A fully sharded 16-bit weight shares memory with its main parameter, whose values must win.
    """
    weights: list[TensorRecord] = []
    state: list[TensorRecord] = []
    for tensor in tensors:
        (state if tensor.key.startswith(OPTIMIZER_PREFIX) else weights).append(tensor)
    return weights, state


SavePlan = dict[tuple[str, ...], list[int]]  # keys of the tensors -> numbers of those to write


def to_write(
    tensors: TensorRecords, share_work: bool = True, plan: SavePlan | None = None
) -> list[TensorRecord]:
    """Return the records that this rank writes: each has one writer.

    ``share_work``: balance the bytes over the replicas (`assign_replicas`).  Else replica 0 writes.
    ``plan`` keeps the result for saves with the same keys in the same order.
    """
    keys = tuple(tensor.key for tensor in tensors)
    if plan is not None and keys in plan:
        return [tensors[i] for i in plan[keys]]
    if share_work:
        mine = {id(t) for t, replica, owner in assign_replicas(tensors) if owner == replica.index}
    else:
        mine = {id(t) for t in tensors if t.replica is not None and t.replica.index == 0}
    chosen = [i for i, tensor in enumerate(tensors) if id(tensor) in mine]
    chosen.sort(key=keys.__getitem__)
    if plan is not None:
        plan.clear()
        plan[keys] = chosen
    return [tensors[i] for i in chosen]


def assign_replicas(
    tensors: Iterable[TensorRecord],
) -> Iterator[tuple[TensorRecord, Replica, int]]:
    """Yield each record with its replica and the index of the replica that reads or writes it.

    Largest tensors first, each to the replica that has the fewest bytes.  All replicas compute
    the same assignment in the same order, without communication.
    """
    loads: dict[tuple[str, int], list[int]] = {}
    for tensor in sorted(tensors, key=lambda t: (-t.num_bytes, t.key)):
        if (replica := tensor.replica) is None:
            continue
        load = loads.setdefault((replica.among, replica.count), [0] * replica.count)
        owner = load.index(min(load))
        load[owner] += tensor.num_bytes
        yield tensor, replica, owner
