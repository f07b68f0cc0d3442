"""--non-persistent-ckpt-type: additional checkpoints of which only the newest is retained.

Global ones are ordinary checkpoints in a directory of their own.  A run resumes from one if it is
newer than the checkpoint that the tracker of --load selects: published after that checkpoint, and
after the tracker was written.  So when a user has set the tracker back to an older iteration, a
non-persistent checkpoint of the abandoned training is not loaded.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.folders import (
    CheckpointChoice,
    Found,
    published,
    read_tracker,
)
from megatron.core.dist_checkpointing.local import Replication, part_root
from megatron.core.dist_checkpointing.manifest import FORMAT
from megatron.training.checkpointing.memory_folder import claim_memory, memory_folder
from megatron.training.checkpointing.paths import check_writable
from megatron.training.config.checkpoint import CheckpointConfig

SUBFOLDER = "non_persistent"


def transient(config: CheckpointConfig) -> CheckpointConfig:
    """Return the configuration with which non-persistent checkpoints are saved."""
    is_local = keeps_parts(config)
    return replace(
        config,
        save=str(parts_root(config) if is_local else _root(config, config.save)),
        keep_last_checkpoints=1,
        save_retain_interval=None,
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


def newer_transient(config: CheckpointConfig, choice: CheckpointChoice | None) -> Found | None:
    """Return the non-persistent checkpoint to load instead of ``choice``, if it is newer."""
    if config.non_persistent_ckpt_type != "global" or not may_go_on(config):
        return None
    assert config.load is not None
    newest = next((f for f in published(_root(config, config.load)) if f.manifest), None)
    if newest is None or newest.manifest is None:
        return None
    return newest if newest.manifest.published_at_ns > decided_at_ns(config, choice) else None


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
