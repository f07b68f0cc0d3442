"""Fencing tokens: the order in which runs began to save to a directory.  No torch, no clock.

    {root}/.attempt-00000007    claimed by one process; only the newest file is kept

A process claims the next number when it first saves to a directory.  Attempt ids, which are part of
the names of temporary folders and of manifests, begin with the number (``00000007-{random}``).  Any
process can therefore decide which of two runs began later, even if the clocks of their hosts
differ.  The claim relies on exclusive creation of a file (O_EXCL), which is atomic on local and
network file systems.

Ids written by an earlier version of this project contain a time instead; they count as token 0,
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
    """Return the token in the id of an attempt, 0 if it has none."""
    found = _ID.fullmatch(attempt)
    return int(found[1]) if found else 0


def newest_token(root: Path) -> int:
    """Return the highest token among claims and leftover folders in ``root``; 0 for none."""
    found = (_CLAIM.fullmatch(name) or _LEFTOVER.fullmatch(name) for name in os.listdir(root))
    return max((int(match[1]) for match in found if match), default=0)


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
        found = _CLAIM.fullmatch(name)
        if found and int(found[1]) < token:
            (root / name).unlink(missing_ok=True)
    return token


def restore_claim(root: Path, token: int) -> None:
    """Recreate the file of a claimed token if the directory was emptied since the claim."""
    if newest_token(root) < token:
        open(_claim_file(root, token), "ab").close()


def _claim_file(root: Path, token: int) -> Path:
    return root / f".attempt-{token:08d}"
