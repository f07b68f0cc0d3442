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
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
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
from megatron.core.dist_checkpointing.all_ranks import (
    REPORTED,
    SaveFailed,
    SaveResult,
    save,
    save_failed,
)
from megatron.core.dist_checkpointing.folders import folder_name, published
from megatron.core.dist_checkpointing.formats import SAFETENSORS_DIST, Contents, write_common_files
from megatron.core.dist_checkpointing.manifest import (
    SAVE,
    Layout,
    Manifest,
    adopt_file,
    fsync_folder,
    read_manifest,
)
from megatron.core.dist_checkpointing.reader import CheckpointReader, StoredBox
from megatron.core.dist_checkpointing.records import (
    LazyPiece,
    Piece,
    Replica,
    TensorRecord,
    TensorRecords,
    to_write,
    weights_then_state,
)
from megatron.core.dist_checkpointing.safetensors_file import bytes_of, dtype_name, piece_name
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
    folder: Path | None = part_root(root, rank) / folder_name(iteration)
    errors: list[str] = []
    try:
        save(part_root(root, rank), iteration, mine, None, format=_PART)
    except SaveFailed as error:
        errors.append(str(error))
        folder = None
    for distance in range(1, replication.copies + 1):
        errors += _replicate(root, folder, distance * replication.jump, name, group)
    reports = gather_json(errors, group)
    found = [f"rank {r}: {e}" for r, report in enumerate(reports or []) for e in report]
    failed = broadcast_json(shorten(found), group)
    # The parts of this save if it failed, else all other readable ones.
    for _, parts in part_roots(root):
        for part in published(parts):
            if part.manifest and _is_of(part.manifest, name) is bool(failed):
                with suppress(OSError):  # another rank of this node may have deleted it
                    commit.retire(part.folder, commit.attempt_id(), iteration)
    if failed:
        raise save_failed(root, iteration, failed)
    return SaveResult(root / folder_name(iteration), iteration)


def _replicate(
    root: Path, folder: Path | None, distance: int, save_name: SaveName, group: ProcessGroup
) -> list[str]:
    """Send ``folder`` to the rank ``distance`` after this one; store the folder received.

    Collective.  ``folder`` None sends nothing.  Returns an error message, or nothing: peers wait
    for this rank's next send/receive, so an error is not raised.
    """
    size, rank = group.size(), group.rank()
    to, source = (rank + distance) % size, (rank - distance) % size
    files = sorted((path.name, path.stat().st_size) for path in folder.iterdir()) if folder else []
    their_name, their_files = all_gather_json((folder and folder.name, files), group)[source]
    final = part_root(root, source) / (their_name or "nothing")
    temporary = final.with_name(f"{final.name}.tmp-{commit.attempt_id()}")
    is_wanted = their_name is not None and not _holds_save(final, save_name)
    errors: list[str] = []

    def store(action: Callable[[], object]) -> None:
        if is_wanted and not errors:
            try:
                action()
            except REPORTED as error:
                errors.append(f"copy of {final}: {error}")

    shutil.rmtree(temporary, ignore_errors=True)
    store(partial(temporary.mkdir, parents=True))
    for mine, theirs in zip_longest(_chunks(files), _chunks(their_files)):
        operations = []
        if mine is not None and folder is not None:
            name, begin, count = mine
            whole = torch.from_file(str(folder / name), size=begin + count, dtype=torch.uint8)
            data = on_wire(whole[begin:], group)
            operations.append(dist.P2POp(dist.isend, data, group=group, group_peer=to))
        if theirs is not None:
            got = on_wire(torch.empty(theirs[2], dtype=torch.uint8), group)
            operations.append(dist.P2POp(dist.irecv, got, group=group, group_peer=source))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if theirs is not None:
            store(partial(_append, temporary / theirs[0], got))
    store(partial(_publish, temporary, final))
    shutil.rmtree(temporary, ignore_errors=True)
    return errors


def _append(path: Path, data: Tensor) -> None:
    fault_point("save.copy")
    with open(path, "ab") as file:
        file.write(bytes_of(data))


def _publish(temporary: Path, final: Path) -> None:
    for path in temporary.iterdir():
        adopt_file(path)
    fsync_folder(temporary)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    fsync_folder(final.parent)


def _chunks(files: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int, int]]:
    """Yield file name, first byte and number of bytes of each message."""
    for name, size in files:
        for begin in range(0, size, _CHUNK_BYTES):
            yield name, begin, min(_CHUNK_BYTES, size - begin)


def _is_of(manifest: Manifest | None, save_name: SaveName) -> bool:
    return manifest is not None and manifest.layout.get(SAVE) == save_name


def _holds_save(folder: Path, save_name: SaveName) -> bool:
    """Return whether ``folder`` is already from this save: the source rank is on the same node."""
    with suppress(CheckpointError):
        return _is_of(read_manifest(folder), save_name)
    return False


@dataclass(frozen=True)
class LocalSet:
    """A save that can be loaded.

    ``parts``: rank -> undamaged part in this node's directory.  ``holders``: for each rank, the
    keys of its ``parts``.  ``common``: the values besides tensors that all ranks share.
    """

    iteration: int
    parts: Mapping[int, Path]
    holders: Sequence[Sequence[int]]
    common: JsonObject


