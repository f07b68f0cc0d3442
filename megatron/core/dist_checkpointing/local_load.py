"""Load the newest complete save that `local` wrote.

A save is complete if every part is undamaged on some node.  A rank reads its boxes from the parts
in its node's directory: its own and the copies of others.  It receives other boxes from a rank that
has them.  If a node was lost, its ranks receive their complete part; with shared writing, every
rank receives the boxes that its data-parallel peers wrote.

Order of collectives: all-gather the available parts, and again for each save that is examined;
all-gather the requested and the offered boxes; then one send and receive per box, in the same order
on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from operator import methodcaller
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.dist_checkpointing.folders import published
from megatron.core.dist_checkpointing.local import part_roots
from megatron.core.dist_checkpointing.manifest import SAVE, Layout
from megatron.core.dist_checkpointing.mapping import (
    LazyPiece,
    Piece,
    ShardedTensor,
    weights_then_state,
)
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.core.dist_checkpointing.safetensors_file import DTYPE_NAMES, bytes_of
from megatron.core.parallel.json_collectives import all_gather_json, all_or_none, on_wire

Box = tuple[str, str, tuple[int, ...], tuple[int, ...]]  # key, dtype, offset, shape


@dataclass(frozen=True)
class LocalSet:
    """A save that can be loaded; ``parts``: rank -> undamaged part in this node's directory."""

    iteration: int
    parts: Mapping[int, Path]


@dataclass(frozen=True)
class LocalContent:
    """Values loaded besides tensors: common values, and this rank's own state."""

    common: JsonObject
    rank_state: JsonObject | None


@dataclass(frozen=True)
class _Part:
    rank: int
    iteration: int
    save: tuple[int, str]
    folder: Path
    layout: Layout = field(default_factory=dict)


def find_local(
    root: Path, layout: Layout, newer_than_ns: int, group: ProcessGroup
) -> tuple[LocalSet | None, list[str]]:
    """Return the newest complete save after ``newer_than_ns``, and why newer ones were skipped.

    Collective.  ``layout`` must equal that of the save.  The result is the same on all ranks,
    except ``parts``.
    """
    own_parts = _local_parts(root)
    described = [(*p.save, p.iteration, p.layout == layout) for p in own_parts]
    saved_parts = all_gather_json(described, group)
    saves: dict[tuple[int, str], tuple[int, bool]] = {}
    for when, attempt, iteration, fits in (entry for rank in saved_parts for entry in rank):
        fits_all = saves.get((when, attempt), (0, True))[1] and fits
        saves[when, attempt] = (iteration, fits_all)
    notes: list[str] = []
    for save, (iteration, fits) in sorted(saves.items(), reverse=True):
        if save[0] <= newer_than_ns:
            break
        what = f"the local checkpoint of iteration {iteration}"
        if not fits:
            notes.append(f"{what} is of another layout or number of ranks")
            continue
        parts, problems = _whole(part for part in own_parts if part.save == save)
        answers = all_gather_json((sorted(parts), problems), group)
        notes += sorted({problem for _, found in answers for problem in found})
        lost = sorted(set(range(group.size())) - {rank for ranks, _ in answers for rank in ranks})
        if not lost:
            return LocalSet(iteration, parts), notes
        notes.append(f"{what} lacks the parts of ranks {lost}: no complete copy of them is left")
    return None, notes


def load_local(
    found: LocalSet, tensors: Sequence[ShardedTensor], group: ProcessGroup
) -> LocalContent:
    """Fill the views of ``tensors``.  Collective.  Raises CheckpointError on every rank alike."""
    readers = {rank: CheckpointReader(folder) for rank, folder in found.parts.items()}
    offered: dict[Box, CheckpointReader] = {}
    for reader in readers.values():
        for key, stored in reader.tensors.items():
            for piece in stored.pieces:
                offered[key, DTYPE_NAMES[stored.dtype], piece.offset, piece.shape] = reader
    for part in weights_then_state(tensors):
        wanted = {
            (t.key, DTYPE_NAMES[t.dtype], p.offset, p.shape): (t, p) for t in part for p in t.pieces
        }
        all_or_none(partial(_fill, wanted, offered), "a local part", group)
        missing = {box: wanted[box] for box in wanted if box not in offered}
        try:
            _send_and_receive(offered, missing, group)
        except CheckpointError as error:
            folders = ", ".join(str(folder) for folder in found.parts.values()) or "no local part"
            raise CheckpointError(f"{folders}: {error}") from None
    content = LocalContent(local_common(found, group), _rank_state(readers, group))
    for reader in readers.values():
        reader.close()
    return content


