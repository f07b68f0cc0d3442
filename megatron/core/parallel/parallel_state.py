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
        _virtual.set_rank(0)
        _virtual.set_size(virtual_pipeline_model_parallel_size)
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


# -- groups, sizes and ranks ----------------------------------------------------------------


class _Axis:
    """The installed group ``name``, and the size and rank that user code has set in its place.

    ``without_torch``: size and rank in a process without torch.distributed; ``instead``: the axis
    whose set values count if this one has none, and there are no groups.
    """

    def __init__(self, name: str, without_torch: int | None = None, instead: str = "") -> None:
        self.name = name
        self.without_torch = without_torch
        self.instead = instead

    def group(self, check_initialized: bool = True) -> ProcessGroup | None:
        """Return this rank's group; without ``check_initialized``, None if none is installed."""
        return getattr(current() if check_initialized else get_installed(), self.name, None)

    def size(self) -> int:
        """Return the number of ranks."""
        return self._value("size")

    def rank(self) -> int:
        """Return this rank's index in the group."""
        return self._value("rank")

    def set_size(self, world_size: int | None) -> None:
        """Set the size; None: the size of the group."""
        _set_values[f"{self.name}.size"] = world_size

    def set_rank(self, rank: int | None) -> None:
        """Set the rank; None: this rank's index in the group."""
        _set_values[f"{self.name}.rank"] = rank

    def first_rank(self) -> int:
        """Return the world rank of the group's first member."""
        return self.member(0)

    def member(self, place: int) -> int:
        """Return the world rank of the member at ``place``, which counts cyclically."""
        return dist.get_process_group_ranks(getattr(current(), self.name))[place % self.size()]

    def _value(self, kind: str) -> int:
        if (value := _set_values.get(f"{self.name}.{kind}")) is not None:
            return value
        if get_installed() is None:
            if (value := _set_values.get(f"{self.instead}.{kind}")) is not None:
                return value
            if self.without_torch is not None and not dist.is_initialized():
                return self.without_torch
        group: ProcessGroup = getattr(current(), self.name)
        return group.size() if kind == "size" else group.rank()


_tp = _Axis("tp")
_pp = _Axis("pp")
_dp = _Axis("dp", 0)
_cp = _Axis("cp", 0)
_tp_cp = _Axis("tp_cp", 0)
_ep = _Axis("ep", 0)
_expt_tp = _Axis("expt_tp", instead="tp")
_tp_ep = _Axis("tp_ep", 0)
_mp = _Axis("mp")
_virtual = _Axis("virtual")  # model chunks of a rank, which have no group

get_tensor_model_parallel_group = _tp.group
get_tensor_model_parallel_world_size = _tp.size
get_tensor_model_parallel_rank = _tp.rank
get_tensor_model_parallel_src_rank = _tp.first_rank
set_tensor_model_parallel_world_size = _tp.set_size
set_tensor_model_parallel_rank = _tp.set_rank
get_pipeline_model_parallel_group = _pp.group
get_pipeline_model_parallel_world_size = _pp.size
get_pipeline_model_parallel_rank = _pp.rank
get_pipeline_model_parallel_first_rank = _pp.first_rank
set_pipeline_model_parallel_world_size = _pp.set_size
set_pipeline_model_parallel_rank = _pp.set_rank
set_virtual_pipeline_model_parallel_world_size = _virtual.set_size
set_virtual_pipeline_model_parallel_rank = _virtual.set_rank
set_data_parallel_rank = _dp.set_rank
get_context_parallel_group = _cp.group
get_context_parallel_world_size = _cp.size
get_context_parallel_rank = _cp.rank
get_tensor_and_context_parallel_group = _tp_cp.group
get_tensor_and_context_parallel_world_size = _tp_cp.size
get_tensor_and_context_parallel_rank = _tp_cp.rank
get_expert_model_parallel_group = _ep.group
get_expert_model_parallel_world_size = _ep.size
get_expert_model_parallel_rank = _ep.rank
set_expert_model_parallel_world_size = _ep.set_size
set_expert_model_parallel_rank = _ep.set_rank
get_expert_tensor_parallel_group = _expt_tp.group
get_expert_tensor_parallel_world_size = _expt_tp.size
get_expert_tensor_parallel_rank = _expt_tp.rank
set_expert_tensor_parallel_world_size = _expt_tp.set_size
set_expert_tensor_parallel_rank = _expt_tp.set_rank
get_expert_tensor_and_model_parallel_group = _tp_ep.group
get_expert_tensor_and_model_parallel_world_size = _tp_ep.size
get_expert_tensor_and_model_parallel_rank = _tp_ep.rank
get_model_parallel_group = _mp.group
get_model_parallel_src_rank = _mp.first_rank
get_hierarchical_context_parallel_groups = _Axis("hcp").group  # a2a+p2p: inner and outer group
get_expert_tensor_model_pipeline_parallel_group = _Axis("tp_ep_pp").group
get_inter_distributed_optimizer_instance_group = _Axis("inter_dist_opt").group
get_intra_distributed_optimizer_instance_group = _Axis("intra_dist_opt").group
get_embedding_group = _Axis("embd").group
get_position_embedding_group = _Axis("pos_embd").group