def find_local(
    root: Path, layout: Layout, newer_than_ns: int, group: ProcessGroup
) -> tuple[LocalSet | None, list[str]]:
    """Return the newest complete save after ``newer_than_ns``, and why newer ones were skipped.

    Collective.  ``layout`` must equal that of the save.  The result is the same on all ranks,
    except ``parts``.
    """
    own_parts = [
        (rank, found.folder, found.manifest)
        for rank, folder in part_roots(root)
        for found in published(folder)
        if found.manifest and _is_name(found.manifest.layout.get(SAVE))
    ]
    described = [
        (*part.layout[SAVE], part.iteration, part.layout == {**layout, SAVE: part.layout[SAVE]})
        for *_, part in own_parts
    ]
    saves: dict[tuple[int, str], tuple[int, bool]] = {}
    for when, attempt, iteration, fits in chain(*all_gather_json(described, group)):
        fits_all = saves.get((when, attempt), (0, True))[1] and fits
        saves[when, attempt] = (iteration, fits_all)
    notes = []
    for saved, (iteration, fits) in sorted(saves.items(), reverse=True):
        if saved[0] <= newer_than_ns:
            break
        what = f"the local checkpoint of iteration {iteration}"
        if not fits:
            notes.append(f"{what} is of another layout or number of ranks")
            continue
        parts = {}
        problems = []
        common = None
        for rank, folder, manifest in own_parts:
            if _is_of(manifest, list(saved)):
                try:
                    with CheckpointReader(folder) as reader:
                        reader.check_all()
                        common = reader.common()
                    parts[rank] = folder
                except (CheckpointError, OSError) as problem:
                    problems.append(str(problem))
        answers = all_gather_json((sorted(parts), problems, common), group)
        notes += sorted({problem for _, found, _ in answers for problem in found})
        holders = [ranks for ranks, *_ in answers]
        lost = sorted(set(range(group.size())).difference(*holders))
        if not lost:
            common = next(values for *_, values in answers if values is not None)
            return LocalSet(iteration, parts, holders, common), notes
        notes.append(f"{what} lacks the parts of ranks {lost}: no complete copy of them is left")
    return None, notes


def _is_name(value: object) -> bool:
    return isinstance(value, list) and list(map(type, value)) == [int, str]


_Offered = Mapping[str, tuple[CheckpointReader, str, StoredBox]]  # by name of the box
_Wanted = Mapping[str, tuple[TensorRecord, Piece | LazyPiece]]


def load_local(found: LocalSet, tensors: TensorRecords, group: ProcessGroup) -> JsonObject | None:
    """Fill the views of ``tensors``; return this rank's own state.

    Collective.  Raises CheckpointError on every rank alike.
    """
    readers = {rank: CheckpointReader(folder) for rank, folder in found.parts.items()}
    offered = {
        _box_name(key, stored.dtype, piece): (reader, key, piece)
        for reader in readers.values()
        for key, stored in reader.tensors.items()
        for piece in stored.pieces
    }
    for part in weights_then_state(tensors):
        wanted = {_box_name(t.key, t.dtype, p): (t, p) for t in part for p in t.pieces}
        all_or_none(partial(_fill, wanted, offered), "a local part", group)
        missing = {name: wanted[name] for name in wanted if name not in offered}
        _send_and_receive(offered, missing, found, group)
    state = _rank_state(readers, found.holders, group)
    for reader in readers.values():
        reader.close()
    return state


def _box_name(key: str, dtype: torch.dtype, box: StoredBox | Piece | LazyPiece) -> str:
    return f"{piece_name(key, (), box.offset, box.shape)} of dtype {dtype_name(dtype)}"


def _fill(wanted: _Wanted, offered: _Offered) -> None:
    for name in wanted.keys() & offered.keys():
        reader, key, box = offered[name]
        wanted[name][1].fill(partial(reader.read_box, key, box.offset))


@torch.no_grad()
def _send_and_receive(
    offered: _Offered, missing: _Wanted, found: LocalSet, group: ProcessGroup
) -> None:
    """Transfer each box that a rank lacks from a rank that has it.  Collective."""
    me = group.rank()
    wishes = [
        (rank, i, name)
        for rank, names in enumerate(all_gather_json(list(missing), group))
        for i, name in enumerate(names)
    ]
    can = all_gather_json([n for n, (*_, name) in enumerate(wishes) if name in offered], group)
    givers = defaultdict(list)
    for rank, numbers in enumerate(can):
        for n in numbers:
            givers[n].append(rank)
    for n, (rank, i, name) in enumerate(wishes):
        if n not in givers:
            raise CheckpointError(
                f"{shorten([str(folder) for folder in found.parts.values()])}: {name} is in no "
                "local part: they were written by another model or precision; go on without "
                "--non-persistent-ckpt-type local"
            )
        giver = givers[n][i % len(givers[n])]
        if me == giver:
            reader, key, box = offered[name]
            values = torch.empty(box.shape, dtype=reader.tensors[key].dtype)
            reader.read_box(key, box.offset, values)
            data = torch.frombuffer(bytearray(bytes_of(values)), dtype=torch.uint8)
            dist.send(on_wire(data, group), group=group, group_dst=rank)
        elif me == rank:
            tensor, piece = missing[name]
            count = prod(piece.shape) * tensor.dtype.itemsize
            got = on_wire(torch.empty(count, dtype=torch.uint8), group)
            dist.recv(got, group=group, group_src=giver)
            piece.fill(methodcaller("copy_", got.view(tensor.dtype).view(piece.shape)))


def _rank_state(
    readers: Mapping[int, CheckpointReader],
    holders: Sequence[Sequence[int]],
    group: ProcessGroup,
) -> JsonObject | None:
    """Return this rank's state.  Collective.

    A rank whose part was lost receives its state from the first rank that has a copy of the part.
    """
    me = group.rank()
    lost = [rank for rank, parts in enumerate(holders) if rank not in parts]
    mine = {
        str(rank): readers[rank].rank_state(0)
        for rank in lost
        if me == next(r for r, parts in enumerate(holders) if rank in parts)
    }
    sent: JsonObject = {}
    for states in all_gather_json(mine, group):
        sent |= states
    return sent[str(me)] if me in lost else readers[me].rank_state(0)
