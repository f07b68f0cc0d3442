"""Megatron's ``parallel_state``, for user code that calls it.

The functions read one variable, the installed `ProcessGroupCollection`.  Only the compatibility API
imports them (models, the DDP wrapper and the optimizer when called without groups); all other code
receives its groups as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.parallel.communicators import Communicators, end_group_threads_at_exit
from megatron.core.parallel.process_groups_config import (
    ProcessGroupCollection,
    create_process_groups,
    get_installed,
    make_grids,
    set_installed,
)


def install(groups: ProcessGroupCollection) -> None:
    """Make ``groups`` the ones that the functions of this module return."""
    if is_initialized():
        raise RuntimeError("model parallel groups exist already; destroy_model_parallel() first")
    set_installed(groups)


def current() -> ProcessGroupCollection:
    """Return the installed groups.  Raises RuntimeError without any."""
    return ProcessGroupCollection.use_mpu_process_groups()


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    expert_model_parallel_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    encoder_pipeline_model_parallel_size: int = 0,
    order: str = "tp-cp-ep-dp-pp",
    nccl_communicator_config_path: str | None = None,
    high_priority_stream_groups: Sequence[str] | None = None,
    distributed_timeout_minutes: int = 30,
) -> None:
    """Create and install the groups of this world.  Collective over all ranks.

    Needs an initialized default process group.  ``virtual_pipeline_model_parallel_size`` has no
    effect: it is a property of the model, not of the groups.
    """
    dense, expert = make_grids(
        dist.get_world_size(),
        tp=tensor_model_parallel_size,
        pp=pipeline_model_parallel_size,
        cp=context_parallel_size,
        ep=expert_model_parallel_size,
        expt_tp=expert_tensor_parallel_size,
        order=order,
    )
    groups = create_process_groups(
        dense,
        expert,
        communicators=Communicators.from_flags(
            timedelta(minutes=distributed_timeout_minutes),
            nccl_communicator_config_path,
            high_priority_stream_groups or (),
        ),
        context_levels=hierarchical_context_parallel_sizes,
        num_distributed_optimizer_instances=num_distributed_optimizer_instances,
        encoder_stages=encoder_pipeline_model_parallel_size,
    )
    install(groups)
    end_group_threads_at_exit()


def destroy_model_parallel() -> None:
    """Uninstall the groups; the process groups themselves continue to exist."""
    set_installed(None)


def is_initialized() -> bool:
    """Return whether groups are installed."""
    return get_installed() is not None


model_parallel_is_initialized = is_initialized
is_unitialized = lambda: not is_initialized()  # noqa: E731  (the spelling scripts use)


# -- groups ---------------------------------------------------------------------------------


def _group(name: str) -> Callable[..., ProcessGroup | None]:
    """Return a getter of the installed group ``name`` (see `ProcessGroupCollection`)."""

    def get(check_initialized: bool = True) -> ProcessGroup | None:
        """Return this rank's group; without ``check_initialized``, None if none is installed."""
        return getattr(current() if check_initialized else get_installed(), name, None)

    return get


get_model_parallel_group = _group("mp")
get_tensor_model_parallel_group = _group("tp")
get_pipeline_model_parallel_group = _group("pp")
get_context_parallel_group = _group("cp")
get_tensor_and_context_parallel_group = _group("tp_cp")
get_expert_model_parallel_group = _group("ep")
get_expert_tensor_parallel_group = _group("expt_tp")
get_expert_tensor_and_model_parallel_group = _group("tp_ep")
get_expert_tensor_model_pipeline_parallel_group = _group("tp_ep_pp")
get_inter_distributed_optimizer_instance_group = _group("inter_dist_opt")
get_intra_distributed_optimizer_instance_group = _group("intra_dist_opt")
get_embedding_group = _group("embd")
get_position_embedding_group = _group("pos_embd")


def get_data_parallel_group(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """Return the data-parallel group; ``with_context_parallel``: all ranks with equal parameters.

    ``partial_data_parallel``: only those ranks of dp_cp that share one instance of the distributed
    optimizer.
    """
    if partial_data_parallel:
        assert with_context_parallel, "an optimizer is shared with context parallelism"
        return current().intra_dp_cp
    return current().dp_cp if with_context_parallel else current().dp


def get_hierarchical_context_parallel_groups() -> list[ProcessGroup]:
    """Return the inner and the outer group of two-level context parallelism (a2a+p2p)."""
    return [current().cp_inner, current().cp_outer]


def get_tensor_and_data_parallel_group(with_context_parallel: bool = False) -> ProcessGroup:
    """Return the group tp x dp; ``with_context_parallel``: all ranks of one pipeline stage."""
    return current().tp_dp_cp if with_context_parallel else current().tp_dp


def get_expert_data_parallel_group(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """Return the group of ranks with the same experts.

    ``partial_expert_data_parallel``: only those that share one instance of the distributed
    optimizer.
    """
    return current().intra_expt_dp if partial_expert_data_parallel else current().expt_dp


# -- sizes and ranks --------------------------------------------------------------------------


def _size(name: str) -> Callable[[], int]:
    """Return a getter of the size of the installed group ``name``."""
    return lambda: getattr(current(), name).size()


def _rank(name: str) -> Callable[[], int]:
    """Return a getter of this rank's index in the installed group ``name``."""
    return lambda: getattr(current(), name).rank()


def _world_rank(name: str, place: int) -> Callable[[], int]:
    """Return a getter of the world rank of member ``place`` of the installed group ``name``."""
    return lambda: dist.get_process_group_ranks(getattr(current(), name))[place]


get_tensor_model_parallel_world_size = _size("tp")
get_tensor_model_parallel_rank = _rank("tp")
get_tensor_model_parallel_src_rank = _world_rank("tp", 0)
get_pipeline_model_parallel_world_size = _size("pp")
get_pipeline_model_parallel_rank = _rank("pp")
get_pipeline_model_parallel_first_rank = _world_rank("pp", 0)
get_pipeline_model_parallel_last_rank = _world_rank("pp", -1)
get_context_parallel_world_size = _size("cp")
get_context_parallel_rank = _rank("cp")
get_expert_model_parallel_world_size = _size("ep")
get_expert_model_parallel_rank = _rank("ep")
get_expert_tensor_parallel_world_size = _size("expt_tp")
get_expert_tensor_parallel_rank = _rank("expt_tp")
get_expert_data_parallel_world_size = _size("expt_dp")
get_expert_data_parallel_rank = _rank("expt_dp")


def get_context_parallel_global_ranks() -> list[int]:
    """Return the world ranks of this rank's context-parallel group."""
    return dist.get_process_group_ranks(current().cp)


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Return None: virtual stages are not stored with the groups."""
    return None


get_virtual_pipeline_model_parallel_rank = get_virtual_pipeline_model_parallel_world_size


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank is on the first stage; unless ignored, ``vp_stage`` must be 0."""
    return current().is_first_stage and (ignore_virtual or not vp_stage)


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank is on the last stage; unless ignored, ``vp_stage`` must be 0."""
    return current().is_last_stage and (ignore_virtual or not vp_stage)


def get_data_parallel_world_size(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> int:
    """Return the size of `get_data_parallel_group`."""
    return get_data_parallel_group(with_context_parallel, partial_data_parallel).size()


def get_data_parallel_rank(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> int:
    """Return this rank's index in `get_data_parallel_group`."""
    return get_data_parallel_group(with_context_parallel, partial_data_parallel).rank()


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Return the world rank of the first member of `get_data_parallel_group`."""
    return dist.get_global_rank(get_data_parallel_group(with_context_parallel), 0)
