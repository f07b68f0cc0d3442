"""Save for --non-persistent-ckpt-type local: each rank's part on its node, with copies on peers.

    {root}/rank_00003/iter_0000100/    the part of rank 3: a checkpoint of one rank

Each rank writes its part without communication.  With replication, it then sends the part to the
ranks at distance ``jump``, 2 ``jump``, ..., which store it in the directories of their nodes.
Older parts are deleted after all ranks have the new one, so a kill at any moment leaves a complete
set.

Order of collectives: broadcast the save's name; for each copy, all-gather file sizes, then
send/receive the files; gather errors, broadcast the verdict.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.config.errors import CheckpointError
from megatron.core.diagnostics.fault_injection import fault_point
from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.folders import Found, folder_name, published
from megatron.core.dist_checkpointing.format import SAFETENSORS_DIST, complete
from megatron.core.dist_checkpointing.manifest import (
    SAVE,
    Manifest,
    adopt_file,
    fsync_folder,
    read_manifest,
)
from megatron.core.dist_checkpointing.mapping import Replica, to_write
from megatron.core.dist_checkpointing.safetensors_file import bytes_of
from megatron.core.dist_checkpointing.serialization import (
    REPORTED,
    Contents,
    SaveFailed,
    SaveResult,
    save,
    save_failed,
)
from megatron.core.dist_checkpointing.validation import shorten
from megatron.core.parallel.json_collectives import (
    all_gather_json,
    broadcast_json,
    gather_json,
    on_wire,
)

SaveName = list[int | str]  # [start time of the save in ns, the run's id]
_PART = replace(SAFETENSORS_DIST, complete=partial(complete, is_whole=False))
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
        problem = _exchange(
            root, None if errors else folder, distance * replication.jump, name, group
        )
        errors += [problem] if problem else []
    reports = gather_json(errors, group)
    found = [f"rank {r}: {e}" for r, report in enumerate(reports or []) for e in report]
    failed = broadcast_json(shorten(found), group)
    if failed:
        _drop(root, lambda parts: [f for f in parts if _is_of(f.manifest, name)], iteration)
        raise SaveFailed(save_failed(root, iteration, failed))
    _drop(root, lambda parts: [f for f in parts if _is_older(f, name)], iteration)
    return SaveResult(root / folder_name(iteration), iteration)


def _drop(root: Path, chosen: Callable[[list[Found]], list[Found]], iteration: int) -> None:
    """Delete parts in this node's directory; a later save deletes those that remain."""
    for _, parts in part_roots(root):
        for found in chosen(published(parts)):
            with suppress(OSError):  # another rank of this node may have deleted it
                commit.retire(found.folder, commit.attempt_id(), iteration)


def _exchange(
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
        self._is_wanted = name is not None and not _is_here(self._final, save_name)
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


def _is_older(found: Found, save_name: SaveName) -> bool:
    """Return whether ``found`` is not of this save; unreadable parts are kept."""
    return found.problem is None and not _is_of(found.manifest, save_name)


def _is_here(folder: Path, save_name: SaveName) -> bool:
    """Return whether ``folder`` is already from this save: the source rank is on the same node."""
    try:
        return _is_of(read_manifest(folder), save_name)
    except CheckpointError:
        return False
