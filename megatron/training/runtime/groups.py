"""Create the process groups of a run from its configuration."""

from __future__ import annotations

import os
from datetime import timedelta

from megatron.core.device import launch_order
from megatron.core.distributed.sharding import is_fully_sharded, num_instances
from megatron.core.parallel.communicators import Communicators
from megatron.core.parallel.process_groups_config import (
    ProcessGroupCollection,
    create_process_groups,
    make_grids,
)
from megatron.core.parallel.rank_grid import RankGrid
from megatron.training.config.run import RunConfig
from megatron.training.process.rank_print import print_rank_0


def grids_of(config: RunConfig) -> tuple[RankGrid, RankGrid]:
    """Return the rank grids (rank order and group sizes) for dense and for expert layers."""
    m = config.model
    return make_grids(
        config.world_size,
        tp=m.tensor_model_parallel_size,
        pp=m.pipeline_model_parallel_size,
        cp=m.context_parallel_size,
        ep=m.expert_model_parallel_size,
        expt_tp=m.expert_tensor_parallel_size,
        order="tp-cp-ep-pp-dp" if config.distributed.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )


def create_groups(config: RunConfig, *, only_mine: bool = False) -> ProcessGroupCollection:
    """Create all process groups of the run.  Collective over all ranks.

    With ``only_mine`` only the groups of this rank are created, without communication; this needs a
    fake process group.
    """
    dense, expert = grids_of(config)
    return create_process_groups(
        dense,
        expert,
        communicators=Communicators.from_flags(
            timedelta(minutes=config.distributed.distributed_timeout_minutes),
            config.distributed.nccl_communicator_config_path,
            high_priority_groups(config),
            warn=lambda warning: print_rank_0(f"WARNING: {warning}"),
        ),
        context_levels=config.model.hierarchical_context_parallel_sizes,
        num_distributed_optimizer_instances=num_instances(config.ddp),
        encoder_stages=config.model.encoder_pipeline_model_parallel_size,
        only_mine=only_mine,
    )


def high_priority_groups(config: RunConfig) -> tuple[str, ...]:
    """Return the groups that use high-priority streams: those of the flag, and by default others.

    FSDP's all-gathers run beside the kernels of the previous layer and must not queue after them.
    Without FSDP the same holds for tensor- and context-parallel collectives, which overlap with
    GEMMs, unless their kernels start in the order of their launch.
    """
    model = config.model
    groups = config.distributed.high_priority_stream_groups
    if is_fully_sharded(config.ddp):
        groups += ("dp_cp", "ep_dp") if model.expert_model_parallel_size > 1 else ("dp_cp",)
    elif not launch_order.is_kept(os.environ):
        groups += ("tp",) if model.tensor_model_parallel_size > 1 else ()
        groups += ("cp", "cp_inner", "cp_outer") if model.context_parallel_size > 1 else ()
    return tuple(dict.fromkeys(groups))
