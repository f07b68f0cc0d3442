"""Write why this rank ends, for the supervisor (tools/launch.py), which merges all ranks' reports.

A rank writes ``rank_R.json`` into the folder that the environment variable MEGATRON_EXIT_REPORT_DIR
names; without it nothing is written.  The file replaces a previous one atomically, and the first
report of a process is kept: a later one is usually a consequence.  A killed process writes none.

``code`` is the exit status that the process ends with: 0 done or stopped as asked, 2 error of the
user, 16 restart to disambiguate, 17 result failed validation, 65 damaged data or checkpoint, 1
everything else.  This module imports nothing heavy and does not communicate.

It also knows the current phase of the run in words, for the report of lack of memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core.config.errors import MegatronError
from megatron.core.rank_local import each_rank_owns

FOLDER = "MEGATRON_EXIT_REPORT_DIR"
RERUN_CODES = (16, 17)
_FIRST_CAUSE = re.compile(r"rank (\d+) failed: ")

_noted: dict[str, Any] = {}
_suspects: list[dict[str, Any]] = []
_phase = "start-up"
each_rank_owns(__name__, "_noted", "_suspects", "_phase")


def note(**values: Any) -> None:
    """Store values of the report in memory.

    They are ``iteration`` (last finished step), ``saved_iteration``, ``loaded_iteration`` and
    ``loaded_from`` (folder of the checkpoint).
    """
    _noted.update(values)


def blame(rank: int, why: str, *, host: str | None = None, device: str | None = None) -> None:
    """Add a suspect: a rank whose hardware may be faulty.

    Without ``host`` the supervisor looks up the host of the rank.
    """
    _suspects.append({"rank": rank, "host": host, "device": device, "why": why})


def write(kind: str, code: int, reason: str | None = None) -> None:
    """Write the report, unless this process has written one.

    ``kind`` is done, stopped, user_error, rerun or failed.  A report that cannot be written is
    dropped: the supervisor then has the exit status only.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    rank = int(os.environ.get("RANK") or 0)
    path = Path(folder) / f"rank_{rank}.json"
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        draft.write_text(json.dumps(_report(rank, kind, code, reason)))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # fails if there is a report
        draft.unlink()


def write_error(error: BaseException) -> None:
    """Write the report of a process that ``error`` ends."""
    code = exit_code(error)
    write(kind_of(code), code, f"{type(error).__name__}: {error}")


def exit_code(error: BaseException) -> int:
    """Return the exit status of a program that ``error`` ends."""
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            return error.code
        return 0 if error.code is None else 1
    return error.exit_code if isinstance(error, MegatronError) else 1


def kind_of(code: int) -> str:
    """Return the kind of report of an error that ends a process with ``code``."""
    if code in RERUN_CODES:
        return "rerun"
    return {0: "done", 2: "user_error"}.get(code, "failed")


def _report(rank: int, kind: str, code: int, reason: str | None) -> dict[str, Any]:
    causes = _FIRST_CAUSE.findall(reason or "")
    caused_by = int(causes[-1]) if causes else None
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time_s": time.time(),
        "code": code,
        "kind": kind,
        "reason": reason,
        "caused_by": None if caused_by == rank else caused_by,
        "iteration": None,
        "loaded_iteration": None,
        "loaded_from": None,
        "saved_iteration": None,
        **_noted,
        "suspects": list(_suspects),
    }


def current_phase() -> str:
    """Return the words of the innermost phase; after an exception, of the phase that failed."""
    return _phase


def enter_phase(words: str) -> None:
    """Set the current phase."""
    global _phase
    _phase = words


@contextlib.contextmanager
def in_phase(words: str) -> Iterator[None]:
    """Decorate a function: the current phase is ``words`` while it runs."""
    before = _phase
    enter_phase(words)
    yield
    enter_phase(before)
