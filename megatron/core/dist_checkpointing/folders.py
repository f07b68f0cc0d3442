"""Which checkpoint of a directory is meant, and which stay there.

Reads names, manifests and the tracker; no torch.

    {root}/iter_0000100/                         published
    {root}/iter_0000100.tmp-{attempt}/           being written, or left by a killed save
    {root}/iter_0000100.old-{attempt}/           about to be replaced by a new one of its step
    {root}/iter_0000100.del-{attempt}/           being deleted
    {root}/release/                              published, without an iteration
    {root}/latest_checkpointed_iteration.txt     the tracker: an iteration, or ``release``

The tracker is replaced after the folder was renamed, so a kill between the two leaves it behind.
Somebody may also have set it back by hand, to go on from an older step.  The two look alike, so
each save writes into its manifest what the tracker was when it began (text and modification time):

- the text is another now: somebody changed it since, and is obeyed;
- text and time are the same: nobody touched it, it lags behind the newest publish;
- same text, other time: written again after the newest publish it was meant, else it is a copy.

"Newest" counts publishes, not iterations: after going back from 200 to 100, the new 110 is newer
than the abandoned 200.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.manifest import Manifest, read_manifest

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_PUBLISHED = re.compile(r"iter_(\d{7,})")
_LEFTOVER = re.compile(r"(?:iter_(\d{7,})|release)\.(tmp|old|del)-.+")


@dataclass(frozen=True)
class Found:
    """A published folder; ``problem`` says why its manifest cannot be used."""

    folder: Path
    iteration: int | None  # None: release
    manifest: Manifest | None = None
    problem: CheckpointError | None = None


@dataclass(frozen=True)
class Choice:
    """The folder to load, older ones newest first, and what the user should know about it."""

    found: Found
    older: tuple[Found, ...] = ()
    note: str | None = None


@dataclass(frozen=True)
class Tracker:
    """The tracker file: its iteration (None: release) and when it was written."""

    text: str
    modified_at_ns: int
    iteration: int | None


def folder_name(iteration: int | None) -> str:
    """``iter_0000100``; ``release`` for None, and for 0: weights that no step of a run made."""
    return f"iter_{iteration:07d}" if iteration else RELEASE


def leftovers(root: Path) -> Iterator[tuple[Path, int, str]]:
    """Folders that an interrupted save or delete left: path, iteration (0: release), and kind.

    The kind is tmp, old or del.
    """
    for path in root.iterdir():
        found = _LEFTOVER.fullmatch(path.name)
        if found and path.is_dir():
            yield path, int(found[1] or 0), found[2]


def read_tracker(root: Path) -> Tracker | None:
    """The tracker of ``root``, None if there is none.

    Raises CheckpointError unless it holds an iteration above 0 or the word release.
    """
    path = root / TRACKER
    try:
        text = path.read_text(errors="replace").strip()
        modified_at_ns = path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
    if text == RELEASE:
        return Tracker(text, modified_at_ns, None)
    if not text.isdecimal() or int(text) == 0:
        raise CheckpointError(
            f"{path} holds {text!r}, which is neither an iteration above 0 nor the word release: "
            "write the iteration to load into it, or delete it to load the newest"
        )
    return Tracker(text, modified_at_ns, int(text))


def published(root: Path) -> list[Found]:
    """The published checkpoints of ``root``, newest publish first.

    A folder of a final name without a manifest was not published by us and is left out.  One that
    was being replaced when its save was killed counts if nothing took its place.
    """
    if not root.is_dir():
        return []
    candidates = {
        path.name: (path, int(match[1]))
        for path in root.iterdir()
        if (match := _PUBLISHED.fullmatch(path.name)) and path.is_dir()
    }
    for path, iteration, kind in leftovers(root):
        if kind == "old" and iteration:
            candidates.setdefault(folder_name(iteration), (path, iteration))
    found = [_look_at(path, iteration) for path, iteration in candidates.values()]
    return _newest_first([f for f in found if f is not None])


def choose(root: Path, *, step: int | None = None, lenient: bool = False) -> Choice | None:
    """The checkpoint of ``root`` to load: iteration ``step`` if given; None if there is none.

    Raises CheckpointError if ``step`` names a folder that is not there, or the tracker does and
    not ``lenient``; a lenient choice is then the newest there is.
    """
    order = published(root)
    if step is not None:
        return Choice(_named(root, order, step, f"--ckpt-step {step}"))
    try:
        return _as_tracked(root, order)
    except CheckpointError as problem:
        if not lenient or not order:
            raise
        return _newest(order, str(problem))


def _as_tracked(root: Path, order: list[Found]) -> Choice | None:
    """What the tracker means, and what it means if it is absent or lags behind."""
    tracker = read_tracker(root)
    if tracker is None:
        return _newest(order, "there is no tracker file") if order else None
    if order and order[0].iteration == tracker.iteration:
        return _newest(order, None)
    if order and _lags(tracker, order[0]):
        return _newest(order, f"the tracker lags behind at {tracker.text}")
    named = _named(root, order, tracker.iteration, f"{root / TRACKER}")
    older = order[order.index(named) + 1 :] if named in order else []
    note = None
    if order:
        newest = folder_name(order[0].iteration)
        note = f"the tracker was set back to {tracker.text}: {newest} is newer and is not loaded"
    return Choice(named, tuple(older), note)


def _newest(order: list[Found], why: str | None) -> Choice:
    note = f"{why}; the newest checkpoint is {order[0].folder.name}" if why else None
    return Choice(order[0], tuple(order[1:]), note)


def _named(root: Path, order: list[Found], iteration: int | None, who: str) -> Found:
    """The published folder that the tracker or the user names."""
    for found in order:
        if found.iteration == iteration:
            return found
    folder = root / folder_name(iteration)
    if folder.is_dir():  # a release, another format, or ours without its manifest
        return _look_at(folder, iteration) or Found(folder, iteration)
    have = ", ".join(str(f.iteration) for f in order) or "none"
    raise CheckpointError(f"{who} names {folder}, which is not there; published iterations: {have}")


def _look_at(folder: Path, iteration: int | None) -> Found | None:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as problem:
        return Found(folder, iteration, problem=problem)
    return Found(folder, iteration, manifest) if manifest else None


def _newest_first(found: list[Found]) -> list[Found]:
    """By publish.  One with a damaged manifest counts as next after the lower iterations."""
    known = {f.iteration or 0: f.manifest.sequence for f in found if f.manifest}

    def order(f: Found) -> tuple[int, int]:
        iteration = f.iteration or 0
        if f.manifest:
            return f.manifest.sequence, iteration
        return max((s for i, s in known.items() if i < iteration), default=0), iteration

    return sorted(found, key=order, reverse=True)


def _lags(tracker: Tracker, newest: Found) -> bool:
    """Whether the tracker is behind only because the newest save was killed before it."""
    if newest.manifest is None:
        return False
    before = newest.manifest.tracker_before
    if before is None or before[0] != tracker.text:
        return False
    if before[1] == tracker.modified_at_ns:
        return True
    return tracker.modified_at_ns <= newest.manifest.published_at_ns


@dataclass(frozen=True)
class Retention:
    """Keep the ``last`` newest whole ones, and those whose iteration is a multiple.

    With ``multiples_of`` alone only the one before the newest is looked at: older ones are those
    of runs that did not ask for it.
    """

    last: int | None = None
    multiples_of: int | None = None

    def doomed(self, order: Sequence[Found]) -> list[Found]:
        """What may be deleted of ``order``, which is newest first; never its first.

        A damaged one does not count as kept: were it the only older one, nothing would be left to
        go back to.
        """
        if self.last is not None:
            whole = [i for i, found in enumerate(order) if found.problem is None]
            old = order[whole[self.last - 1] + 1 :] if len(whole) >= self.last else ()
        else:
            old = order[1:2] if self.multiples_of is not None else ()
        return [found for found in old if not self._is_multiple(found)]

    def _is_multiple(self, found: Found) -> bool:
        return self.multiples_of is not None and (found.iteration or 0) % self.multiples_of == 0


KEEP_ALL = Retention()
