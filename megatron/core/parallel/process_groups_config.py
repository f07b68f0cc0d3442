"""Process groups of this rank: their layout, creation and collection in one object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.parallel.communicators import Communicators, CommunicatorSettings
from megatron.core.parallel.rank_grid import RankGrid
from megatron.core.rank_local import each_rank_owns

# Groups that join several axes: if at most one axis is larger than 1, its group is the joined one.
_JOINS = {
    "mp": ("tp", "pp"),
    "tp_cp": ("tp", "cp"),
    "tp_dp": ("tp", "dp"),
    "tp_dp_cp": ("tp", "dp", "cp"),
    "dp_cp": ("dp", "cp"),
    "tp_ep": ("expt_tp", "ep"),
    "tp_ep_pp": ("expt_tp", "ep", "pp"),
}
# Groups that equal another one by default: one instance of the distributed optimizer, a model of
# one stack, experts with the tensor parallelism of the dense layers.
_SAME_AS = {
    "intra_dp_cp": "dp_cp",
    "intra_expt_dp": "expt_dp",
    "intra_dist_opt": "world",
    "stack": "pp",
    "expt_tp": "tp",
}
_DENSE = ("tp", "pp", "dp", "cp", "tp_cp", "tp_dp", "tp_dp_cp", "dp_cp")  # axes of the dense grid
# Axes whose default is a group of this rank alone.  Data parallelism is not among them: without its
# group, gradients would silently not be reduced.
_MAY_BE_OFF = ("tp", "pp", "cp", "ep", "pos_embd", "inter_dist_opt")


@dataclass(init=False, kw_only=True, eq=False, repr=False)
class ProcessGroupCollection:
    """Process groups that this rank belongs to, of size 1 for an unused axis.  Each is set once.

    Names: axes joined by ``_``; ``expt_`` marks the grid of expert layers.  `create_process_groups`
    sets all groups.  A program with groups of its own passes them as arguments, or assigns them,
    after init_process_group.  Reading a group that is not set derives it from the others if
    possible, else raises AttributeError.  Reading never creates a process group: the constructor
    already has created the group of this rank alone, which unused axes get.
    """

    tp: ProcessGroup
    pp: ProcessGroup
    dp: ProcessGroup
    cp: ProcessGroup
    cp_inner: ProcessGroup  # a2a+p2p: neighbours in cp, all-to-all of heads; else this rank
    cp_outer: ProcessGroup  # a2a+p2p: ring over one rank of each cp_inner; else cp
    hcp: list[ProcessGroup]  # [cp_inner, cp_outer], Megatron Core's name for them
    mp: ProcessGroup  # one copy of the dense layers: tp x pp
    tp_cp: ProcessGroup
    tp_dp: ProcessGroup
    tp_dp_cp: ProcessGroup
    dp_cp: ProcessGroup  # gradients of dense parameters are reduced here
    ep: ProcessGroup
    expt_tp: ProcessGroup
    tp_ep: ProcessGroup
    tp_ep_pp: ProcessGroup  # one copy of the expert layers
    expt_dp: ProcessGroup  # gradients of expert parameters are reduced here
    # The distributed optimizer may have several instances, each over a block of data-parallel ranks
    # and with a complete copy of the optimizer state.
    intra_dp_cp: ProcessGroup  # ranks of dp_cp that share one instance
    intra_expt_dp: ProcessGroup  # ranks of expt_dp that share one instance
    inter_dist_opt: ProcessGroup  # ranks that own the same shares, one in each instance
    intra_dist_opt: ProcessGroup  # all ranks of this instance, over all model-parallel ranks
    # Stages with the word embedding: first, last, and the first stage of the decoder in an
    # encoder-decoder model.  On other stages: this rank.
    embd: ProcessGroup
    pos_embd: ProcessGroup  # stages that look up input tokens; on other stages: this rank
    stack: ProcessGroup  # encoder-decoder model: stages of the encoder or of the decoder; else pp
    world: ProcessGroup
    dense_grid: RankGrid
    expert_grid: RankGrid
    _alone: ProcessGroup  # this rank alone, for axes that are not set

    def __init__(self, **groups: ProcessGroup | RankGrid | None) -> None:
        if unknown := groups.keys() - self.__dataclass_fields__.keys():
            raise ValueError(f"Unknown attribute: {', '.join(sorted(unknown))}")
        for name, group in groups.items():
            if group is not None:
                setattr(self, name, group)
        if self.__dataclass_fields__.keys() - groups.keys() > {"_alone"}:
            self._alone = _this_rank_alone(groups.values())

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self.__dataclass_fields__:
            raise AttributeError(
                f"ProcessGroupCollection has no group {name!r}; it has "
                f"{', '.join(self.__dataclass_fields__)}"
            )
        if name in self.__dict__:
            raise AttributeError(f"ProcessGroupCollection: {name!r} is set or was read already")
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        """Derive group ``name`` from the others; Python calls it only if ``name`` is not set."""
        if name not in self.__dataclass_fields__:
            raise AttributeError(name)
        self.__dict__[name] = group = self._derive(name)
        return group

    def _derive(self, name: str) -> Any:
        """Derive group ``name`` from the groups that are set.  Raises AttributeError if impossible.

        Creates no process group.
        """
        if name in _MAY_BE_OFF:
            return self._alone
        if name == "hcp":
            return [self.cp_inner, self.cp_outer]
        if name in ("cp_inner", "cp_outer") and "hcp" in self.__dict__:
            return self.hcp[name == "cp_outer"]
        if name == "world":
            return dist.group.WORLD or self._alone
        if name in _JOINS:
            parts: list[ProcessGroup] = [getattr(self, part) for part in _JOINS[name]]
            large = [group for group in parts if group.size() > 1]
            if len(large) < 2:
                return (large or parts)[0]
        elif name in _SAME_AS:
            same: ProcessGroup = getattr(self, _SAME_AS[name])
            return same
        elif name == "dp" and "dp_cp" in self.__dict__ and self.cp.size() == 1:
            return self.dp_cp
        elif name == "dp" and self.tp.size() * self.pp.size() * self.cp.size() == self.world.size():
            return self._alone
        elif name == "expt_dp" and self.ep.size() == 1 and self.expt_tp is self.tp:
            return self.dp_cp
        elif name == "embd" and self.pp.size() <= 2:
            return self.pp
        raise AttributeError(
            f"ProcessGroupCollection: {name!r} is asked for, but was not given and does not follow "
            f"from {', '.join(self.__dict__)}"
        )

    @classmethod
    def use_mpu_process_groups(
        cls, required_pgs: Sequence[str] | None = None
    ) -> ProcessGroupCollection:
        """Return the installed groups of `parallel_state`, or only ``required_pgs`` of them.

        Raises AssertionError if there are none, ValueError for an unknown name.
        """
        if _installed is None:
            raise AssertionError(
                "model parallel groups are not initialized: call initialize_model_parallel() first"
            )
        if required_pgs is None:
            return _installed
        if unknown := [name for name in required_pgs if name not in cls.__dataclass_fields__]:
            raise ValueError(f"Invalid process groups requested: {unknown}")
        alone = _this_rank_alone(vars(_installed).values())
        return cls(_alone=alone, **{name: getattr(_installed, name) for name in required_pgs})

    def without_context_parallelism(self) -> ProcessGroupCollection:
        """Return these groups for a part of a model whose ranks each have complete sequences."""
        kept = {n: g for n, g in vars(self).items() if n not in ("cp", "cp_inner", "cp_outer")}
        return ProcessGroupCollection(**kept)

    def with_tensor_parallelism(self, tp: ProcessGroup) -> ProcessGroupCollection:
        """Return these groups for a part of a model that is sharded over the ranks of ``tp``."""
        of_tp = {"tp", "expt_tp", "dense_grid", "expert_grid"}
        of_tp |= {name for name, parts in _JOINS.items() if of_tp & {*parts}}
        kept = {name: group for name, group in vars(self).items() if name not in of_tp}
        return ProcessGroupCollection(**kept, tp=tp)

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank is on the first pipeline stage, which has the input embedding."""
        return self.pp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is on the last pipeline stage, which computes the loss."""
        return self.pp.rank() == self.pp.size() - 1


# Megatron Core's path of the class, by which projects recognize it.
ProcessGroupCollection.__module__ = "megatron.core.process_groups_config"


def _this_rank_alone(groups: Iterable[object]) -> ProcessGroup:
    """Return one of ``groups`` with this rank alone, else a new group.  Not collective."""
    for group in groups:
        if isinstance(group, ProcessGroup) and group.size() == 1:
            return group
    if not dist.is_initialized():
        return ProcessGroup(dist.HashStore(), 0, 1)
    alone: ProcessGroup = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return alone


_installed: ProcessGroupCollection | None = None  # read by the functions of `parallel_state`
each_rank_owns(__name__, "_installed")


def set_installed(groups: ProcessGroupCollection | None) -> None:
    """Set the groups that the functions of `parallel_state` read."""
    global _installed
    _installed = groups


def get_installed() -> ProcessGroupCollection | None:
    """Return the groups of the last call of `set_installed`."""
    return _installed


def make_grids(
    world_size: int,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    expt_tp: int | None = None,
    order: str = "tp-cp-ep-dp-pp",
) -> tuple[RankGrid, RankGrid]:
    """Return the rank grids of dense and of expert layers over ``world_size`` ranks.

    ``order`` names the axes, fastest first; ``tp-cp-ep-pp-dp`` is the other order in use.  Raises
    ValueError if the degrees do not divide the world, or if the grids have different pipelines.
    """
    expt_tp = tp if expt_tp is None else expt_tp
    dense_cut = tp * pp * cp
    expert_cut = expt_tp * ep * pp
    for cut in (dense_cut, expert_cut):
        if world_size % cut:
            raise ValueError(f"{world_size} ranks cannot be divided into blocks of {cut}")
    dense = {"tp": tp, "cp": cp, "ep": 1, "dp": world_size // dense_cut, "pp": pp}
    expert = {"tp": expt_tp, "cp": 1, "ep": ep, "dp": world_size // expert_cut, "pp": pp}
    if ep == 1 and expt_tp == tp:
        expert = dense  # equal grids also if the order has other axes between cp and dp
    axes = order.split("-")
    grids = RankGrid({a: dense[a] for a in axes}), RankGrid({a: expert[a] for a in axes})
    if grids[0].groups("pp") != grids[1].groups("pp"):
        raise ValueError(
            f"in the order {order} dense and expert layers would lie on different pipelines: use "
            f"one stage, or as many expert replicas ({expert['dp']}) as replicas ({dense['dp']})"
        )
    return grids


def create_process_groups(
    dense: RankGrid,
    expert: RankGrid,
    *,
    communicators: Communicators = Communicators(),  # noqa: B008  (it is immutable)
    context_levels: Sequence[int] | None = None,
    num_distributed_optimizer_instances: int = 1,
    encoder_stages: int = 0,
    embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    position_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    only_mine: bool = False,
) -> ProcessGroupCollection:
    """Create all groups on all ranks.  Collective: every rank calls it with the same arguments.

    Groups with equal members and equal settings are created once and shared.  ``context_levels``:
    sizes of ``cp_inner`` and ``cp_outer``; ``encoder_stages``: number of first stages that hold the
    encoder; ``embedding_ranks`` and ``position_embedding_ranks``: return the members of ``embd``
    and ``pos_embd`` among the ranks of a pipeline, by default its ends; ``only_mine``: create only
    this rank's groups (for a backend that simulates the other ranks).  Raises ValueError if the
    instances do not divide the data-parallel ranks.
    """
    shards = optimizer_shards(dense, num_distributed_optimizer_instances)
    expert_shards = optimizer_shards(expert, num_distributed_optimizer_instances)
    instances = _union_by_instance(shards)
    if instances != _union_by_instance(expert_shards):
        raise ValueError(
            f"{num_distributed_optimizer_instances} instances of the distributed optimizer would "
            "hold other ranks for the dense than for the expert layers: use one"
        )
    pipelines = dense.groups("pp")
    contexts = dense.groups("cp")
    inner, outer = context_levels or (1, len(contexts[0]))
    if inner * outer != len(contexts[0]):
        raise ValueError(f"{inner} x {outer} context-parallel ranks are not {len(contexts[0])}")
    every: dict[str, Iterable[Sequence[int]]] = {
        **{name: dense.groups(*name.split("_")) for name in _DENSE},
        "cp_inner": [c[i : i + inner] for c in contexts for i in range(0, len(c), inner)],
        "cp_outer": [c[i::inner] for c in contexts for i in range(inner)],
        "mp": dense.groups("tp", "pp"),
        "ep": expert.groups("ep"),
        "expt_tp": expert.groups("tp"),
        "tp_ep": expert.groups("tp", "ep"),
        "tp_ep_pp": expert.groups("tp", "ep", "pp"),
        "expt_dp": expert.groups("dp", "cp"),
        "intra_dp_cp": chain.from_iterable(shards),
        "intra_expt_dp": chain.from_iterable(expert_shards),
        "inter_dist_opt": [ranks for blocks in shards for ranks in zip(*blocks, strict=True)],
        "intra_dist_opt": instances,
        "embd": _together(pipelines, {0, encoder_stages, len(pipelines[0]) - 1}, embedding_ranks),
        "pos_embd": _together(pipelines, {0, encoder_stages}, position_embedding_ranks),
        "stack": [
            half for p in pipelines for half in (p[:encoder_stages], p[encoder_stages:]) if half
        ],
        "world": dense.groups(*dense.sizes),
    }
    me = dist.get_rank()
    mine: dict[str, ProcessGroup] = {}
    members: dict[tuple[tuple[int, ...], CommunicatorSettings | None], ProcessGroup] = {}
    for name, groups in every.items():
        for ranks in map(tuple, groups):
            key = ranks, communicators.settings_of(name)
            if key not in members and (me in ranks or not only_mine):
                members[key] = communicators.create(ranks, name)
            if me in ranks:
                mine[name] = members[key]
        assert name in mine, f"rank {me} is outside the grid {dense.sizes}"
    return ProcessGroupCollection(**mine, dense_grid=dense, expert_grid=expert)


def optimizer_shards(grid: RankGrid, num_instances: int) -> list[list[list[int]]]:
    """Split each data-parallel group (dp x cp) into equal blocks of ranks, one per instance.

    >>> optimizer_shards(RankGrid({"tp": 2, "cp": 1, "dp": 4}), 2)
    [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]

    Raises ValueError if the number of instances does not divide the size of the groups.
    """
    replicas = grid.groups("dp", "cp")
    size, rest = divmod(len(replicas[0]), num_instances)
    if rest:
        raise ValueError(
            f"{len(replicas[0])} replicas cannot be divided into {num_instances} instances of the "
            "distributed optimizer"
        )
    return [[ranks[i : i + size] for i in range(0, len(ranks), size)] for ranks in replicas]


def _union_by_instance(shards: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Return all ranks of each instance, given the result of `optimizer_shards`."""
    return [sorted(r for block in blocks for r in block) for blocks in zip(*shards, strict=True)]


def _together(
    pipelines: Sequence[list[int]],
    stages: Set[int],
    choose: Callable[[list[int]], list[int]] | None,
) -> Iterator[Sequence[int]]:
    """Yield, for each pipeline, one group of ``stages`` and a group of its own for each other.

    ``choose`` returns the members in place of ``stages``.
    """
    for pipeline in pipelines:
        members = [rank for stage, rank in enumerate(pipeline) if stage in stages]
        members = choose(pipeline) if choose else members
        yield members
        yield from ([rank] for rank in pipeline if rank not in members)
