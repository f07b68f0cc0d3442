"""Check environment variables and folders before the run starts, and set those of a GPU.

The functions do not communicate.  Every rank finds the same problems, unless hosts differ.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from megatron.core.dist_checkpointing.folders import TRACKER, is_filled
from megatron.training.config.run import RunConfig

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAST_PORT = 65535
_RECORDED_COLLECTIVES = "2000"


def set_gpu_defaults(environ: MutableMapping[str, str]) -> None:
    """Set what Triton and NCCL read from the environment, unless the user has set it.

    Call it before the first kernel and the first process group.  Triton's cache moves from the home
    folder, which many nodes may share and lock, to this node.  NCCL records its last collectives
    for the report of a hang, and torch writes them when one times out.
    """
    if "TRITON_CACHE_DIR" not in environ and (folder := _triton_folder()) is not None:
        environ["TRITON_CACHE_DIR"] = str(folder)
    environ.setdefault("TORCH_FR_BUFFER_SIZE", _RECORDED_COLLECTIVES)
    environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def _triton_folder() -> Path | None:
    """Return a folder of this node that only this user can write to; None if there is none.

    Processes load compiled code from it, so that a folder which another user made is not used.
    """
    folder = Path(tempfile.gettempdir()) / f"megatron-triton-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return folder if is_own and not found.st_mode & 0o022 else None


def launch_problems(environ: Mapping[str, str]) -> list[str]:
    """Return the problems of the rank and size variables that a launcher sets."""
    problems: list[str] = []
    values: dict[str, int] = {}
    for name, least in (
        ("WORLD_SIZE", 1),
        ("RANK", 0),
        ("LOCAL_WORLD_SIZE", 1),
        ("LOCAL_RANK", 0),
    ):
        text = environ.get(name, "")
        if text == "":
            continue
        number = _whole_number(text)
        if number is None or number < least:
            problems.append(
                f"environment variable {name}={text!r}: a whole number of at least {least} is "
                "needed; start with torchrun, which sets it, or unset it"
            )
        else:
            values[name] = number
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if rank in values and size in values and values[rank] >= values[size]:
            problems.append(
                f"environment variable {rank}={values[rank]}, but {size} is {values[size]}: set "
                f"{rank} to a number from 0 to {values[size] - 1}, another one in each process"
            )
    return problems


def rendezvous_problems(environ: Mapping[str, str], world_size: int) -> list[str]:
    """Return the problems of the variables by which several processes find each other."""
    if world_size == 1 and not needs_rendezvous(environ):
        return []
    missing = [name for name in _RENDEZVOUS if not environ.get(name)]
    problems = []
    if missing:
        problems.append(
            f"WORLD_SIZE is {world_size}, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set, so the ranks cannot find each "
            "other: start with torchrun, or unset WORLD_SIZE and RANK to train in one process"
        )
    port = environ.get("MASTER_PORT", "")
    number = _whole_number(port)
    least = 0 if world_size == 1 else 1  # with 0 a single rank takes any free port
    if port and (number is None or not least <= number <= _LAST_PORT):
        problems.append(
            f"environment variable MASTER_PORT={port!r}: a port number from {least} to "
            f"{_LAST_PORT} is needed, the same on all ranks"
        )
    return problems


def needs_rendezvous(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher has started this process, even as the only one."""
    return bool(environ.get("RANK") and environ.get("MASTER_ADDR"))


def folder_problems(config: RunConfig) -> Iterator[str]:
    """Yield a message for each output folder of the command line that is not writable."""
    for flag, folder in (
        ("--save", config.checkpoint.save),
        ("--tensorboard-dir", config.logging.tensorboard_dir),
        ("--config-logger-dir", config.model.config_logger_dir or None),
        ("--save-hf", config.checkpoint.save_hf),
    ):
        if folder is None:
            continue
        reason = None
        try:
            path = Path(folder)
            may_be_done = (Path(config.checkpoint.save or "") / TRACKER).is_file()
            if flag == "--save-hf" and is_filled(path) and not may_be_done:
                reason = "it has files, and a new folder is written"
            existing = next(each for each in (path, *path.absolute().parents) if each.exists())
            if not existing.is_dir():
                reason = f"{existing} is not a folder"
            elif not os.access(existing, os.W_OK | os.X_OK):
                reason = f"this user may not write into {existing}"
        except OSError as error:
            reason = error.strerror
        if reason is not None:
            yield f"{flag} {folder}: {reason}; choose another folder, or change its permissions"


def _whole_number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
