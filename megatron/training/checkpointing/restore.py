"""Restore the values of a checkpoint besides tensors."""

from __future__ import annotations

from pathlib import Path

from megatron.core.config.value_types import JsonObject
from megatron.core.diagnostics.result_faults import RerunMode, log
from megatron.core.dist_checkpointing.formats import open_reader
from megatron.core.dist_checkpointing.manifest import RERUN_STATE, RNG_STATE
from megatron.core.parallel.json_collectives import all_or_none, is_so_everywhere
from megatron.training.checkpointing.checkpoint_tensors import RunParts
from megatron.training.checkpointing.content_checks import RunContent, check_rank_state
from megatron.training.checkpointing.rng_state import set_rng_state
from megatron.training.checkpointing.save import layout_of
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.process.rank_print import print_rank_0


def read_rank_state(config: CheckpointConfig, folder: Path, parts: RunParts) -> JsonObject:
    """Return this rank's state, empty if the layout of the checkpoint differs.

    Collective over all ranks.
    """

    def read() -> JsonObject | None:
        with open_reader(folder) as reader:
            is_same = reader.manifest.layout == layout_of(parts.groups)
            state = reader.rank_state(parts.groups.world.rank()) if is_same else None
            return None if state is None else check_rank_state(state, folder)

    state = all_or_none(read, folder, parts.groups.world)
    if not is_so_everywhere(state is not None, parts.groups.world) or state is None:
        if not config.no_load_rng:
            print_rank_0(
                "NOTE: random states, and the state of a step that would be computed again, are "
                "not restored: the checkpoint was written in another layout"
            )
        if parts.rerun is not None and parts.rerun.mode != RerunMode.DISABLED:
            log("Job sharding has changed: Rerun state will be ignored", once=True)
        return {}
    return state


def restore_rank_state(config: CheckpointConfig, parts: RunParts, state: JsonObject) -> None:
    """Restore the random states, and the state of a step that would be computed again."""
    if RNG_STATE in state and not config.no_load_rng:
        set_rng_state(state[RNG_STATE])
    if RERUN_STATE in state and parts.rerun is not None:
        parts.rerun.load_saved_state(state[RERUN_STATE])


def restore_scalars(config: CheckpointConfig, parts: RunParts, common: RunContent) -> bool:
    """Restore the state of optimizer and scheduler besides tensors.

    Returns whether the checkpoint had the state of the scheduler.
    """
    if parts.optimizer is None:
        return False
    if config.no_load_optim:
        if not config.load_main_params_from_ckpt:
            parts.optimizer.reload_model_params()
        return False
    assert common["optimizer"] is not None, "the checkpoint holds an optimizer, as was checked"
    parts.optimizer.load_scalar_state(common["optimizer"])
    if parts.scheduler is None or common["opt_param_scheduler"] is None:
        return False
    parts.scheduler.load_state_dict(common["opt_param_scheduler"])
    return True
