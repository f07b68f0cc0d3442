"""Saving a run."""

from __future__ import annotations

import argparse
import enum
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.collectives import broadcast_json
from megatron.core.dist_checkpointing.folders import Found
from megatron.core.dist_checkpointing.formats import FORMATS
from megatron.core.dist_checkpointing.serialization import Contents, Saved, save
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.checkpointing.rng_state import rng_state
from megatron.training.checkpointing.run_tensors import (
    RunParts,
    model_tensors,
    optimizer_tensors,
)
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.printing import print_rank_0

# The reference's number for its arrangement of query, key and value rows, which is ours too.
CHECKPOINT_VERSION = 3.0


def save_run(
    config: CheckpointConfig,
    parts: RunParts,
    counters: Mapping[str, Any],
    *,
    asked: Mapping[str, Any],
    write_config: Callable[[Path], object] | None = None,
) -> int | None:
    """Publish a checkpoint of ``counters["iteration"]`` in ``--save``.  Collective over all ranks.

    ``counters`` comes back from `load_run`; ``asked`` is the parsed command line, and
    ``write_config(path)`` writes the resolved one.  Returns the iteration of the checkpoint that
    ``--save-retain-interval`` deleted, if any.  Raises SaveFailed on every rank if any rank fails:
    then nothing was published, earlier checkpoints are whole, and training may go on.
    """
    assert config.save is not None, "save_run without --save"
    iteration = int(counters["iteration"])
    print_rank_0(
        f"saving checkpoint at iteration {iteration:7d} to {config.save} "
        f"in {config.ckpt_format} format"
    )
    format = FORMATS[config.ckpt_format]
    tensors = model_tensors(parts, padded=format.is_foreign)
    if not config.no_save_optim:
        tensors += optimizer_tensors(parts, padded=format.is_foreign)
    contents = Contents(
        tensors=tensors,
        rank_state=None if config.no_save_rng else {"rng_state": rng_state()},
        common=_common(config, parts, counters, asked),
        layout=layout_of(parts.groups),
        write_config=write_config,
    )
    saved = save(
        Path(config.save),
        iteration,
        contents,
        parts.groups.world,
        share_work=config.ckpt_fully_parallel_save,
        format=format,
    )
    tp, pp = parts.groups.tp, parts.groups.pp
    print_rank_0(
        f"  successfully saved checkpoint from iteration {iteration:7d} to {config.save} "
        f"[ t {tp.rank() + 1}/{tp.size()}, p {pp.rank() + 1}/{pp.size()} ]"
    )
    deleted: int | None = broadcast_json(
        _retire_previous(config, saved, iteration), parts.groups.world
    )
    return deleted


def layout_of(groups: ProcessGroupCollection) -> dict[str, Any]:
    """Degrees and rank order: two runs with equal layouts have equal ranks."""
    return {
        "world_size": groups.world.size(),
        "dense": [list(axis) for axis in groups.dense_grid.sizes.items()],
        "expert": [list(axis) for axis in groups.expert_grid.sizes.items()],
    }


def _common(
    config: CheckpointConfig,
    parts: RunParts,
    counters: Mapping[str, Any],
    asked: Mapping[str, Any],
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


def _retire_previous(config: CheckpointConfig, saved: Saved, iteration: int) -> int | None:
    """On rank 0: delete the checkpoint before this one, unless its iteration is to be kept."""
    previous = saved.previous
    if not _is_to_retire(config.save_retain_interval, previous, iteration):
        return None
    assert previous is not None
    try:
        if not commit.retire(previous.folder, saved.attempt, iteration):
            return None
    except OSError as error:  # the new checkpoint is safe, which is what counts
        print_rank_0(f"WARNING: {previous.folder} could not be deleted: {error}")
        return None
    print_rank_0(
        f"  successfully deleted checkpoint from iteration {previous.iteration:7d} at {config.save}"
    )
    return previous.iteration


def _is_to_retire(interval: int | None, previous: Found | None, iteration: int) -> bool:
    if interval is None or previous is None or previous.iteration is None:
        return False
    return previous.iteration != iteration and previous.iteration % interval != 0
