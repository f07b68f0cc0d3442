"""Choose the checkpoint of a directory to load, and those that retention deletes.

Reads names, manifests and the tracker; no torch.

    {root}/iter_0000100/                         published
    {root}/iter_0000100.tmp-{attempt}/           being written, or left by a killed save
    {root}/iter_0000100.old-{attempt}/           about to be replaced by a new one of its step
    {root}/iter_0000100.del-{attempt}/           being deleted
    {root}/release/                              published, without an iteration
    {root}/latest_checkpointed_iteration.txt     the tracker: an iteration, or ``release``

The tracker is replaced after the folder is renamed, so a kill between the two leaves an outdated
tracker.  A user may also have set the tracker back by hand to continue from an older iteration.
Both cases look the same, so each save stores the tracker it found at its start (text and
modification time) in its manifest:

- the text differs now: the user has changed it, and it is used;
- text and time are equal: nobody changed it, it is outdated and the newest checkpoint is loaded;
- equal text, other time: if it was written after the newest publish, the user wrote the same text
  on purpose and it is used; else the directory is a copy, and the tracker is outdated.

"Newest" is by order of publication, not by iteration: after going back from 200 to 100, the new 110
is newer than the abandoned 200.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.manifest import Manifest, read_manifest

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_PUBLISHED = re.compile(r"iter_([0-9]{7,})")
_LEFTOVER = re.compile(r"(?:iter_([0-9]{7,})|release)\.(tmp|old|del)-(.+)")
# Fencing tokens: the order in which runs began to save, see `commit`.
_TOKEN = r"[0-9]{8,15}"  # an id with a time begins with 16 digits
_ID = re.compile(rf"({_TOKEN})-.+")
CLAIM = re.compile(rf"\.attempt-({_TOKEN})")
_TEMPORARY = re.compile(rf".+\.(?:tmp|old|del)-({_TOKEN})-.+")
_SHOWN = 40  # characters of an invalid tracker file in the message
_ITERATION = re.compile(r"0*([1-9][0-9]{0,17})")  # content of the tracker file


@dataclass(frozen=True)
class CheckpointFolder:
    """A published folder; ``problem`` is the error if its manifest cannot be used."""

    folder: Path
    iteration: int | None  # None: release
    manifest: Manifest | None = None
    problem: CheckpointError | None = None


class Leftover(NamedTuple):
    """A folder that an interrupted save or delete left; ``kind`` is tmp, old or del."""

    folder: Path
    iteration: int  # 0: release
    kind: str
    attempt: str


@dataclass(frozen=True)
class CheckpointChoice:
    """The checkpoint to load, the older ones (newest first), and a note for the user."""

    found: CheckpointFolder
    older: tuple[CheckpointFolder, ...] = ()
    note: str | None = None


class Tracker(NamedTuple):
    """Contents of the tracker file: its iteration (None: release), and when it was written."""

    text: str
    modified_at_ns: int
    iteration: int | None


def folder_name(iteration: int | None) -> str:
    """Return ``iter_0000100``, or ``release`` for None and 0 (weights that no run has trained)."""
    return f"iter_{iteration:07d}" if iteration else RELEASE


def leftovers(root: Path) -> Iterator[Leftover]:
    """Yield the folders that interrupted saves and deletes left in ``root``."""
    for path in root.iterdir():
        found = _LEFTOVER.fullmatch(path.name)
        if found and os.path.isdir(path):
            yield Leftover(path, int(found[1] or 0), found[2], found[3])


def is_filled(folder: Path) -> bool:
    """Return whether ``folder`` exists and has files."""
    return folder.is_dir() and any(folder.iterdir())


def read_tracker(root: Path) -> Tracker | None:
    """Read the tracker of ``root``; return None if there is none.

    Raises CheckpointError unless it can be read and holds an iteration above 0 or the word release.
    """
    path = root / TRACKER
    try:
        text = path.read_text(errors="replace").strip()
        modified_at_ns = path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}; delete it to load the newest"
        ) from None
    if text == RELEASE:
        return Tracker(text, modified_at_ns, None)
    found = _ITERATION.fullmatch(text)
    if not found:
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise CheckpointError(
            f"{path} holds {shown!r}, which is neither an iteration above 0 nor the word release: "
            "write the iteration to load into it, or delete it to load the newest"
        )
    return Tracker(text, modified_at_ns, int(found[1]))


def published(root: Path) -> list[CheckpointFolder]:
    """Return the published checkpoints of ``root``, newest publish first.

    A folder with a final name but without a manifest was written by another program and is left
    out.  A displaced folder (``.old-``) counts if nothing has its final name.  A folder that cannot
    be read is returned with `CheckpointFolder.problem` set, so that it does not block the others.
    """
    if not root.is_dir():
        return []
    candidates = {
        path.name: (path, int(match[1]))
        for path in root.iterdir()
        # Not isdir: it is false when stat fails, and a checkpoint would look missing.
        if (match := _PUBLISHED.fullmatch(path.name)) and not os.path.isfile(path)
    }
    for left in leftovers(root):
        if left.kind == "old" and left.iteration:
            candidates.setdefault(folder_name(left.iteration), (left.folder, left.iteration))
    found = (_read_folder(path, iteration) for path, iteration in candidates.values())
    return _sort_newest_first([folder for folder in found if folder])


def choose(
    root: Path, *, step: int | None = None, lenient: bool = False
) -> CheckpointChoice | None:
    """Return the checkpoint of ``root`` to load, or None if ``root`` has none.

    ``step`` requests that iteration.  Raises CheckpointError if the folder of ``step`` or of the
    tracker does not exist, or the tracker cannot be read.  With ``lenient``, a bad tracker selects
    the newest checkpoint instead.
    """
    order = published(root)
    if step is not None:
        return CheckpointChoice(_find_iteration(root, order, step, f"--ckpt-step {step}"))
    try:
        return _choose_by_tracker(root, order)
    except CheckpointError as problem:
        if not lenient or not order:
            raise
        return _choose_newest(order, str(problem))


def _choose_by_tracker(root: Path, order: list[CheckpointFolder]) -> CheckpointChoice | None:
    """Choose by the tracker; by order of publication if it is absent or outdated."""
    tracker = read_tracker(root)
    if tracker is None:
        return _choose_newest(order, "there is no tracker file") if order else None
    readable = next((found for found in order if found.manifest), None)
    if readable and readable.iteration != tracker.iteration and _is_outdated(tracker, readable):
        why = f"the tracker lags behind at {tracker.text}"
        return _choose_newest(order[order.index(readable) :], why)
    if order and order[0].iteration == tracker.iteration:
        return _choose_newest(order, None)
    named = _find_iteration(root, order, tracker.iteration, f"{root / TRACKER}")
    older = order[order.index(named) + 1 :] if named in order else []
    note = None
    if order:
        newest = folder_name(order[0].iteration)
        note = f"the tracker was set back to {tracker.text}: {newest} is newer and is not loaded"
    return CheckpointChoice(named, tuple(older), note)


def _choose_newest(order: list[CheckpointFolder], why: str | None) -> CheckpointChoice:
    note = f"{why}; the newest checkpoint is {order[0].folder.name}" if why else None
    return CheckpointChoice(order[0], tuple(order[1:]), note)


def _find_iteration(
    root: Path, order: list[CheckpointFolder], iteration: int | None, who: str
) -> CheckpointFolder:
    """Return the published folder of the iteration that ``who`` (the tracker or a flag) names."""
    for found in order:
        if found.iteration == iteration:
            return found
    folder = root / folder_name(iteration)
    if folder.is_dir():  # a release, another format, or ours without its manifest
        return _read_folder(folder, iteration) or CheckpointFolder(folder, iteration)
    have = ", ".join(str(f.iteration) for f in order) or "none"
    raise CheckpointError(f"{who} names {folder}, which is not there; published iterations: {have}")


def _read_folder(folder: Path, iteration: int | None) -> CheckpointFolder | None:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as problem:
        return CheckpointFolder(folder, iteration, problem=problem)
    return CheckpointFolder(folder, iteration, manifest) if manifest else None


def _sort_newest_first(found: list[CheckpointFolder]) -> list[CheckpointFolder]:
    """Sort by publication.  A damaged manifest counts as published after all lower iterations.

    Two runs that saved at the same time may have the same sequence number: the later run is newer.
    """
    known = {f.iteration or 0: _publish_of(f.manifest) for f in found if f.manifest}

    def order(f: CheckpointFolder) -> tuple[int, int, int]:
        iteration = f.iteration or 0
        if f.manifest:
            return (*_publish_of(f.manifest), iteration)
        before = (publish for i, publish in known.items() if i < iteration)
        return (*max(before, default=(0, 0)), iteration)

    return sorted(found, key=order, reverse=True)


def _publish_of(manifest: Manifest) -> tuple[int, int]:
    return manifest.sequence, token_of(manifest.attempt)


def _is_outdated(tracker: Tracker, newest: CheckpointFolder) -> bool:
    """Return whether the tracker is outdated: the newest save was killed before replacing it."""
    manifest = newest.manifest
    if manifest is None:
        return False
    before = manifest.tracker_before
    if before is None or before[0] != tracker.text:
        return False
    if before[1] == tracker.modified_at_ns:
        return True
    return tracker.modified_at_ns <= manifest.published_at_ns


@dataclass(frozen=True)
class Retention:
    """Keep the ``last`` newest readable checkpoints, iterations that are multiples, and ``best``.

    With ``multiples_of`` alone only the checkpoint before the newest may be deleted: older ones may
    come from runs without this option.
    """

    last: int | None = None
    multiples_of: int | None = None
    best: int | None = None

    def select_expired(self, order: Sequence[CheckpointFolder]) -> list[CheckpointFolder]:
        """Return the checkpoints of ``order`` (newest first) to delete; never the newest.

        A checkpoint with an unreadable manifest neither counts nor is deleted: counting it could
        delete the last loadable one, and it may be from a newer version of this program.
        """
        readable = [found for found in order if found.problem is None]
        old = readable[self.last :] if self.last is not None else readable[1:2]
        old = [found for found in old if found.iteration != self.best]
        multiples = self.multiples_of
        if multiples is None:
            return [] if self.last is None else old
        return [found for found in old if (found.iteration or 0) % multiples]


KEEP_ALL = Retention()


def token_of(attempt: str) -> int:
    """Return the token in the id of an attempt, 0 if it has none."""
    found = _ID.fullmatch(attempt)
    return int(found[1]) if found else 0


def newest_token(root: Path) -> int:
    """Return the highest token among claims and leftover folders in ``root``; 0 for none."""
    found = (CLAIM.fullmatch(name) or _TEMPORARY.fullmatch(name) for name in os.listdir(root))
    return max((int(match[1]) for match in found if match), default=0)
