"""Save a run: tensors, random states, counters and arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.core.config.value_types import Arguments, JsonObject
from megatron.core.dist_checkpointing.all_ranks import PendingSave, SaveResult, begin, finish
from megatron.core.dist_checkpointing.folders import Retention
from megatron.core.dist_checkpointing.formats import FORMATS, Contents
from megatron.core.dist_checkpointing.local import save_local
from megatron.core.dist_checkpointing.manifest import RERUN_STATE, RNG_STATE
from megatron.core.dist_checkpointing.plain_values import plain
from megatron.core.dist_checkpointing.records import SavePlan, TensorRecord, to_write
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.training.checkpointing.base_model import of_adapters
from megatron.training.checkpointing.checkpoint_tensors import (
    RunParts,
    model_tensors,
    optimizer_tensors,
    rng_state,
)
from megatron.training.checkpointing.non_persistent import check_host_memory, replication_of
from megatron.training.checkpointing.paths import RunContent
from megatron.training.checkpointing.source import STARTED_FROM
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.process.rank_print import print_detail, print_rank_0

# Megatron-LM's version number for its order of query, key and value rows, also used here.
CHECKPOINT_VERSION = 3.0


def save_run(
    config: CheckpointConfig,
    parts: RunParts,
    counters: Mapping[str, float],
    *,
    is_local: bool = False,
    plan: SavePlan | None = None,
    go_on: Callable[[PendingSave], object] | None = None,
    **values: Any,
) -> SaveResult | None:
    """Publish a checkpoint of ``counters["iteration"]`` in ``--save``.  Collective over all ranks.

    `load_run` returns ``counters`` again; ``values``: see `contents_of`.  ``is_local``: save each
    rank's part in a directory of its node, with copies on its peers.  ``plan``: the same at every
    save while the tensors stay the same.  ``go_on`` receives the save once its folder exists, to
    write it in the background; the result is then None.

    Raises SaveFailed on every rank if any rank fails: then nothing is published, earlier
    checkpoints are complete, and training may continue.
    """
    contents = contents_of(config, parts, counters, **values)
    world = parts.groups.world
    iteration = contents.common["iteration"]
    assert config.save is not None, "a save without --save"
    if is_local:
        saved = save_local(
            Path(config.save),
            iteration,
            contents,
            world,
            share_work=_shares_work(config),
            replication=replication_of(config),
        )
    else:
        begun = begin(
            Path(config.save),
            iteration,
            contents,
            world,
            share_work=config.ckpt_fully_parallel_save,
            format=FORMATS[config.ckpt_format],
            retention=retention_of(config, counters),
            plan=plan,
        )
        if go_on is not None:
            go_on(begun)
            return None
        saved = finish(begun, world)
    log_saved(parts.groups, saved)
    return saved


def retention_of(config: CheckpointConfig, counters: Mapping[str, float]) -> Retention:
    """Return which checkpoints are kept once that of ``counters`` is saved."""
    best = int(counters.get("best_iteration", 0)) or None if config.save_best else None
    return Retention(config.keep_last_checkpoints, config.save_retain_interval, best)


def contents_of(
    config: CheckpointConfig,
    parts: RunParts,
    counters: Mapping[str, float],
    *,
    asked: Arguments,
    write_config: Callable[[Path], object] | None = None,
) -> Contents:
    """Return what this rank saves.

    ``asked`` is the parsed command line, and ``write_config(path)`` writes the resolved one.
    Collective over data-parallel ranks: completes pending parameter all-gathers first.
    """
    print_detail(
        f"saving checkpoint at iteration {int(counters['iteration']):7d} to {config.save} "
        f"in {config.ckpt_format} format"
    )
    return Contents(
        tensors=_tensors(config, parts, padded=FORMATS[config.ckpt_format].is_foreign),
        rank_state=_rank_state(config, parts),
        common=_common(config, parts, counters, asked),
        layout=layout_of(parts.groups),
        write_config=write_config,
    )


def _tensors(config: CheckpointConfig, parts: RunParts, *, padded: bool) -> list[TensorRecord]:
    tensors = model_tensors(parts, padded=padded)
    if parts.base is not None:
        tensors = of_adapters(tensors)
    if not config.no_save_optim:
        tensors += optimizer_tensors(parts, padded=padded)
    return tensors


def announce_memory(config: CheckpointConfig, parts: RunParts) -> None:
    """Log what --non-persistent-ckpt-type in_memory costs.  Collective over all ranks.

    Raises ConfigError on every rank if a node has not enough free memory.
    """
    tensors = _tensors(config, parts, padded=False)
    mine = to_write(tensors) if _shares_work(config) else tensors
    size = sum(tensor.num_bytes for tensor in mine)
    print_rank_0(check_host_memory(config, size, parts.groups.world))


def _rank_state(config: CheckpointConfig, parts: RunParts) -> JsonObject | None:
    state = {} if config.no_save_rng else {RNG_STATE: rng_state()}
    if parts.rerun is not None and (rerun := parts.rerun.saved_state()) is not None:
        state[RERUN_STATE] = rerun
    return state or None


def _shares_work(config: CheckpointConfig) -> bool:
    return config.non_persistent_local_ckpt_algo == "fully_parallel"


def log_saved(groups: ProcessGroupCollection, saved: SaveResult) -> None:
    """Log that a checkpoint is on disk, which ones were deleted, and its warnings."""
    tp, pp, root = groups.tp, groups.pp, saved.folder.parent
    print_rank_0(
        f"  successfully saved checkpoint from iteration {saved.iteration:7d} to {root} "
        f"[ t {tp.rank() + 1}/{tp.size()}, p {pp.rank() + 1}/{pp.size()} ]"
    )
    for iteration in saved.deleted:
        print_rank_0(f"  successfully deleted checkpoint from iteration {iteration:7d} at {root}")
    for sentence in saved.warnings:
        print_rank_0(f"WARNING: {sentence}")


def layout_of(groups: ProcessGroupCollection) -> JsonObject:
    """Return the world size and the parallel sizes, in rank order.

    In two runs with equal layouts, equal ranks hold the same parts.
    """
    return {
        "world_size": groups.world.size(),
        "dense": [list(axis) for axis in groups.dense_grid.sizes.items()],
        "expert": [list(axis) for axis in groups.expert_grid.sizes.items()],
    }


def _common(
    config: CheckpointConfig, parts: RunParts, counters: Mapping[str, float], asked: Arguments
) -> RunContent:
    optimizer = None if config.no_save_optim else parts.optimizer
    scheduler = None if optimizer is None else parts.scheduler
    origin = dict(parts.base or {})
    if parts.started_from is not None:
        origin[STARTED_FROM] = parts.started_from
    return {
        "checkpoint_version": CHECKPOINT_VERSION,
        "stages": [list(layers) for layers in parts.stages],
        "iteration": int(counters["iteration"]),
        "counters": dict(counters),
        "args": {name: plain(value) for name, value in {**asked, **origin}.items()},
        "optimizer": None if optimizer is None else optimizer.scalar_state(),
        "opt_param_scheduler": None if scheduler is None else scheduler.state_dict(),
        "objective_state": parts.objective_state,
        "torch_version": torch.__version__,
        "python_version": sys.version.split()[0],
    }
