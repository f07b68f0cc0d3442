"""--non-persistent-ckpt-type global: checkpoints between those that are kept, the newest only.

They are ordinary checkpoints in a directory of their own.  A run goes on from one that is newer
than what the tracker of --load names: published after it, and after the tracker was written.  So
one that was left by an abandoned course is not taken when somebody has set the tracker back.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron.core.dist_checkpointing.folders import Choice, Found, published, read_tracker
from megatron.training.config.checkpoint import CheckpointConfig

SUBFOLDER = "non_persistent"


def transient(config: CheckpointConfig) -> CheckpointConfig:
    """How the short-lived checkpoints of a run are saved."""
    return replace(
        config,
        save=str(_root(config, config.save)),
        keep_last_checkpoints=1,
        save_retain_interval=None,
    )


def newer_transient(config: CheckpointConfig, choice: Choice | None) -> Found | None:
    """The short-lived checkpoint to load instead of ``choice``, if there is a newer one."""
    is_asked = config.non_persistent_ckpt_type == "global" and config.ckpt_step is None
    if not is_asked or config.load is None or config.finetune:
        return None
    newest = next((f for f in published(_root(config, config.load)) if f.manifest), None)
    if newest is None or newest.manifest is None:
        return None
    tracker = read_tracker(Path(config.load)) if choice is not None else None
    times = [tracker.modified_at_ns] if tracker is not None else []
    if choice is not None and choice.found.manifest is not None:
        times.append(choice.found.manifest.published_at_ns)
    return newest if newest.manifest.published_at_ns > max(times, default=0) else None


def _root(config: CheckpointConfig, beside: str | None) -> Path:
    if config.non_persistent_global_ckpt_dir is not None:
        return Path(config.non_persistent_global_ckpt_dir)
    assert beside is not None, "a place for short-lived checkpoints"
    return Path(beside) / SUBFOLDER
