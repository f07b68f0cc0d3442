"""--non-persistent-ckpt-type: checkpoints between those that are kept, the newest only.

Global ones are ordinary checkpoints in a directory of their own.  A run goes on from one that is
newer than what the tracker of --load names: published after it, and after the tracker was written.
So one that was left by an abandoned course is not taken when somebody has set the tracker back.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.folders import (
    CheckpointChoice,
    Found,
    published,
    read_tracker,
)
from megatron.core.dist_checkpointing.manifest import FORMAT
from megatron.training.config.checkpoint import CheckpointConfig

SUBFOLDER = "non_persistent"


def transient(config: CheckpointConfig) -> CheckpointConfig:
    """How the short-lived checkpoints of a run are saved."""
    is_local = config.non_persistent_ckpt_type == "local"
    return replace(
        config,
        save=config.non_persistent_local_ckpt_dir if is_local else str(_root(config, config.save)),
        keep_last_checkpoints=1,
        save_retain_interval=None,
        ckpt_format=FORMAT if is_local else config.ckpt_format,
    )


def newer_transient(config: CheckpointConfig, choice: CheckpointChoice | None) -> Found | None:
    """The short-lived checkpoint to load instead of ``choice``, if there is a newer one."""
    if config.non_persistent_ckpt_type != "global" or not may_go_on(config):
        return None
    assert config.load is not None
    newest = next((f for f in published(_root(config, config.load)) if f.manifest), None)
    if newest is None or newest.manifest is None:
        return None
    return newest if newest.manifest.published_at_ns > decided_at_ns(config, choice) else None


def may_go_on(config: CheckpointConfig) -> bool:
    """Whether the run goes on where ``--load`` ended, not at a step or from weights alone."""
    return config.load is not None and config.ckpt_step is None and not config.finetune


def decided_at_ns(config: CheckpointConfig, choice: CheckpointChoice | None) -> int:
    """What is older than this is not newer than ``choice``."""
    if choice is None or config.load is None:
        return 0
    tracker = None
    with suppress(CheckpointError):  # --load-newest-valid does without, else ``choice`` is an error
        tracker = read_tracker(Path(config.load))
    manifest = choice.found.manifest
    return max(
        tracker.modified_at_ns if tracker else 0, manifest.published_at_ns if manifest else 0
    )


def _root(config: CheckpointConfig, beside: str | None) -> Path:
    if config.non_persistent_global_ckpt_dir is not None:
        return Path(config.non_persistent_global_ckpt_dir)
    assert beside is not None, "a place for short-lived checkpoints"
    return Path(beside) / SUBFOLDER
