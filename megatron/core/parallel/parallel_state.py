"""Megatron's ``parallel_state``, for user code that calls it.

The functions read the installed `ProcessGroupCollection`, and the ranks and sizes that user code
has set.  Only the compatibility API imports them; all other code receives its groups as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from warnings import warn

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
from megatron.core.rank_local import each_rank_owns

# What user code has set, in place of the groups: "tp.rank", "pp.size", "virtual.size" and others.
_set_values: dict[str, int | None] = {}
# Return the stages with word and with position embeddings, of the world ranks of a pipeline.
Stages = Callable[[list[int]], list[int]]
_embedding_stages: list[Stages] = []
_gloo_groups: dict[str, ProcessGroup] = {}
each_rank_owns(__name__, "_set_values", "_embedding_stages", "_gloo_groups")


def default_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Return the first and the last rank of a pipeline, which hold the word embedding."""
    return [*dict.fromkeys((pp_ranks[0], pp_ranks[-1]))]


def default_position_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Return the first rank of a pipeline, which holds the position embedding."""
    return [pp_ranks[0]]


def install(groups: ProcessGroupCollection) -> None:
    """Make ``groups`` the ones that the functions of this module return."""
    if is_initialized():
        raise AssertionError(
            "model parallel groups are already initialized: call destroy_model_parallel() first"
        )
    set_installed(groups)


def current() -> ProcessGroupCollection:
    """Return the installed groups.  Raises AssertionError without any."""
    return ProcessGroupCollection.use_mpu_process_groups()


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    expert_model_parallel_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: int = 30,
    order: str = "tp-cp-ep-dp-pp",
    get_embedding_ranks: Stages | None = None,
    get_position_embedding_ranks: Stages | None = None,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: Sequence[str] | None = None,
    sharp_enabled_group: str | None = None,
    *,
    encoder_pipeline_model_parallel_size: int = 0,
) -> None:
    """Create and install the groups of this world.  Collective over all ranks.

    Needs an initialized default process group.  ``virtual_pipeline_model_parallel_size`` only sets
    what `get_virtual_pipeline_model_parallel_world_size` returns.
    ``pipeline_model_parallel_comm_backend``, ``use_sharp`` and ``sharp_enabled_group`` have no
    effect.  Raises RuntimeError for sizes that do not divide the world.
    """
    del pipeline_model_parallel_comm_backend, use_sharp, sharp_enabled_group
    if virtual_pipeline_model_parallel_size is not None and pipeline_model_parallel_size == 1:
        raise RuntimeError(
            f"virtual_pipeline_model_parallel_size {virtual_pipeline_model_parallel_size} needs "
            "pipeline-model-parallel size greater than 1"
        )
    assert dist.is_initialized(), "call torch.distributed.init_process_group first"
    stages = [
        get_embedding_ranks or default_embedding_ranks,
        get_position_embedding_ranks or default_position_embedding_ranks,
    ]
    try:
        dense, expert = make_grids(
            dist.get_world_size(),
            tp=tensor_model_parallel_size,
            pp=pipeline_model_parallel_size,
            cp=context_parallel_size,
            ep=expert_model_parallel_size,
            expt_tp=expert_tensor_parallel_size,
            order=order,
        )
    except ValueError as error:
        raise RuntimeError(f"world_size: {error}") from error
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
        embedding_ranks=get_embedding_ranks and stages[0],
        position_embedding_ranks=get_position_embedding_ranks and stages[1],
    )
    install(groups)
    _embedding_stages.extend(stages)
    if virtual_pipeline_model_parallel_size is not None:
        _set_values["virtual.rank"] = 0
        _set_values["virtual.size"] = virtual_pipeline_model_parallel_size
    if create_gloo_process_groups:
        _create_gloo_groups(groups)
    end_group_threads_at_exit()


def _create_gloo_groups(groups: ProcessGroupCollection) -> None:
    """Create groups for tensors on the CPU, if the backend is not gloo.  Collective."""
    made: dict[tuple[int, ...], ProcessGroup] = {}
    for name in ("dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp"):
        group: ProcessGroup = getattr(groups, name)
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in made:
            made[ranks] = group
            if dist.get_backend(group) == dist.Backend.NCCL:
                made[ranks] = dist.new_group(
                    list(ranks), backend="gloo", use_local_synchronization=True
                )
        _gloo_groups[name] = made[ranks]


def destroy_model_parallel() -> None:
    """Uninstall the groups; the process groups themselves continue to exist."""
    set_installed(None)
    for state in (_set_values, _embedding_stages, _gloo_groups):
        state.clear()


def is_initialized() -> bool:
    """Return whether groups are installed."""
    return get_installed() is not None


model_parallel_is_initialized = is_initialized


def is_unitialized() -> bool:
    """Return whether no groups are installed; deprecated, with Megatron Core's spelling."""
    warn("call is_initialized() in place of is_unitialized()", DeprecationWarning, stacklevel=2)
    return not is_initialized()


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
get_hierarchical_context_parallel_groups = _group("hcp")  # a2a+p2p: inner and outer group
get_tensor_and_context_parallel_group = _group("tp_cp")
get_expert_model_parallel_group = _group("ep")
get_expert_tensor_parallel_group = _group("expt_tp")
get_expert_tensor_and_model_parallel_group = _group("tp_ep")
get_expert_tensor_model_pipeline_parallel_group = _group("tp_ep_pp")
get_inter_distributed_optimizer_instance_group = _group("inter_dist_opt")
get_intra_distributed_optimizer_instance_group = _group("intra_dist_opt")
get_embedding_group = _group("embd")
get_position_embedding_group = _group("pos_embd")


