"""Checkpoints on the nodes (--non-persistent-ckpt-type local): save and load each rank's part.

    {root}/rank_00003/iter_0000100/    the part of rank 3: a checkpoint of one rank

Each rank writes its part without communication.  With replication, it then sends the part to the
ranks at distance ``jump``, 2 ``jump``, ..., which store it in the directories of their nodes.
Older parts are deleted after all ranks have the new one, so a kill at any moment leaves a complete
set.

Order of collectives: broadcast the save's name; for each copy, all-gather file sizes, then
send/receive the files; gather errors, broadcast the verdict.

A save is complete if every part is undamaged on some node.  To load it, a rank reads its boxes from
the parts in its node's directory: its own and the copies of others.  It receives other boxes from a
rank that has them.  If a node was lost, its ranks receive their complete part; with shared writing,
every rank receives the boxes that its data-parallel peers wrote.  Order of collectives: all-gather
the available parts, and again for each save that is examined; all-gather the requested and the
offered boxes; then one send and receive per box, in the same order on all ranks.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from math import prod
from operator import methodcaller
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.diagnostics.fault_injection import fault_point
from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.folders import CheckpointFolder, folder_name, published
from megatron.core.dist_checkpointing.formats import SAFETENSORS_DIST, Contents, write_common_files
from megatron.core.dist_checkpointing.manifest import (
    SAVE,
    Layout,
    Manifest,
    adopt_file,
    fsync_folder,
    read_manifest,
)
from megatron.core.dist_checkpointing.mapping import (
    LazyPiece,
    Piece,
    Replica,
    ShardedTensor,
    to_write,
    weights_then_state,
)
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.core.dist_checkpointing.safetensors_file import DTYPE_NAMES, bytes_of
from megatron.core.dist_checkpointing.serialization import (
    REPORTED,
    SaveFailed,
    SaveResult,
    save,
    save_failed,
)
from megatron.core.dist_checkpointing.validation import shorten
from megatron.core.parallel.collectives import (
    all_gather_json,
    all_or_none,
    broadcast_json,
    gather_json,
    on_wire,
)

SaveName = list[int | str]  # [start time of the save in ns, the run's id]
_PART = replace(SAFETENSORS_DIST, write_common_files=partial(write_common_files, is_whole=False))
_PART_ROOT = re.compile(r"rank_([0-9]{5,})")
_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class Replication:
    """``copies`` additional copies of each part, each ``jump`` ranks after the previous one."""

    jump: int = 1
    copies: int = 0


def part_root(root: Path, rank: int) -> Path:
    """Return the directory of the parts of ``rank``."""
    return root / f"rank_{rank:05d}"


def part_roots(root: Path) -> list[tuple[int, Path]]:
    """Return rank and path of each directory of parts in ``root``; other names are ignored."""
    found = ((_PART_ROOT.fullmatch(path.name), path) for path in sorted(root.glob("rank_*")))
    return [(int(match[1]), path) for match, path in found if match and path.is_dir()]


def save_local(
    root: Path,
    iteration: int,
    contents: Contents,
    group: ProcessGroup,
    *,
    share_work: bool,
    replication: Replication,
) -> SaveResult:
    """Write the parts of all ranks into ``root``, a directory of each node.  Collective.

    ``share_work``: data-parallel ranks share the writing, and load each other's parts.  Raises
    SaveFailed on every rank if any rank fails; the parts of the previous save are then complete.
    """
    rank = group.rank()
    name: SaveName = broadcast_json([time.time_ns(), commit.attempt_id()], group)
    chosen = to_write(contents.tensors, share_work) if share_work else contents.tensors
    mine = replace(
        contents,
        tensors=[replace(tensor, replica=Replica()) for tensor in chosen],
        layout={**contents.layout, SAVE: name},
    )
    folder = part_root(root, rank) / folder_name(iteration)
    errors: list[str] = []
    try:
        save(part_root(root, rank), iteration, mine, None, format=_PART)
    except SaveFailed as error:
        errors.append(str(error))
    for distance in range(1, replication.copies + 1):
        problem = _replicate(
            root, None if errors else folder, distance * replication.jump, name, group
        )
        errors += [problem] if problem else []
    reports = gather_json(errors, group)
    found = [f"rank {r}: {e}" for r, report in enumerate(reports or []) for e in report]
    failed = broadcast_json(shorten(found), group)
    if failed:
        _delete_parts(root, lambda parts: [f for f in parts if _is_of(f.manifest, name)], iteration)
        raise SaveFailed(save_failed(root, iteration, failed))
    _delete_parts(
        root,
        lambda parts: [f for f in parts if f.problem is None and not _is_of(f.manifest, name)],
        iteration,
    )
    return SaveResult(root / folder_name(iteration), iteration)


def _delete_parts(
    root: Path, chosen: Callable[[list[CheckpointFolder]], list[CheckpointFolder]], iteration: int
) -> None:
    """Delete parts in this node's directory; a later save deletes those that remain."""
    for _, parts in part_roots(root):
        for found in chosen(published(parts)):
            with suppress(OSError):  # another rank of this node may have deleted it
                commit.retire(found.folder, commit.attempt_id(), iteration)


