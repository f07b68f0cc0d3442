"""Copy the weights of a training run into an engine on the same ranks, from any layout to any.

Both models describe their parameters by global names and boxes (`ShardedTensor`).  The plan of who
sends which box to whom is the same on all ranks and is computed once.

Order of collectives: construction gathers the descriptions.  `Refit.copy` runs in rounds: a rank
starts all sends and receives of a round, waits for them, and goes on.  Each rank skips the rounds
in which it takes no part.  A rank buffers at most ``buffer_bytes`` in a round.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.config.errors import ConfigError
from megatron.core.dist_checkpointing.mapping import LazyPiece, Piece, ShardedTensor
from megatron.core.parallel.collectives import all_gather_json
from megatron.core.params.param_info import info_of

# Of one tensor on one rank: key, global shape, dtype in memory, and (offset, shape) of its pieces.
_Description: TypeAlias = tuple[str, list[int], str, list[tuple[list[int], list[int]]]]
_SHOWN = 5  # names in an error message


@dataclass(frozen=True)
class _Box:
    """A box of a global tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: _Box) -> _Box | None:
        """Return the common box, or None."""
        ends = [
            (max(a, b), min(a + n, b + m))
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ]
        if any(low >= high for low, high in ends):
            return None
        return _Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))

    def within(self, offset: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the slices of this box in a tensor whose first element is at ``offset``."""
        starts = [a - b for a, b in zip(self.offset, offset, strict=True)]
        return tuple(slice(s, s + n) for s, n in zip(starts, self.shape, strict=True))

    def split(self, most: int) -> Iterator[_Box]:
        """Yield boxes of at most ``most`` elements (at least one) that cover this one."""
        dim = next((d for d, n in enumerate(self.shape) if n > 1), None)
        if dim is None or prod(self.shape) <= most:
            yield self
            return
        step = max(most // prod(self.shape[dim + 1 :]), 1)
        for low in range(0, self.shape[dim], step):
            offset = list(self.offset)
            shape = list(self.shape)
            offset[dim] += low
            shape[dim] = min(step, self.shape[dim] - low)
            yield from _Box(tuple(offset), tuple(shape)).split(most)


@dataclass(frozen=True)
class _Place:
    """One piece of one tensor: indices in the lists of a rank."""

    rank: int
    tensor: int
    piece: int


@dataclass(frozen=True)
class _Transfer:
    source: _Place
    target: _Place
    box: _Box
    dtype: torch.dtype  # of the values that are sent


class Refit:
    """Copies ``sources()`` into the views of ``targets``, whenever `copy` is called.

    ``sources`` returns this rank's records in the same order at each call.  Where ranks hold a
    tensor in several precisions (weights and main parameters), the highest is the source.
    Construction and `copy` are collective over ``group``.  Raises ConfigError on all ranks if the
    sources lack a target.
    """

    def __init__(
        self,
        sources: Callable[[], Sequence[ShardedTensor]],
        targets: Sequence[ShardedTensor],
        group: ProcessGroup,
        *,
        buffer_bytes: int = 2**26,
    ) -> None:
        self._sources = sources
        self._targets = targets
        self._group = group
        every = all_gather_json((_described(sources()), _described(targets)), group)
        held, wanted = ([ranks[i] for ranks in every] for i in (0, 1))
        self._rounds = _my_rounds(_transfers(held, wanted, buffer_bytes), group, buffer_bytes)

    @torch.no_grad()
    def copy(self) -> None:
        """Copy all values.  Collective."""
        sources = self._sources()
        me = self._group.rank()
        for transfers in self._rounds:
            operations: list[dist.P2POp] = []
            arrivals: list[tuple[_Transfer, Tensor]] = []
            for t in transfers:
                if t.source.rank != me:
                    where = _piece(self._targets, t.target).data.device
                    buffer = torch.empty(t.box.shape, dtype=t.dtype, device=where)
                    arrivals.append((t, buffer))
                    operations.append(self._operation(dist.irecv, buffer, t.source.rank))
                    continue
                values = _piece(sources, t.source).data[_slices(sources, t.source, t.box)]
                if t.target.rank == me:
                    self._store(t, values)
                else:
                    buffer = values.to(t.dtype).contiguous()
                    operations.append(self._operation(dist.isend, buffer, t.target.rank))
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
            for t, buffer in arrivals:
                self._store(t, buffer)

    def _operation(
        self, start: Callable[..., dist.Work | None], buffer: Tensor, peer: int
    ) -> dist.P2POp:
        return dist.P2POp(start, buffer, group=self._group, group_peer=peer)

    def _store(self, transfer: _Transfer, values: Tensor) -> None:
        at = _slices(self._targets, transfer.target, transfer.box)

        def write(piece: Tensor) -> None:
            view = piece[at]
            if view.data_ptr() != values.data_ptr():  # see `share_parameters`
                view.copy_(values)

        _piece(self._targets, transfer.target).fill(write)


def share_parameters(sources: Iterable[nn.Module], target: nn.Module) -> int:
    """Let ``target`` use the memory of the parameters of ``sources`` that it holds too.

    These are the parameters of which this rank has the same part in the same dtype in both models.
    A `Refit` does not copy them: ``target`` changes at each optimizer step.  Returns their number.
    """
    found = {info_of(param).name: param for module in sources for param in module.parameters()}
    count = 0
    for param in target.parameters():
        info = info_of(param)
        source = found.get(info.name)
        if source is None or not info.name or param.shape != source.shape:
            continue
        other = info_of(source)
        is_same = all(
            getattr(info, name) == getattr(other, name)
            for name in "global_shape shard_dim shard_index shard_count blocks part".split()
        )
        if is_same and param.dtype == source.dtype and param.stride() == source.stride():
            param.data = source.data
            count += 1
    return count


def note_new_weights(module: nn.Module) -> None:
    """Let layers see that their weights have changed, which they may hold a copy of.

    Neither a read from a file into a tensor's memory nor an optimizer step on shared memory raises
    the tensor's version.
    """
    torch.autograd.graph.increment_version(list(module.parameters()))


def _described(tensors: Sequence[ShardedTensor]) -> list[_Description]:
    return [
        (
            t.key,
            list(t.global_shape),
            _dtype_of(t),
            [(list(p.offset), list(p.shape)) for p in t.pieces],
        )
        for t in tensors
    ]


def _dtype_of(tensor: ShardedTensor) -> str:
    """Return the name of the dtype in memory; a file may have another one."""
    dtypes = [p.data.dtype for p in tensor.pieces if isinstance(p, Piece)]
    return str(dtypes[0] if dtypes else tensor.dtype).removeprefix("torch.")


def _transfers(
    held: list[list[_Description]], wanted: list[list[_Description]], buffer_bytes: int
) -> list[_Transfer]:
    """Return the transfers of all ranks: each target box from one rank that holds it.

    That is the target's own rank if it can be, else the rank that sends the fewest bytes so far.
    """
    holders = _holders(held)
    _check(held, wanted)
    sent: Counter[int] = Counter()
    out = []
    for key, rank, index, tensor in sorted(
        (tensor[0], rank, index, tensor)
        for rank, tensors in enumerate(wanted)
        for index, tensor in enumerate(tensors)
    ):
        dtype, boxes = holders[key]
        asked: torch.dtype = getattr(torch, tensor[2])
        sent_dtype = asked if asked.itemsize < dtype.itemsize else dtype
        for number, (offset, shape) in enumerate(tensor[3]):
            whole = _Box(tuple(offset), tuple(shape))
            covered = 0
            for box, places in boxes.items():
                common = whole.overlap(box)
                for part in common.split(buffer_bytes // 8) if common is not None else ():
                    source = min(places, key=lambda p: (p.rank != rank, sent[p.rank], p.rank))
                    covered += prod(part.shape)
                    if source.rank != rank:
                        sent[source.rank] += prod(part.shape) * sent_dtype.itemsize
                    out.append(_Transfer(source, _Place(rank, index, number), part, sent_dtype))
            assert covered == prod(shape), f"{key}: the ranks' parts overlap or leave a gap"
    return out


def _holders(
    held: list[list[_Description]],
) -> dict[str, tuple[torch.dtype, dict[_Box, list[_Place]]]]:
    """Return for each key the highest precision in which ranks hold it, and who holds each box."""
    dtypes: dict[str, torch.dtype] = {}
    for key, _, name, _ in (tensor for tensors in held for tensor in tensors):
        dtype = getattr(torch, name)
        if key not in dtypes or dtype.itemsize > dtypes[key].itemsize:
            dtypes[key] = dtype
    boxes: dict[str, dict[_Box, list[_Place]]] = defaultdict(lambda: defaultdict(list))
    for rank, tensors in enumerate(held):
        for index, (key, _, name, pieces) in enumerate(tensors):
            for number, (offset, shape) in enumerate(pieces):
                if getattr(torch, name) == dtypes[key]:
                    box = _Box(tuple(offset), tuple(shape))
                    boxes[key][box].append(_Place(rank, index, number))
    return {key: (dtype, boxes[key]) for key, dtype in dtypes.items()}


def _check(held: list[list[_Description]], wanted: list[list[_Description]]) -> None:
    """Raise ConfigError if a target is missing or has another shape."""
    shapes = {key: shape for tensors in held for key, shape, _, _ in tensors}
    asked = {key: shape for tensors in wanted for key, shape, _, _ in tensors}
    problems = [
        f"{key} has shape {shapes.get(key, 'none')} in training and {shape} in the engine"
        for key, shape in sorted(asked.items())
        if shapes.get(key) != shape
    ]
    if problems:
        raise ConfigError(
            "the engine's model is not the model in training: give both the same model flags; "
            + "; ".join(problems[:_SHOWN])
        )


def _my_rounds(
    transfers: list[_Transfer], group: ProcessGroup, buffer_bytes: int
) -> list[list[_Transfer]]:
    """Split the transfers into rounds by bytes, the same on all ranks; return this rank's part."""
    rounds: list[list[_Transfer]] = [[]]
    used: Counter[int] = Counter()
    for t in transfers:
        ends = {t.source.rank, t.target.rank}
        num_bytes = prod(t.box.shape) * t.dtype.itemsize if len(ends) > 1 else 0
        if num_bytes and any(used[end] + num_bytes > buffer_bytes for end in ends):
            rounds.append([])
            used.clear()
        used.update(dict.fromkeys(ends, num_bytes))
        if group.rank() in ends:
            rounds[-1].append(t)
    return [mine for mine in rounds if mine]


def _piece(tensors: Sequence[ShardedTensor], place: _Place) -> Piece | LazyPiece:
    return tensors[place.tensor].pieces[place.piece]


def _slices(tensors: Sequence[ShardedTensor], place: _Place, box: _Box) -> tuple[slice, ...]:
    return box.within(_piece(tensors, place).offset)
