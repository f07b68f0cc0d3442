"""Publishing a checkpoint so that a kill at any moment leaves a whole one.  No torch, one process.

Order, and what a kill after each step leaves:

1. sweep leftovers, check free space, make ``iter_N.tmp-{attempt}``   the previous checkpoint
2. all ranks write and fsync their files there                        the previous one
3. what rank 0 adds, then the manifest, all fsynced                   the previous one
4. a published folder of this step is moved to ``.old-``              it, until step 5
5. rename to ``iter_N``, fsync the directory                          the new one
6. replace the tracker: temporary file, fsync, rename, fsync          the new one
7. retention: rename to ``.del-``, then delete                        the new one

Nothing is ever written into a published folder.  What is left over is swept by the next save of
the same or a later step.  Which folder is loaded is decided in `folders`.  A run that is still
alive when another one, started later, publishes where it saves is refused from then on.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.folders import (
    RELEASE,
    TRACKER,
    Found,
    folder_name,
    leftovers,
    published,
)
from megatron.core.dist_checkpointing.manifest import (
    CONFIG,
    MANIFEST,
    FileEntry,
    Manifest,
    adopt_file,
    check_size,
    write_manifest,
    write_text,
)
from megatron.core.faults import fault_point
from megatron.core.per_rank import each_rank_owns

# Room for the JSON files and the file system's own records, beside the tensors.
_SPARE_BYTES = 1 << 20
_LOADED_AT_NS = time.time_ns()
# Attempts whose checkpoints lay in a directory when this one first saved there.
_found: dict[Path, set[str]] = {}
each_rank_owns(__name__, "_found")


@dataclass(frozen=True)
class Pending:
    """A checkpoint that is being written into ``folder``."""

    root: Path
    iteration: int
    attempt: str
    folder: Path
    sequence: int
    tracker_before: list[Any] | None


@cache
def attempt_id() -> str:
    """Names this start of the program: no two starts write into the same folder."""
    return f"{_LOADED_AT_NS:x}-{secrets.token_hex(4)}"


def begin(root: Path, iteration: int, num_bytes: int, attempt: str) -> Pending:
    """Sweep leftovers and make the folder to write into.

    Raises OSError, and CheckpointError when the file system has fewer than ``num_bytes`` free or
    another run has taken over.
    """
    fault_point("save.begin", step=iteration)
    root.mkdir(parents=True, exist_ok=True)
    found = published(root)
    _check_not_stale(root, found, attempt)
    sweep(root, iteration)
    _check_space(root, num_bytes)
    newest = max((f.manifest.sequence for f in found if f.manifest), default=0)
    folder = _beside(root / folder_name(iteration), "tmp", attempt)
    folder.mkdir()
    return Pending(
        root=root,
        iteration=iteration,
        attempt=attempt,
        folder=folder,
        sequence=newest + 1,
        tracker_before=_tracker_as_found(root),
    )


def publish(
    pending: Pending,
    layout: Mapping[str, Any],
    files: Mapping[str, FileEntry],
    *,
    manifest_name: str = MANIFEST,
    write_config: Callable[[Path], object] | None = None,
) -> Path:
    """Complete the folder, give it its final name, replace the tracker; returns the final path.

    ``files`` lie in the folder; ``write_config(path)`` writes the resolved configuration.

    Raises OSError, and CheckpointDamaged if a rank's file is not there as reported.  After an
    error nothing is published, unless the message says that it is complete.
    """
    step = pending.iteration
    final = pending.root / folder_name(step)
    for name, entry in files.items():
        check_size(pending.folder, name, entry)
    if write_config is not None:
        write_config(pending.folder / CONFIG)
        files = {**files, CONFIG: adopt_file(pending.folder / CONFIG)}
    fault_point("save.before_manifest", step=step)
    manifest = Manifest(
        iteration=step,
        sequence=pending.sequence,
        attempt=pending.attempt,
        published_at_ns=time.time_ns(),
        tracker_before=pending.tracker_before,
        layout=layout,
        files=files,
    )
    write_manifest(pending.folder, manifest, manifest_name)
    fsync_folder(pending.folder)
    fault_point("save.before_rename", step=step)
    if _tracker_as_found(pending.root) != pending.tracker_before:
        _check_not_stale(pending.root, published(pending.root), pending.attempt)
    displaced = _beside(final, "old", pending.attempt)
    if final.exists():
        final.rename(displaced)
        fault_point("save.displaced", step=step)
    pending.folder.rename(final)
    fault_point("save.after_rename", step=step)
    try:
        fsync_folder(pending.root)
        set_tracker(pending.root, str(step or RELEASE), pending.attempt, step)
    except OSError as error:
        raise CheckpointError(
            f"{final} is complete, but its name or that in the tracker may not be on disk: {error}"
        ) from None
    fault_point("save.after_tracker", step=step)
    shutil.rmtree(displaced, ignore_errors=True)
    return final


def abandon(pending: Pending) -> None:
    """Remove what was written; what cannot be removed is swept later."""
    shutil.rmtree(pending.folder, ignore_errors=True)


def retire(folder: Path, attempt: str, step: int) -> bool:
    """Delete a published checkpoint; False for a link, which is kept.

    Renamed first: a delete that is killed half-way leaves rubbish, not half a checkpoint.
    """
    if folder.is_symlink() or not folder.is_dir():
        return False
    doomed = _beside(folder, "del", attempt)
    fault_point("save.before_delete", step=step)
    folder.rename(doomed)
    fault_point("save.in_delete", step=step)
    shutil.rmtree(doomed, ignore_errors=True)
    return True


def set_tracker(root: Path, text: str, attempt: str, step: int) -> None:
    """Replace the tracker file; a reader sees the old or the new one, whole."""
    temporary = root / f"{TRACKER}.tmp-{attempt}"
    write_text(temporary, text)
    fault_point("save.before_tracker", step=step)
    temporary.rename(root / TRACKER)
    fsync_folder(root)


def sweep(root: Path, iteration: int) -> None:
    """Remove what killed saves up to ``iteration`` and killed deletes left in ``root``.

    A checkpoint that was moved aside for one that never came gets its name back.
    """
    for path, step, kind in leftovers(root):
        final = root / folder_name(step)
        if kind == "old" and not final.exists():
            path.rename(final)
        elif kind != "tmp" or step <= iteration:
            shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(f"{TRACKER}.tmp-*"):
        path.unlink(missing_ok=True)


def fsync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remember(root: Path) -> None:
    """At the start of a run, on rank 0: who has published in ``root`` was there before."""
    _found.setdefault(root, {f.manifest.attempt for f in published(root) if f.manifest})


def _check_not_stale(root: Path, found: Sequence[Found], attempt: str) -> None:
    """Raise CheckpointError if a run that started later has published here meanwhile."""
    attempts = {f.manifest.attempt: f.folder for f in found if f.manifest}
    known = _found.setdefault(root, set(attempts))
    for other in sorted(attempts.keys() - known - {attempt}):
        if _started_ns(other) > _started_ns(attempt):
            raise CheckpointError(
                f"{attempts[other]} was published by a run that started later ({other}): this one "
                f"({attempt}) has been replaced and must not save here any more"
            )


def _started_ns(attempt: str) -> int:
    try:
        return int(attempt.partition("-")[0], 16)
    except ValueError:
        return 0  # no time in it


def _check_space(root: Path, num_bytes: int) -> None:
    stats = os.statvfs(root)
    free = stats.f_bavail * stats.f_frsize
    if free < num_bytes + _SPARE_BYTES:
        raise CheckpointError(
            f"{root} has {_human(free)} free and the checkpoint needs "
            f"{_human(num_bytes + _SPARE_BYTES)}: free space, or keep fewer checkpoints with "
            "--keep-last-checkpoints"
        )


def _human(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2f} MB"


def _tracker_as_found(root: Path) -> list[Any] | None:
    path = root / TRACKER
    try:
        return [path.read_text(errors="replace").strip(), path.stat().st_mtime_ns]
    except FileNotFoundError:
        return None


def _beside(folder: Path, kind: str, attempt: str) -> Path:
    return folder.with_name(f"{folder.name}.{kind}-{attempt}")
