"""--non-persistent-ckpt-type: additional checkpoints of which only the newest is retained.

Global ones are ordinary checkpoints in a directory of their own.  A run resumes from one if it is
newer than the checkpoint that the tracker of --load selects: published after that checkpoint, and
after the tracker was written.  So when a user has set the tracker back to an older iteration, a
non-persistent checkpoint of the abandoned training is not loaded.

The folder of in_memory lies in host memory:

    /dev/shm/megatron-{user id}-{hash of --save}/    lock; parts as in `dist_checkpointing.local`

It outlives a killed process, so the next start of the run, which has the same --save, resumes from
it; a lost node is replaced by the copies on its peers.  Runs with another --save have another
folder.  The supervisor may name another folder in MEGATRON_MEMORY_DIR.  Every process of the run
holds a lock on the folder (`megatron.training.process.shared_memory`).  It is deleted at the normal
end of its run.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch.distributed import ProcessGroup

from megatron.core import process_memory
from megatron.core.config.errors import CheckpointError, ConfigError
from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.folders import (
    CheckpointChoice,
    CheckpointFolder,
    published,
    read_tracker,
)
from megatron.core.dist_checkpointing.local import Replication, part_root
from megatron.core.dist_checkpointing.manifest import FORMAT
from megatron.core.parallel.collectives import all_gather_json
from megatron.core.rank_local import each_rank_owns
from megatron.training.checkpointing.paths import check_writable
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.process.shared_memory import SHARED_MEMORY, lock_folder

SUBFOLDER = "non_persistent"


def transient(config: CheckpointConfig) -> CheckpointConfig:
    """Return the configuration with which non-persistent checkpoints are saved."""
    is_local = keeps_parts(config)
    return replace(
        config,
        save=str(parts_root(config) if is_local else _root(config, config.save)),
        keep_last_checkpoints=1,
        save_retain_interval=None,
        save_best=False,
        ckpt_format=FORMAT if is_local else config.ckpt_format,
    )


def keeps_parts(config: CheckpointConfig) -> bool:
    """Return whether each rank keeps its part of a save on its node, on disk or in memory."""
    return config.non_persistent_ckpt_type in ("local", "in_memory")


def parts_root(config: CheckpointConfig) -> Path:
    """Return the directory of the parts on this node; `keeps_parts` must be true."""
    if config.non_persistent_ckpt_type == "in_memory":
        return memory_folder(config)
    assert config.non_persistent_local_ckpt_dir is not None, "the flags were checked"
    return Path(config.non_persistent_local_ckpt_dir)


def replication_of(config: CheckpointConfig) -> Replication:
    """Return the copies of each part that --replication requests."""
    copies = config.replication_factor - 1 if config.replication else 0
    return Replication(config.replication_jump or 1, copies)


def claim_directories(config: CheckpointConfig, rank: int) -> None:
    """Claim the directories that ``rank`` publishes in, before it can be replaced by another run.

    Local.  Raises OSError, CheckpointError.
    """
    assert config.save is not None
    if rank == 0:
        check_writable(config.save)
        commit.claim(Path(config.save))
    if config.non_persistent_ckpt_type is None:
        return
    if config.non_persistent_ckpt_type == "in_memory":
        claim_memory(config)
    place = transient(config).save
    is_local = keeps_parts(config)
    if place is not None and (is_local or rank == 0):
        commit.claim(part_root(Path(place), rank) if is_local else Path(place))


def newer_transient(
    config: CheckpointConfig, choice: CheckpointChoice | None
) -> CheckpointFolder | None:
    """Return the non-persistent checkpoint to load instead of ``choice``, if it is newer."""
    if config.non_persistent_ckpt_type != "global" or not may_go_on(config):
        return None
    assert config.load is not None
    for found in published(_root(config, config.load)):
        if found.manifest is not None:
            is_newer = found.manifest.published_at_ns > decided_at_ns(config, choice)
            return found if is_newer else None
    return None


def may_go_on(config: CheckpointConfig) -> bool:
    """Return whether the run resumes the latest state: no --ckpt-step, no --finetune."""
    return config.load is not None and config.ckpt_step is None and not config.finetune


def decided_at_ns(config: CheckpointConfig, choice: CheckpointChoice | None) -> int:
    """Return the time at which ``choice`` was made, in ns: a newer checkpoint replaces it.

    That is the later one of the publication of ``choice`` and the modification of the tracker file.
    """
    if choice is None or config.load is None:
        return 0
    tracker = None
    with suppress(CheckpointError):  # only with --load-newest-valid: otherwise `find` has raised
        tracker = read_tracker(Path(config.load))
    manifest = choice.found.manifest
    return max(
        tracker.modified_at_ns if tracker else 0, manifest.published_at_ns if manifest else 0
    )


def _root(config: CheckpointConfig, beside: str | None) -> Path:
    if config.non_persistent_global_ckpt_dir is not None:
        return Path(config.non_persistent_global_ckpt_dir)
    assert beside is not None, "non-persistent checkpoints need a directory"
    return Path(beside) / SUBFOLDER


FOLDER = "MEGATRON_MEMORY_DIR"
_held: dict[Path, io.FileIO] = {}  # folder -> its locked file
each_rank_owns(__name__, "_held")


def memory_folder(config: CheckpointConfig) -> Path:
    """Return the folder of this run on this node."""
    if given := os.environ.get(FOLDER):
        return Path(given)
    assert config.save is not None, "the flags were checked: in_memory needs --save"
    run = hashlib.sha256(str(Path(config.save).resolve()).encode()).hexdigest()[:16]
    return (
        Path(config.non_persistent_local_ckpt_dir or SHARED_MEMORY)
        / f"megatron-{os.getuid()}-{run}"
    )


def claim_memory(config: CheckpointConfig) -> None:
    """Create and lock this run's folder, and delete unused ones of ended runs.  Local.

    Raises CheckpointError if the folder belongs to another user, OSError.
    """
    folder = memory_folder(config)
    if folder in _held:
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise CheckpointError(
            f"{folder} belongs to another user or is not a folder: delete it, or give "
            "--non-persistent-local-ckpt-dir another folder in memory"
        )
    _held[folder] = lock_folder(folder)


def remove_memory(config: CheckpointConfig) -> None:
    """Delete the folder at the normal end of the run.  Every rank may call it."""
    folder = memory_folder(config)
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(KeyError):
        _held.pop(folder).close()


def check_host_memory(config: CheckpointConfig, part_bytes: int, group: ProcessGroup) -> str:
    """Return a line with the memory that saves need and that is free.  Collective.

    ``part_bytes``: size of this rank's part.  A node stores a part once, however many of its ranks
    receive it (`save_local`), and a save is written beside the previous one.  Raises ConfigError on
    every rank if a node has less free memory than its saves need.
    """
    folder = memory_folder(config)
    node = f"{process_memory.boot_id()} {folder.stat().st_dev} {folder}"
    reports = all_gather_json((node, part_bytes, _free_bytes(folder)), group)
    replication = replication_of(config)
    stored = {
        (reports[(rank + distance * replication.jump) % len(reports)][0], rank)
        for distance in range(replication.copies + 1)
        for rank in range(len(reports))
    }
    needed: dict[str, int] = Counter()
    for where, rank in stored:
        needed[where] += 2 * reports[rank][1]
    free = {where: size for where, _, size in reports}
    tightest = min(free, key=lambda where: free[where] - needed[where])
    ranks = [rank for rank, report in enumerate(reports) if report[0] == tightest]
    line = (
        f"in-memory checkpoints need up to {needed[tightest] / 1e9:.3f} GB of host memory on the "
        f"node of ranks {ranks[0]} to {ranks[-1]}, where {free[tightest] / 1e9:.3f} GB are free"
    )
    if free[tightest] < needed[tightest]:
        raise ConfigError(
            f"--non-persistent-ckpt-type in_memory: {line}; use --non-persistent-ckpt-type local, "
            "or fewer copies with --replication-factor"
        )
    return line


def _free_bytes(folder: Path) -> int:
    """Return the memory that parts in ``folder`` may use; its present parts count as free."""
    used = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # another rank may delete old parts meanwhile
                used += Path(place, name).stat().st_blocks * 512
    stats = os.statvfs(folder)
    return used + min(stats.f_bavail * stats.f_frsize, process_memory.free_for_job())
