"""Folders of runs in shared memory, /dev/shm/megatron-{user id}-{name}, and what killed runs left.

A process that uses a folder holds a shared lock on the file ``lock`` in it.  The kernel releases
the lock when the process ends, however it ends, so that a folder without one belongs to nobody.  A
start deletes such folders of its user: at once, or an hour after the last write if they hold
checkpoints, because a run that is started again resumes from them.
"""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LOCK = "lock"
HEARTBEATS = "heartbeats"
_UNUSED_S = 3600.0


def lock_folder(folder: Path) -> io.FileIO:
    """Create ``folder`` if it is missing; return its open lock.  Deletes what killed runs left."""
    _delete_unused(folder.parent, keep=folder)
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = io.FileIO(folder / LOCK, "a")
        fcntl.flock(file, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.fstat(file.fileno()).st_ino == (folder / LOCK).stat().st_ino:
                os.utime(folder / LOCK)
                return file
        file.close()  # another start has deleted the folder before this process had the lock


def _delete_unused(parent: Path, keep: Path) -> None:
    """Delete the folders of this user in ``parent`` that no process uses, except ``keep``."""
    for folder in parent.glob(f"megatron-{os.getuid()}-*"):
        with suppress(OSError):
            found = folder.lstat()
            is_mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
            if folder == keep or not is_mine:
                continue
            # One that has checkpoints, or no lock yet, may be needed within an hour.
            names = {entry.name for entry in folder.iterdir()}
            if LOCK not in names or names - {LOCK, HEARTBEATS}:
                last_s = max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
                if time.time() - last_s < _UNUSED_S:
                    continue
            locks = [io.FileIO(lock, "a") for lock in folder.rglob(LOCK)]
            with suppress(BlockingIOError):  # a process holds it
                for file in locks:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            for file in locks:
                file.close()