def _data_parallel_name(with_context_parallel: bool, partial_data_parallel: bool) -> str:
    if partial_data_parallel:
        assert with_context_parallel, "partial_data_parallel needs with_context_parallel=True"
        return "intra_dp_cp"
    return "dp_cp" if with_context_parallel else "dp"


def get_data_parallel_group(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """Return the data-parallel group; ``with_context_parallel``: all ranks with equal parameters.

    ``partial_data_parallel``: only those ranks of dp_cp that share one instance of the distributed
    optimizer.
    """
    name = _data_parallel_name(with_context_parallel, partial_data_parallel)
    group: ProcessGroup = getattr(current(), name)
    return group


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """Return the ranks of `get_data_parallel_group` as a group of tensors on the CPU."""
    return _gloo(_data_parallel_name(with_context_parallel, partial_data_parallel))


def get_tensor_and_data_parallel_group(with_context_parallel: bool = False) -> ProcessGroup:
    """Return the group tp x dp; ``with_context_parallel``: all ranks of one pipeline stage."""
    return current().tp_dp_cp if with_context_parallel else current().tp_dp


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> ProcessGroup:
    """Return the ranks that agree on the largest magnitude of an fp8 tensor."""
    if not tp_only_amax_red:
        return get_tensor_and_data_parallel_group(with_context_parallel)
    return current().tp_cp if with_context_parallel else current().tp


def get_expert_data_parallel_group(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup | None:
    """Return the group of ranks with the same experts.

    ``partial_expert_data_parallel``: only those that share one instance of the distributed
    optimizer.
    """
    name = "intra_expt_dp" if partial_expert_data_parallel else "expt_dp"
    return getattr(current() if check_initialized else get_installed(), name, None)


def get_data_modulo_expert_parallel_group(
    partial_expert_data_parallel: bool = False,
) -> ProcessGroup | None:
    """Return `get_expert_data_parallel_group`, under its former name."""
    warn("call get_expert_data_parallel_group", DeprecationWarning, stacklevel=2)
    return get_expert_data_parallel_group(True, partial_expert_data_parallel)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """Return `get_expert_data_parallel_group` as a group of tensors on the CPU."""
    return _gloo("intra_expt_dp" if partial_expert_data_parallel else "expt_dp")


def _gloo(name: str) -> ProcessGroup:
    assert name in _gloo_groups, (
        f"the gloo group {name} is not initialized: call initialize_model_parallel with "
        "create_gloo_process_groups=True"
    )
    return _gloo_groups[name]


# -- sizes and ranks --------------------------------------------------------------------------


def _size(name: str, without_torch: int | None = None, instead: str = "") -> Callable[[], int]:
    """Return a getter of the size of the installed group ``name``, unless it was set.

    ``without_torch``: size in a process without torch.distributed; ``instead``: axis that was set
    in place of ``name``, if there are no groups.
    """
    return lambda: _value(f"{name}.size", without_torch, f"{instead}.size")


def _rank(name: str, without_torch: int | None = None, instead: str = "") -> Callable[[], int]:
    """Return a getter of this rank's index in the installed group ``name``, as `_size`."""
    return lambda: _value(f"{name}.rank", without_torch, f"{instead}.rank")


def _value(key: str, without_torch: int | None, instead: str) -> int:
    if (value := _set_values.get(key)) is not None:
        return value
    if get_installed() is None and (value := _set_values.get(instead)) is not None:
        return value
    if without_torch is not None and not dist.is_initialized() and get_installed() is None:
        return without_torch
    name, _, kind = key.partition(".")
    group: ProcessGroup = getattr(current(), name)
    return group.size() if kind == "size" else group.rank()


def _set_size(name: str) -> Callable[[int | None], None]:
    """Return a function that sets what the getter of the size of group ``name`` returns."""

    def set_size(world_size: int | None) -> None:
        """Set the size; None: the size of the group."""
        _set_values[f"{name}.size"] = world_size

    return set_size


def _set_rank(name: str) -> Callable[[int | None], None]:
    """Return a function that sets what the getter of this rank's index in ``name`` returns."""

    def set_rank(rank: int | None) -> None:
        """Set the rank; None: this rank's index in the group."""
        _set_values[f"{name}.rank"] = rank

    return set_rank


def _world_rank(name: str, place: Callable[[], int]) -> Callable[[], int]:
    """Return a getter of the world rank of the member at ``place()`` of the group ``name``."""
    return lambda: dist.get_process_group_ranks(getattr(current(), name))[place()]


get_tensor_model_parallel_world_size = _size("tp")
get_tensor_model_parallel_rank = _rank("tp")
get_tensor_model_parallel_src_rank = _world_rank("tp", lambda: 0)
get_pipeline_model_parallel_world_size = _size("pp")
get_pipeline_model_parallel_rank = _rank("pp")
get_pipeline_model_parallel_first_rank = _world_rank("pp", lambda: 0)
get_pipeline_model_parallel_last_rank = _world_rank("pp", lambda: _stage(-1, of=0))
get_pipeline_model_parallel_next_rank = _world_rank("pp", lambda: _stage(1))
get_pipeline_model_parallel_prev_rank = _world_rank("pp", lambda: _stage(-1))
get_model_parallel_src_rank = _world_rank("mp", lambda: 0)
get_context_parallel_world_size = _size("cp", 0)
get_context_parallel_rank = _rank("cp", 0)
get_tensor_and_context_parallel_world_size = _size("tp_cp", 0)
get_tensor_and_context_parallel_rank = _rank("tp_cp", 0)
get_expert_model_parallel_world_size = _size("ep", 0)
get_expert_model_parallel_rank = _rank("ep", 0)
get_expert_tensor_parallel_world_size = _size("expt_tp", instead="tp")
get_expert_tensor_parallel_rank = _rank("expt_tp", instead="tp")
get_expert_tensor_and_model_parallel_world_size = _size("tp_ep", 0)
get_expert_tensor_and_model_parallel_rank = _rank("tp_ep", 0)
set_tensor_model_parallel_world_size = _set_size("tp")
set_tensor_model_parallel_rank = _set_rank("tp")
set_pipeline_model_parallel_world_size = _set_size("pp")
set_pipeline_model_parallel_rank = _set_rank("pp")
set_virtual_pipeline_model_parallel_world_size = _set_size("virtual")
set_virtual_pipeline_model_parallel_rank = _set_rank("virtual")
set_data_parallel_rank = _set_rank("dp")
set_expert_model_parallel_world_size = _set_size("ep")
set_expert_model_parallel_rank = _set_rank("ep")
set_expert_tensor_parallel_world_size = _set_size("expt_tp")
set_expert_tensor_parallel_rank = _set_rank("expt_tp")


def _stage(step: int, of: int | None = None) -> int:
    """Return the pipeline stage ``step`` after stage ``of``, by default this one, cyclically."""
    start = get_pipeline_model_parallel_rank() if of is None else of
    return (start + step) % get_pipeline_model_parallel_world_size()


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int] | None:
    """Return the world ranks of this rank's context-parallel group."""
    group = get_context_parallel_group(check_initialized)
    return None if group is None else dist.get_process_group_ranks(group)


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Return the number of model chunks of a rank that user code has set, or None."""
    return _set_values.get("virtual.size")


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Return the model chunk that user code has set, or None."""
    return _set_values.get("virtual.rank")


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank is on the first stage, unless ignored with its first chunk."""
    return _is_chunk(0, ignore_virtual, vp_stage) and get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank is on the last stage, unless ignored with its last chunk."""
    last = get_pipeline_model_parallel_world_size() - 1
    is_last = get_pipeline_model_parallel_rank() == last
    return _is_chunk(-1, ignore_virtual, vp_stage) and is_last


def _is_chunk(place: int, ignore_virtual: bool, vp_stage: int | None) -> bool:
    chunks = get_virtual_pipeline_model_parallel_world_size()
    if ignore_virtual or chunks is None:
        return True
    assert vp_stage is not None, "vp_stage must be passed if virtual pipeline is enabled"
    return vp_stage == place % chunks


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank holds the word embedding; unless ignored, in chunk ``vp_stage``."""
    ranks = _ranks_with_embedding(0)
    rank = dist.get_rank()
    if ignore_virtual or rank not in ranks[:1] + ranks[-1:]:
        return rank in ranks
    at_end = is_pipeline_first_stage if rank == ranks[0] else is_pipeline_last_stage
    return at_end(False, vp_stage)


def is_rank_in_position_embedding_group() -> bool:
    """Return whether this rank holds the position embedding."""
    return dist.get_rank() in _ranks_with_embedding(1)


def _ranks_with_embedding(which: int) -> list[int]:
    """Return the ranks of this pipeline with word (0) or position (1) embeddings."""
    groups = get_installed()
    if groups is None:
        return []
    default = default_position_embedding_ranks if which else default_embedding_ranks
    stages = _embedding_stages[which] if _embedding_stages else default
    group = groups.pos_embd if which else groups.embd
    members = dist.get_process_group_ranks(group) if group.size() > 1 else []
    return members or stages(dist.get_process_group_ranks(groups.pp))


def get_data_parallel_world_size(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> int:
    """Return the size of `get_data_parallel_group`."""
    name = _data_parallel_name(with_context_parallel, partial_data_parallel)
    return _value(f"{name}.size", 0, "")


def get_data_parallel_rank(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> int:
    """Return this rank's index in `get_data_parallel_group`."""
    name = _data_parallel_name(with_context_parallel, partial_data_parallel)
    return _value(f"{name}.rank", 0, "") if _set_values.get("dp.rank") is None else _rank("dp")()


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Return the world rank of the first member of `get_data_parallel_group`."""
    return dist.get_global_rank(get_data_parallel_group(with_context_parallel), 0)


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """Return the size of `get_expert_data_parallel_group`."""
    return _value(f"{'intra_' * partial_expert_data_parallel}expt_dp.size", 0, "")


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """Return this rank's index in `get_expert_data_parallel_group`."""
    return _value(f"{'intra_' * partial_expert_data_parallel}expt_dp.rank", 0, "")


def get_all_ranks() -> str:
    """Return this rank's indices in tp, dp, cp, pp and ep, joined by underscores."""
    ranks = (
        get_tensor_model_parallel_rank(),
        get_data_parallel_rank(),
        get_context_parallel_rank(),
        get_pipeline_model_parallel_rank(),
        get_expert_model_parallel_rank(),
    )
    return "_".join(map(str, ranks))