def get_pipeline_model_parallel_last_rank() -> int:
    """Return the world rank of the last stage."""
    return _pp.member(-1)


def get_pipeline_model_parallel_next_rank() -> int:
    """Return the world rank of the next stage, cyclically."""
    return _pp.member(_pp.rank() + 1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """Return the world rank of the previous stage, cyclically."""
    return _pp.member(_pp.rank() - 1)


def _data_parallel(with_context_parallel: bool, partial_data_parallel: bool) -> _Axis:
    if partial_data_parallel:
        assert with_context_parallel, "partial_data_parallel needs with_context_parallel=True"
        return _Axis("intra_dp_cp", 0)
    return _Axis("dp_cp", 0) if with_context_parallel else _dp


def get_data_parallel_group(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """Return the data-parallel group; ``with_context_parallel``: all ranks with equal parameters.

    ``partial_data_parallel``: only those ranks of dp_cp that share one instance of the distributed
    optimizer.
    """
    axis = _data_parallel(with_context_parallel, partial_data_parallel)
    group: ProcessGroup = getattr(current(), axis.name)
    return group


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """Return the ranks of `get_data_parallel_group` as a group of tensors on the CPU."""
    return _gloo(_data_parallel(with_context_parallel, partial_data_parallel))


def get_data_parallel_world_size(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> int:
    """Return the size of `get_data_parallel_group`."""
    return _data_parallel(with_context_parallel, partial_data_parallel).size()


def get_data_parallel_rank(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> int:
    """Return this rank's index in `get_data_parallel_group`."""
    axis = _data_parallel(with_context_parallel, partial_data_parallel)
    return axis.rank() if _set_values.get("dp.rank") is None else _dp.rank()


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Return the world rank of the first member of `get_data_parallel_group`."""
    return _data_parallel(with_context_parallel, False).first_rank()


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


def _expert_data_parallel(partial_expert_data_parallel: bool) -> _Axis:
    return _Axis("intra_expt_dp" if partial_expert_data_parallel else "expt_dp", 0)


def get_expert_data_parallel_group(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup | None:
    """Return the group of ranks with the same experts.

    ``partial_expert_data_parallel``: only those that share one instance of the distributed
    optimizer.
    """
    return _expert_data_parallel(partial_expert_data_parallel).group(check_initialized)


def get_data_modulo_expert_parallel_group(
    partial_expert_data_parallel: bool = False,
) -> ProcessGroup | None:
    """Return `get_expert_data_parallel_group`, under its former name."""
    warn("call get_expert_data_parallel_group", DeprecationWarning, stacklevel=2)
    return get_expert_data_parallel_group(True, partial_expert_data_parallel)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """Return `get_expert_data_parallel_group` as a group of tensors on the CPU."""
    return _gloo(_expert_data_parallel(partial_expert_data_parallel))


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """Return the size of `get_expert_data_parallel_group`."""
    return _expert_data_parallel(partial_expert_data_parallel).size()


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """Return this rank's index in `get_expert_data_parallel_group`."""
    return _expert_data_parallel(partial_expert_data_parallel).rank()


def _gloo(axis: _Axis) -> ProcessGroup:
    assert axis.name in _gloo_groups, (
        f"the gloo group {axis.name} is not initialized: call initialize_model_parallel with "
        "create_gloo_process_groups=True"
    )
    return _gloo_groups[axis.name]


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int] | None:
    """Return the world ranks of this rank's context-parallel group."""
    group = _cp.group(check_initialized)
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


def get_all_ranks() -> str:
    """Return this rank's indices in tp, dp, cp, pp and ep, joined by underscores."""
    return "_".join(str(axis.rank()) for axis in (_tp, _dp, _cp, _pp, _ep))
