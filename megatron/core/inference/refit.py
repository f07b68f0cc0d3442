"""Copy the weights of a training run into an engine on the same ranks, from any layout to any.

Both models describe their parameters by global names and boxes (`TensorRecord`).  The plan of who
sends which box to whom is the same on all ranks and is computed once.

Order of collectives: construction gathers the descriptions.  `Refit.copy` runs in rounds: a rank
starts all sends and receives of a round, waits for them, and goes on.  Each rank skips the rounds
in which it takes no part.  A rank buffers at most ``buffer_bytes`` in a round.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.config.errors import ConfigError, MegatronError
from megatron.core.dist_checkpointing.hashing import hash_here
from megatron.core.dist_checkpointing.records import LazyPiece, Piece, TensorRecord
from megatron.core.dist_checkpointing.validation import shorten
from megatron.core.parallel.collectives import all_gather_json
from megatron.core.params.param_info import info_of

# First and end index of a box of a global tensor in each dimension.
Box: TypeAlias = tuple[tuple[int, int], ...]
# Of one tensor on one rank: key, global shape, dtype in memory, and boxes of its pieces.
_Description: TypeAlias = tuple[str, list[int], str, list[Box]]
_SHOWN = 5  # names in an error message


class _Place(NamedTuple):
    """One piece of one tensor: indices in the lists of a rank."""

    rank: int
    tensor: int
    piece: int

    def piece_of(self, tensors: Sequence[TensorRecord]) -> Piece | LazyPiece:
        """Return the piece."""
        return tensors[self.tensor].pieces[self.piece]


class _Transfer(NamedTuple):
    source: _Place
    target: _Place
    box: Box
    dtype: torch.dtype  # of the values that are sent

    def slices(self, piece: Piece | LazyPiece) -> tuple[slice, ...]:
        """Return where the box is in ``piece``."""
        pairs = zip(self.box, piece.offset, strict=True)
        return tuple(slice(first - at, end - at) for (first, end), at in pairs)


class WeightsDiffer(MegatronError, RuntimeError):
    """Weights of the engine that are not those of training."""


class Refit:
    """Copies ``sources()`` into the views of ``targets``, whenever `copy` is called.

    ``sources`` returns this rank's records in the same order at each call.  Construction and `copy`
    are collective over ``group``.  Raises ConfigError on all ranks if the sources lack a target.
    """

    def __init__(
        self,
        sources: Callable[[], Sequence[TensorRecord]],
        targets: Sequence[TensorRecord],
        group: ProcessGroup,
        *,
        buffer_bytes: int = 2**26,
    ) -> None:
        self._sources = sources
        self._targets = targets
        self._group = group
        every = all_gather_json((_described(sources()), _described(targets)), group)
        held, wanted = zip(*every, strict=True)
        self._dtypes = {key: getattr(torch, name) for mine in wanted for key, _, name, _ in mine}
        # Rounds by bytes, the same on all ranks, of which this rank takes part in some.
        rounds: list[list[_Transfer]] = [[]]
        used: Counter[int] = Counter()
        for t in _transfers(held, wanted, buffer_bytes):
            ends = {t.source.rank, t.target.rank}
            num_bytes = _size(t.box) * t.dtype.itemsize if len(ends) > 1 else 0
            if num_bytes and any(used[end] + num_bytes > buffer_bytes for end in ends):
                rounds.append([])
                used.clear()
            used.update(dict.fromkeys(ends, num_bytes))
            if group.rank() in ends:
                rounds[-1].append(t)
        self._rounds = [mine for mine in rounds if mine]

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
                    where = t.target.piece_of(self._targets).data.device
                    shape = [end - first for first, end in t.box]
                    buffer = torch.empty(shape, dtype=t.dtype, device=where)
                    arrivals.append((t, buffer))
                    operations.append(self._operation(dist.irecv, buffer, t.source.rank))
                    continue
                piece = t.source.piece_of(sources)
                values = piece.data[t.slices(piece)]
                if t.target.rank == me:
                    self._store(t, values)
                else:
                    buffer = values.to(t.dtype).contiguous()
                    operations.append(self._operation(dist.isend, buffer, t.target.rank))
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
            for t, buffer in arrivals:
                self._store(t, buffer)

    @torch.no_grad()
    def verify(self) -> int:
        """Compare the hash of each parameter of the engine with training; return their number.

        Ranks that hold the same box must have the same values of it.  Collective.  Raises
        WeightsDiffer on all ranks.
        """
        found, wanted = (
            _hashes(all_gather_json(self._hashes_here(tensors), self._group))
            for tensors in (self._targets, self._sources())
        )
        wrong = [key for key, hash in found.items() if hash is None or hash != wanted.get(key)]
        if wrong:
            raise WeightsDiffer(
                f"the engine has other weights than training after a copy: {shorten(wrong)}; the "
                "cause is a faulty device or interconnect: resume from a checkpoint without these "
                "devices"
            )
        return len(found)

    def _hashes_here(self, tensors: Sequence[TensorRecord]) -> list[tuple[str, Box, int]]:
        """Return key, box and hash, of the values in the engine's dtype, of this rank's pieces."""
        pieces = [(t, p) for t in tensors if t.key in self._dtypes for p in t.pieces]
        if not pieces:
            return []
        hashes = torch.stack(
            [hash_here(replace(t, dtype=self._dtypes[t.key], pieces=(p,))) for t, p in pieces]
        )
        return [
            (t.key, _box(piece), hash)
            for (t, piece), hash in zip(pieces, hashes.tolist(), strict=True)
        ]

    def _operation(
        self, start: Callable[..., dist.Work | None], buffer: Tensor, peer: int
    ) -> dist.P2POp:
        return dist.P2POp(start, buffer, group=self._group, group_peer=peer)

    def _store(self, transfer: _Transfer, values: Tensor) -> None:
        piece = transfer.target.piece_of(self._targets)

        def write(whole: Tensor) -> None:
            view = whole[transfer.slices(piece)]
            if view.data_ptr() != values.data_ptr():  # see `share_parameters`
                view.copy_(values)

        piece.fill(write)


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


def _hashes(ranks: Sequence[list[tuple[str, Box, int]]]) -> dict[str, int | None]:
    """Add the hashes of the boxes of each key; None if ranks have different values of a box."""
    found: dict[str, dict[Box, set[int]]] = defaultdict(lambda: defaultdict(set))
    for key, box, hash in (piece for rank in ranks for piece in rank):
        found[key][tuple((first, end) for first, end in box)].add(hash)
    return {
        key: sum(map(sum, boxes.values())) % 2**64
        if all(len(hashes) == 1 for hashes in boxes.values())
        else None
        for key, boxes in found.items()
    }


def _box(piece: Piece | LazyPiece) -> Box:
    return tuple((first, first + n) for first, n in zip(piece.offset, piece.shape, strict=True))


def _described(tensors: Sequence[TensorRecord]) -> list[_Description]:
    found: list[_Description] = []
    for t in tensors:
        # A file may have another dtype.
        dtypes = [p.data.dtype for p in t.pieces if isinstance(p, Piece)] or [t.dtype]
        boxes = [_box(piece) for piece in t.pieces]
        found.append((t.key, list(t.global_shape), str(dtypes[0]).removeprefix("torch."), boxes))
    return found


def _transfers(
    held: Sequence[list[_Description]], wanted: Sequence[list[_Description]], buffer_bytes: int
) -> Iterator[_Transfer]:
    """Yield the transfers of all ranks: each target box from one rank that holds it.

    That is the target's own rank if it can be, else the rank that sends the fewest bytes so far.
    Raises ConfigError if a target is missing or has another shape.
    """
    shapes = {key: shape for tensors in held for key, shape, _, _ in tensors}
    problems = {
        f"{key} has shape {shapes.get(key, 'none')} in training and {shape} in the engine": None
        for key, shape, _, _ in sorted(tensor for tensors in wanted for tensor in tensors)
        if shapes.get(key) != shape
    }
    if problems:
        raise ConfigError(
            "the engine's model is not the model in training: give both the same model flags; "
            + "; ".join([*problems][:_SHOWN])
        )
    dtypes: dict[str, torch.dtype] = {}
    holders: dict[str, dict[Box, list[_Place]]] = defaultdict(lambda: defaultdict(list))
    for rank, tensors in enumerate(held):
        for index, (key, _, name, boxes) in enumerate(tensors):
            dtypes[key] = getattr(torch, name)
            for number, box in enumerate(boxes):
                at = tuple((first, end) for first, end in box)  # JSON has made lists of tuples
                holders[key][at].append(_Place(rank, index, number))
    sent: Counter[int] = Counter()
    for key, rank, index, boxes in sorted(
        (key, rank, index, boxes)
        for rank, tensors in enumerate(wanted)
        for index, (key, _, _, boxes) in enumerate(tensors)
    ):
        dtype = dtypes[key]
        for number, whole in enumerate(boxes):
            covered = 0
            for box, places in holders[key].items():
                for part in _split(_overlap(whole, box), buffer_bytes // 8):
                    source = min(places, key=lambda p: (p.rank != rank, sent[p.rank], p.rank))
                    covered += _size(part)
                    if source.rank != rank:
                        sent[source.rank] += _size(part) * dtype.itemsize
                    yield _Transfer(source, _Place(rank, index, number), part, dtype)
            assert covered == _size(whole), f"{key}: the ranks' parts overlap or leave a gap"


def _size(box: Box) -> int:
    return prod(max(end - first, 0) for first, end in box)


def _overlap(one: Box, other: Box) -> Box:
    pairs = zip(one, other, strict=True)
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pairs)


def _split(box: Box, most: int) -> Iterator[Box]:
    """Yield boxes of at most ``most`` elements (at least one) that cover ``box``; none if empty."""
    size = _size(box)
    if size <= max(most, 1):
        yield from [box] * (size > 0)
        return
    dim = next(d for d, (first, end) in enumerate(box) if end - first > 1)
    first, end = box[dim]
    step = max(most * (end - first) // size, 1)
    for low in range(first, end, step):
        yield from _split((*box[:dim], (low, min(low + step, end)), *box[dim + 1 :]), most)
