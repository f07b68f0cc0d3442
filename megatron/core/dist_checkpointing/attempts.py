"""Fencing tokens: the order in which runs began to use a save directory.  No torch, no clock.

    {root}/.attempt-00000007    claimed by one process; the newest one stays

A process claims the next number when it first uses a directory to save: at the start of the run,
or at its first save.  The number comes first in the names of its temporary folders and in its
manifests (``00000007-{random}``), so every process can tell which of two runs began later, on
whatever clock.  Creating a file that must not exist yet is atomic on local and network disks.

Ids that an earlier version of this project wrote hold a time instead.  They count as token 0:
older than every claim.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from megatron.core.diagnostics.fault_injection import fault_point
from megatron.core.dist_checkpointing.manifest import fsync_folder

_TOKEN = r"[0-9]{8,15}"  # an id with a time begins with 16 digits
_ID = re.compile(rf"({_TOKEN})-.+")
_CLAIM = re.compile(rf"\.attempt-({_TOKEN})")
_LEFTOVER = re.compile(rf".+\.(?:tmp|old|del)-({_TOKEN})-.+")


def token_of(attempt: str) -> int:
    """The token in the id of an attempt; 0 where there is none."""
    found = _ID.fullmatch(attempt)
    return int(found[1]) if found else 0


def newest_token(root: Path) -> int:
    """The highest token that was claimed in ``root`` or stands in a leftover; 0 for none."""
    found = (_CLAIM.fullmatch(name) or _LEFTOVER.fullmatch(name) for name in os.listdir(root))
    return max((int(match[1]) for match in found if match), default=0)


def take_token(root: Path, known: Iterable[str]) -> int:
    """Claim a token in ``root`` above all claimed ones and those of the ``known`` attempts.

    Raises OSError.  Killed anywhere, it leaves at most a token that nobody uses.
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
        # Others claimed since the first look, and may have removed a file of this number.
        path.unlink(missing_ok=True)
    for name in os.listdir(root):
        found = _CLAIM.fullmatch(name)
        if found and int(found[1]) < token:
            (root / name).unlink(missing_ok=True)
    return token


def restore_claim(root: Path, token: int) -> None:
    """Put the file of a claimed token back if somebody emptied the directory meanwhile."""
    if newest_token(root) < token:
        open(_claim_file(root, token), "ab").close()


def _claim_file(root: Path, token: int) -> Path:
    return root / f".attempt-{token:08d}"