def _replicate(
    root: Path, folder: Path | None, distance: int, save_name: SaveName, group: ProcessGroup
) -> str | None:
    """Send ``folder`` to the rank ``distance`` after this one; store the folder received.

    Collective.  Returns an error message or None; ``folder`` None sends nothing.
    """
    size, rank = group.size(), group.rank()
    to, source = (rank + distance) % size, (rank - distance) % size
    files = sorted((path.name, path.stat().st_size) for path in folder.iterdir()) if folder else []
    name = None if folder is None else folder.name
    their_name, their_files = all_gather_json((name, files), group)[source]
    copy = _Copy(part_root(root, source), their_name, save_name)
    for mine, theirs in zip_longest(_chunks(files), _chunks(their_files)):
        operations: list[dist.P2POp] = []
        if mine is not None and folder is not None:
            data = on_wire(_read(folder, *mine), group)
            operations.append(dist.P2POp(dist.isend, data, group=group, group_peer=to))
        if theirs is not None:
            got = on_wire(torch.empty(theirs[2], dtype=torch.uint8), group)
            operations.append(dist.P2POp(dist.irecv, got, group=group, group_peer=source))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if theirs is not None:
            copy.add(theirs[0], got)
    return copy.finish()


def _chunks(files: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int, int]]:
    """Yield file name, first byte and number of bytes of each message."""
    for name, size in files:
        for begin in range(0, size, _CHUNK_BYTES):
            yield name, begin, min(_CHUNK_BYTES, size - begin)


def _read(folder: Path, name: str, begin: int, count: int) -> Tensor:
    with open(folder / name, "rb") as file:
        file.seek(begin)
        return torch.frombuffer(bytearray(file.read(count)), dtype=torch.uint8)


class _Copy:
    """A part received from another rank.

    Errors are stored, not raised: peers would otherwise wait for this rank's next send/receive.
    """

    def __init__(self, root: Path, name: str | None, save_name: SaveName) -> None:
        self._final = root / (name or "nothing")
        self._temporary = self._final.with_name(f"{name}.tmp-{commit.attempt_id()}")
        self._is_wanted = name is not None and not _holds_save(self._final, save_name)
        self._error: str | None = None
        if self._is_wanted:
            try:
                root.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(self._temporary, ignore_errors=True)
                self._temporary.mkdir()
            except OSError as error:
                self._error = f"copy of {self._final}: {error}"

    def add(self, name: str, data: Tensor) -> None:
        """Append ``data`` to the file ``name``."""
        if not self._is_wanted or self._error is not None:
            return
        try:
            fault_point("save.copy")
            with open(self._temporary / name, "ab") as file:
                file.write(bytes_of(data))
        except REPORTED as error:
            self._error = f"copy of {self._final}: {error}"

    def finish(self) -> str | None:
        """Publish the copy; return an error message or None."""
        if not self._is_wanted or self._error is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            return self._error
        try:
            for path in self._temporary.iterdir():
                adopt_file(path)
            fsync_folder(self._temporary)
            shutil.rmtree(self._final, ignore_errors=True)
            self._temporary.rename(self._final)
            fsync_folder(self._final.parent)
        except OSError as error:
            return f"copy of {self._final}: {error}"
        return None


def _is_of(manifest: Manifest | None, save_name: SaveName) -> bool:
    return manifest is not None and manifest.layout.get(SAVE) == save_name


def _holds_save(folder: Path, save_name: SaveName) -> bool:
    """Return whether ``folder`` is already from this save: the source rank is on the same node."""
    try:
        return _is_of(read_manifest(folder), save_name)
    except CheckpointError:
        return False


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
    for saved, (iteration, fits) in sorted(saves.items(), reverse=True):
        if saved[0] <= newer_than_ns:
            break
        what = f"the local checkpoint of iteration {iteration}"
        if not fits:
            notes.append(f"{what} is of another layout or number of ranks")
            continue
        parts, problems = _verify_parts(part for part in own_parts if part.save == saved)
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


def _verify_parts(parts: Iterable[_Part]) -> tuple[dict[int, Path], list[str]]:
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
