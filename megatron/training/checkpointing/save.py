"""Saving a run."""

from __future__ import annotations

import argparse
import enum
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.folders import Retention
from megatron.core.dist_checkpointing.format import INCREMENTAL
from megatron.core.dist_checkpointing.formats import FORMATS
from megatron.core.dist_checkpointing.local import Replication, save_local
from megatron.core.dist_checkpointing.mapping import SavePlan
from megatron.core.dist_checkpointing.serialization import (
    Contents,
    PendingSave,
    SaveResult,
    begin,
    finish,
)
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.training.checkpointing.checkpoint_tensors import (
    RunParts,
    model_tensors,
    optimizer_tensors,
)
from megatron.training.checkpointing.rng_state import rng_state
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.process.rank_print import print_rank_0

# The reference's number for its arrangement of query, key and value rows, which is ours too.
CHECKPOINT_VERSION = 3.0


def save_run(
    config: CheckpointConfig,
    parts: RunParts,
    counters: Mapping[str, Any],
    *,
    asked: Mapping[str, Any],
    write_config: Callable[[Path], object] | None = None,
    plan: SavePlan | None = None,
) -> SaveResult:
    """Publish a checkpoint of ``counters["iteration"]`` in ``--save``.  Collective over all ranks.

    ``counters`` comes back from `load_run`; ``asked`` is the parsed command line, and
    ``write_config(path)`` writes the resolved one.  Raises SaveFailed on every rank if any rank
    fails: then nothing was published, earlier checkpoints are whole, and training may go on.
    ``plan``: kept from save to save where the tensors stay the same.
    """
    begun = begin_save(config, parts, counters, asked=asked, write_config=write_config, plan=plan)
    saved = finish(begun, parts.groups.world)
    log_saved(parts.groups, saved)
    return saved


def begin_save(
    config: CheckpointConfig,
    parts: RunParts,
    counters: Mapping[str, Any],
    *,
    asked: Mapping[str, Any],
    write_config: Callable[[Path], object] | None = None,
    plan: SavePlan | None = None,
) -> PendingSave:
    """The first part of `save_run`: what is to be written, and a folder for it.  Collective."""
    root, iteration = _announce(config, counters)
    return begin(
        root,
        iteration,
        _contents(config, parts, counters, asked, write_config),
        parts.groups.world,
        share_work=config.ckpt_fully_parallel_save,
        format=INCREMENTAL if config.ckpt_incremental else FORMATS[config.ckpt_format],
        retention=Retention(config.keep_last_checkpoints, config.save_retain_interval),
        plan=plan,
    )


def save_local_run(
    config: CheckpointConfig,
    parts: RunParts,
    counters: Mapping[str, Any],
    *,
    asked: Mapping[str, Any],
    write_config: Callable[[Path], object] | None = None,
) -> SaveResult:
    """As `save_run`, each rank's part into a directory of its node, and copies to its peers."""
    root, iteration = _announce(config, counters)
    copies = config.replication_factor - 1 if config.replication else 0
    saved = save_local(
        root,
        iteration,
        _contents(config, parts, counters, asked, write_config),
        parts.groups.world,
        share_work=config.non_persistent_local_ckpt_algo == "fully_parallel",
        replication=Replication(config.replication_jump or 1, copies),
    )
    log_saved(parts.groups, saved)
    return saved


def _announce(config: CheckpointConfig, counters: Mapping[str, Any]) -> tuple[Path, int]:
    assert config.save is not None, "a save without --save"
    iteration = int(counters["iteration"])
    print_rank_0(
        f"saving checkpoint at iteration {iteration:7d} to {config.save} "
        f"in {config.ckpt_format} format"
    )
    return Path(config.save), iteration


def _contents(
    config: CheckpointConfig,
    parts: RunParts,
    counters: Mapping[str, Any],
    asked: Mapping[str, Any],
    write_config: Callable[[Path], object] | None,
) -> Contents:
    """What this rank holds.  Collective while parameters come in."""
    padded = FORMATS[config.ckpt_format].is_foreign
    tensors = model_tensors(parts, padded=padded)
    if not config.no_save_optim:
        tensors += optimizer_tensors(parts, padded=padded)
    return Contents(
        tensors=tensors,
        rank_state=None if config.no_save_rng else {"rng_state": rng_state()},
        common=_common(config, parts, counters, asked),
        layout=layout_of(parts.groups),
        write_config=write_config,
    )


def log_saved(groups: ProcessGroupCollection, saved: SaveResult) -> None:
    """Print that a checkpoint is on disk, and what was deleted for it."""
    tp, pp, root = groups.tp, groups.pp, saved.folder.parent
    print_rank_0(
        f"  successfully saved checkpoint from iteration {saved.iteration:7d} to {root} "
        f"[ t {tp.rank() + 1}/{tp.size()}, p {pp.rank() + 1}/{pp.size()} ]"
    )
    for iteration in saved.deleted:
        print_rank_0(f"  successfully deleted checkpoint from iteration {iteration:7d} at {root}")
    for sentence in saved.warnings:
        print_rank_0(f"WARNING: {sentence}")


def layout_of(groups: ProcessGroupCollection) -> dict[str, Any]:
    """Degrees and rank order: two runs with equal layouts have equal ranks."""
    return {
        "world_size": groups.world.size(),
        "dense": [list(axis) for axis in groups.dense_grid.sizes.items()],
        "expert": [list(axis) for axis in groups.expert_grid.sizes.items()],
    }


def _common(
    config: CheckpointConfig, parts: RunParts, counters: Mapping[str, Any], asked: Mapping[str, Any]
) -> dict[str, Any]:
    """What is no tensor and the same for all ranks."""
    keeps_optimizer = parts.optimizer is not None and not config.no_save_optim
    return {
        "checkpoint_version": CHECKPOINT_VERSION,
        "stages": [list(layers) for layers in parts.stages],
        "iteration": counters["iteration"],
        "counters": dict(counters),
        "args": {name: plain(value) for name, value in asked.items()},
        "optimizer": parts.optimizer.scalar_state()
        if parts.optimizer is not None and keeps_optimizer
        else None,
        "opt_param_scheduler": parts.scheduler.state_dict()
        if parts.scheduler is not None and keeps_optimizer
        else None,
        "torch_version": torch.__version__,
        "python_version": sys.version.split()[0],
    }


def plain(value: Any) -> Any:
    """``value`` as JSON; what JSON cannot hold becomes its name or its text."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, argparse.Namespace):
        return plain(vars(value))
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return str(value)
