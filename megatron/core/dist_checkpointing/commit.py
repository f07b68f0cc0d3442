"""Publish a checkpoint atomically: a kill at any moment leaves a complete one to load.

No torch; one process (rank 0) runs it.  The steps, and the checkpoint that loads after a kill
following each of them:

0. claim a token, once per run and directory                          the previous checkpoint
1. sweep leftovers, check free space, make ``iter_N.tmp-{attempt}``   the previous one
2. all ranks write and fsync their files in it                        the previous one
3. rank 0 adds its files and the manifest, all fsynced                the previous one
4. rename a published folder of this iteration to ``.old-{attempt}``  that one, until step 5
5. rename ``.tmp-`` to ``iter_N``, fsync the directory                the new one
6. replace the tracker: temporary file, fsync, rename, fsync          the new one
7. retention: rename to ``.del-``, then delete                        the new one

Why this order: fsync before rename, since a file system may otherwise persist the name before the
data; the manifest last, since its presence declares the folder complete; the tracker after the
rename, since it must not name a folder that does not exist.

Fencing tokens order the runs that save to a directory without a clock: ``.attempt-00000007`` is
claimed by one process, and only the newest file is kept.  A process claims the next number when it
first saves to a directory; its attempt id, a part of the names of temporary folders and of
manifests, begins with it (``00000007-{random}``).  The claim relies on exclusive creation of a file
(O_EXCL), which is atomic on local and network file systems.  Ids of an earlier version of this
project contain a time instead; they count as token 0, older than every claim.

A published folder is never written to.  `folders` decides which folder is loaded.  A save sweeps
the leftovers of runs with a lower token and of earlier saves of its own run, but no folder of a run
that began later.

Two live runs in one directory: both may publish until the later run has published; its checkpoints
order after the other's.  From then on the earlier run is refused: before it makes a folder, before
step 4 and before step 6.  A run that dies before its first save therefore blocks no other.  Hazard:
a run may be suspended between such a check and the following rename, and resume after its successor
has published.  It then adds a complete checkpoint that orders before those of the successor, and
the successor's next save sets the tracker.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron.core.config.errors import CheckpointError
from megatron.core.diagnostics.fault_injection import fault_point
from megatron.core.dist_checkpointing.folders import (
    CLAIM,
    RELEASE,
    TRACKER,
    CheckpointFolder,
    folder_name,
    leftovers,
    newest_token,
    published,
    token_of,
)
from megatron.core.dist_checkpointing.manifest import (
    CONFIG,
    MANIFEST,
    FileEntries,
    Layout,
    Manifest,
    adopt_file,
    check_size,
    fsync_folder,
    write_manifest,
    write_text,
)
from megatron.core.rank_local import each_rank_owns

# Space for the JSON files and the file system's metadata, in addition to the tensors.
_SPARE_BYTES = 1 << 20
# Directory -> id of this run in it.
_claimed: dict[Path, str] = {}
# Unreadable checkpoints that were reported already.
_reported: set[Path] = set()
each_rank_owns(__name__, "_claimed", "_reported")


@dataclass(frozen=True)
class Pending:
    """A checkpoint that is being written into ``folder``."""

    root: Path
    iteration: int
    attempt: str
    folder: Path
    sequence: int
    tracker_before: list[str | int] | None
    unreadable: tuple[CheckpointFolder, ...] = ()


@cache
def attempt_id() -> str:
    """Return a random id of this process, the same at every call."""
    return secrets.token_hex(8)


def claim(root: Path) -> str:
    """Return this run's id in ``root``: a token higher than those of all earlier runs, and a name.

    The first call creates ``root`` and claims the token.  Raises OSError.
    """
    key = root.absolute()
    if key not in _claimed:
        root.mkdir(parents=True, exist_ok=True)
        known = [found.manifest.attempt for found in published(root) if found.manifest]
        _claimed[key] = f"{take_token(root, known):08d}-{attempt_id()}"
    return _claimed[key]


def create_folder(root: Path, iteration: int, num_bytes: int, attempt: str) -> Pending:
    """Sweep leftovers and create the temporary folder of a save (step 1).

    ``attempt`` is the result of `claim`.  Raises OSError, and CheckpointError if the file system
    has fewer than ``num_bytes`` free or a later run has published.
    """
    fault_point("save.begin", step=iteration)
    root.mkdir(parents=True, exist_ok=True)
    if newest_token(root) < token_of(attempt):  # the directory was emptied since the claim
        open(_claim_file(root, token_of(attempt)), "ab").close()
    found = published(root)
    _check_not_replaced(found, attempt)
    sweep(root, attempt)
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
        unreadable=tuple(each for each in found if each.problem is not None),
    )


def publish(
    pending: Pending,
    layout: Layout,
    files: FileEntries,
    *,
    manifest_name: str = MANIFEST,
    write_config: Callable[[Path], object] | None = None,
) -> Path:
    """Run steps 3 to 6: complete the folder, rename it, replace the tracker; return its path.

    ``files`` are the ranks' files in the folder; ``write_config(path)`` writes the resolved
    configuration.

    Raises OSError, and CheckpointDamaged if a rank's file is missing or its size differs from the
    report.  After an error nothing is published, unless the message reports it as complete.
    """
    _check_still_newest(pending)
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
    _check_still_newest(pending)
    displaced = _beside(final, "old", pending.attempt)
    if final.exists():
        final.rename(displaced)
        fault_point("save.displaced", step=step)
    pending.folder.rename(final)
    fault_point("save.after_rename", step=step)
    _check_still_newest(pending)
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


def abandon(pending: Pending) -> list[str]:
    """Remove the temporary folder of a failed save; a later save removes any remainder.

    Returns one message if the folder did not exist any more, which explains the failure.
    """
    was_swept = not pending.folder.exists()
    shutil.rmtree(pending.folder, ignore_errors=True)
    if not was_swept:
        return []
    return [f"{pending.folder} was removed, by another run that saves to the same directory?"]


def report_once(unreadable: Sequence[CheckpointFolder]) -> list[str]:
    """Return a warning for each unreadable checkpoint that was not reported before."""
    new = [found for found in unreadable if found.folder not in _reported]
    _reported.update(found.folder for found in new)
    return [f"{found.problem}; this checkpoint is skipped and stays" for found in new]


def retire(folder: Path, attempt: str, step: int) -> bool:
    """Delete a published checkpoint; return False for a symbolic link, which is kept.

    The folder is renamed first, so that an interrupted delete leaves no half checkpoint under a
    published name.
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
    """Replace the tracker file atomically; a reader sees the old or the new content."""
    temporary = root / f"{TRACKER}.tmp-{attempt}"
    write_text(temporary, text)
    fault_point("save.before_tracker", step=step)
    temporary.rename(root / TRACKER)
    fsync_folder(root)