def _fill(
    wanted: Mapping[Box, tuple[ShardedTensor, Piece | LazyPiece]],
    offered: Mapping[Box, CheckpointReader],
) -> None:
    for box in wanted.keys() & offered.keys():
        wanted[box][1].fill(partial(offered[box].read_box, box[0], box[2]))


@torch.no_grad()
def _send_and_receive(
    offered: Mapping[Box, CheckpointReader],
    missing: Mapping[Box, tuple[ShardedTensor, Piece | LazyPiece]],
    group: ProcessGroup,
) -> None:
    """Transfer each box that a rank lacks from a rank that has it.  Collective."""
    me = group.rank()
    wishes = [
        (rank, i, (key, dtype, tuple(offset), tuple(shape)))
        for rank, boxes in enumerate(all_gather_json(list(missing), group))
        for i, (key, dtype, offset, shape) in enumerate(boxes)
    ]
    can = all_gather_json([n for n, (_, _, box) in enumerate(wishes) if box in offered], group)
    givers: dict[int, list[int]] = {}
    for rank, numbers in enumerate(can):
        for n in numbers:
            givers.setdefault(n, []).append(rank)
    for n, (_, _, box) in enumerate(wishes):
        if n not in givers:
            raise CheckpointError(
                f"{box[0]} {list(box[3])} at {list(box[2])} of dtype {box[1]} is in no local part: "
                "they were written by another model or precision; go on without "
                "--non-persistent-ckpt-type local"
            )
    for n, (rank, i, box) in enumerate(wishes):
        giver = givers[n][i % len(givers[n])]
        if me == giver:
            stored = offered[box].tensors[box[0]]
            values = torch.empty(box[3], dtype=stored.dtype)
            offered[box].read_box(box[0], box[2], values)
            data = torch.frombuffer(bytearray(bytes_of(values)), dtype=torch.uint8)
            dist.send(on_wire(data, group), group=group, group_dst=rank)
        elif me == rank:
            tensor, piece = missing[box]
            count = prod(box[3]) * tensor.dtype.itemsize
            got = on_wire(torch.empty(count, dtype=torch.uint8), group)
            dist.recv(got, group=group, group_src=giver)
            values = got.view(tensor.dtype).view(box[3])
            piece.fill(methodcaller("copy_", values))


def local_common(found: LocalSet, group: ProcessGroup) -> JsonObject:
    """Return the common values, from the first rank that has a part.  Collective."""
    holders = all_gather_json(bool(found.parts), group)
    first = holders.index(True)
    common: JsonObject = {}
    if group.rank() == first:
        with CheckpointReader(next(iter(found.parts.values()))) as reader:
            common = reader.common()
    return all_gather_json(common, group)[first]


def _rank_state(readers: Mapping[int, CheckpointReader], group: ProcessGroup) -> JsonObject | None:
    """Return this rank's state.  Collective.

    A rank whose part was lost receives its state from the first rank that has a copy of the part.
    """
    holders = all_gather_json(sorted(readers), group)
    me = group.rank()
    lost = [rank for rank, parts in enumerate(holders) if rank not in parts]
    mine = {
        str(rank): readers[rank].rank_state(0)
        for rank in lost
        if me == next(r for r, parts in enumerate(holders) if rank in parts)
    }
    sent = {
        rank: state for states in all_gather_json(mine, group) for rank, state in states.items()
    }
    return sent[str(me)] if me in lost else readers[me].rank_state(0)


def _local_parts(root: Path) -> list[_Part]:
    """Return the parts in this node's directory whose manifest can be read."""
    parts: list[_Part] = []
    for rank, folder in part_roots(root):
        for found in published(folder):
            layout = dict(found.manifest.layout) if found.manifest else {}
            save = layout.pop(SAVE, None)
            is_named = isinstance(save, list) and list(map(type, save)) == [int, str]
            if found.manifest and save and is_named:
                place = found.manifest.iteration, (save[0], save[1]), found.folder
                parts.append(_Part(rank, *place, layout))
    return parts


def _whole(parts: Iterable[_Part]) -> tuple[dict[int, Path], list[str]]:
    """Verify every byte of ``parts``; return rank -> folder of undamaged parts, and the errors."""
    whole: dict[int, Path] = {}
    problems: list[str] = []
    for part in parts:
        try:
            with CheckpointReader(part.folder) as reader:
                reader.check_all()
        except (CheckpointError, OSError) as problem:
            problems.append(str(problem))
            continue
        whole[part.rank] = part.folder
    return whole, problems