def sweep(root: Path, attempt: str) -> None:
    """Remove the leftovers of interrupted saves of ``attempt`` and of earlier runs from ``root``.

    If a save was killed between steps 4 and 5, the displaced checkpoint gets its name back.
    Leftovers of interrupted deletes are removed whichever run they belong to.
    """
    for left in leftovers(root):
        final = root / folder_name(left.iteration)
        if left.kind != "del" and not _is_over(left.attempt, attempt):
            continue
        if left.kind == "old" and not final.exists():
            left.folder.rename(final)
        else:
            shutil.rmtree(left.folder, ignore_errors=True)
    prefix = f"{TRACKER}.tmp-"
    for path in root.glob(f"{prefix}*"):
        if _is_over(path.name.removeprefix(prefix), attempt):
            path.unlink(missing_ok=True)


def _is_over(other: str, attempt: str) -> bool:
    """Return whether the attempt ``other`` no longer writes when ``attempt`` begins a save."""
    return other == attempt or token_of(other) < token_of(attempt)


def _check_still_newest(pending: Pending) -> None:
    """Run `_check_not_replaced` if a later run has claimed a token (reads names only, so cheap)."""
    if newest_token(pending.root) > token_of(pending.attempt):
        _check_not_replaced(published(pending.root), pending.attempt)


def _check_not_replaced(found: Sequence[CheckpointFolder], attempt: str) -> None:
    """Raise CheckpointError if a run that began later has published a checkpoint."""
    for other in found:
        if other.manifest and token_of(other.manifest.attempt) > token_of(attempt):
            raise CheckpointError(
                f"{other.folder} was published by a run that started later "
                f"({other.manifest.attempt}): this one ({attempt}) has been replaced and must not "
                "save here any more"
            )


def _check_space(root: Path, num_bytes: int) -> None:
    stats = os.statvfs(root)
    free = stats.f_bavail * stats.f_frsize
    needed = num_bytes + _SPARE_BYTES
    if free < needed:
        raise CheckpointError(
            f"{root} has {free / 1e6:,.2f} MB free and the checkpoint needs {needed / 1e6:,.2f} MB"
            ": free space, or keep fewer checkpoints with --keep-last-checkpoints"
        )


def _tracker_as_found(root: Path) -> list[str | int] | None:
    path = root / TRACKER
    try:
        return [path.read_text(errors="replace").strip(), path.stat().st_mtime_ns]
    except FileNotFoundError:
        return None


def _beside(folder: Path, kind: str, attempt: str) -> Path:
    return folder.with_name(f"{folder.name}.{kind}-{attempt}")


def take_token(root: Path, known: Iterable[str]) -> int:
    """Claim a token in ``root`` higher than all claimed ones and those of the ``known`` attempts.

    Raises OSError.  A kill at any point leaves at most a claimed token that no run uses.
    """
    known_token = max(map(token_of, known), default=0)
    while True:
        token = max(newest_token(root), known_token) + 1
        path = _claim_file(root, token)
        try:
            with open(path, "xb") as file:
                os.fsync(file.fileno())
        except FileExistsError:
            continue
        fault_point("save.claimed")
        fsync_folder(root)
        if newest_token(root) == token:
            break
        # Another process claimed a higher token since the directory was read.  It may have removed
        # an older claim of this number, so exclusive creation proves nothing: try again.
        path.unlink(missing_ok=True)
    for name in os.listdir(root):
        found = CLAIM.fullmatch(name)
        if found and int(found[1]) < token:
            (root / name).unlink(missing_ok=True)
    return token


def _claim_file(root: Path, token: int) -> Path:
    return root / f".attempt-{token:08d}"
