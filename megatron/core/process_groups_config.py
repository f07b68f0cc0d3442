"""The process groups of this rank, passed to whoever communicates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.rank_grid import RankGrid


@dataclass(frozen=True, kw_only=True)
class ProcessGroupCollection:
    """Every group this rank belongs to.  A field is always a group: of size 1 where an axis is off.

    Names: axes joined by ``_``; ``expt_`` marks the grid of expert layers.
    """

    tp: ProcessGroup
    pp: ProcessGroup
    dp: ProcessGroup
    cp: ProcessGroup
    mp: ProcessGroup  # one model replica of the dense layers: tp x pp
    tp_cp: ProcessGroup
    tp_dp: ProcessGroup
    tp_dp_cp: ProcessGroup
    dp_cp: ProcessGroup  # gradients of dense parameters are reduced here
    ep: ProcessGroup
    expt_tp: ProcessGroup
    tp_ep: ProcessGroup
    tp_ep_pp: ProcessGroup  # one model replica of the expert layers
    expt_dp: ProcessGroup  # gradients of expert parameters are reduced here
    embd: ProcessGroup  # first and last stage, which share the word embedding; else this rank
    pos_embd: ProcessGroup  # the first stage alone; else this rank
    world: ProcessGroup
    dense_grid: RankGrid
    expert_grid: RankGrid

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pp.rank() == self.pp.size() - 1


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
    """The layouts of dense and of expert layers over ``world_size`` ranks.

    ``order`` names the axes, fastest first; ``tp-cp-ep-pp-dp`` is the other one in use.
    Raises ValueError when the degrees do not divide the world.
    """
    expt_tp = tp if expt_tp is None else expt_tp
    dense_cut, expert_cut = tp * pp * cp, expt_tp * ep * pp
    for cut in (dense_cut, expert_cut):
        if world_size % cut:
            raise ValueError(f"{world_size} ranks cannot be cut into blocks of {cut}")
    dense = {"tp": tp, "cp": cp, "ep": 1, "dp": world_size // dense_cut, "pp": pp}
    expert = {"tp": expt_tp, "cp": 1, "ep": ep, "dp": world_size // expert_cut, "pp": pp}
    axes = order.split("-")
    grids = RankGrid({a: dense[a] for a in axes}), RankGrid({a: expert[a] for a in axes})
    if grids[0].groups("pp") != grids[1].groups("pp"):
        raise ValueError(
            f"in the order {order} dense and expert layers would lie on different pipelines: use "
            f"one stage, or as many expert replicas ({expert['dp']}) as replicas ({dense['dp']})"
        )
    return grids


def create_process_groups(
    dense: RankGrid, expert: RankGrid, *, timeout: timedelta | None = None
) -> ProcessGroupCollection:
    """Create all groups on all ranks.  Collective: every rank calls it with the same grids.

    Groups with equal members are created once and shared.
    """
    members: dict[tuple[int, ...], ProcessGroup] = {}
    me = dist.get_rank()

    def mine_of(groups: Iterable[Sequence[int]]) -> ProcessGroup:
        found = None
        for ranks in map(tuple, groups):
            if ranks not in members:
                members[ranks] = _new_group(ranks, timeout)
            if me in ranks:
                found = members[ranks]
        assert found is not None, f"rank {me} is outside the grid {dense.sizes}"
        return found

    def mine(grid: RankGrid, *axes: str) -> ProcessGroup:
        return mine_of(grid.groups(*axes))

    pipelines = dense.groups("pp")

    return ProcessGroupCollection(
        tp=mine(dense, "tp"),
        pp=mine(dense, "pp"),
        dp=mine(dense, "dp"),
        cp=mine(dense, "cp"),
        mp=mine(dense, "tp", "pp"),
        tp_cp=mine(dense, "tp", "cp"),
        tp_dp=mine(dense, "tp", "dp"),
        tp_dp_cp=mine(dense, "tp", "cp", "dp"),
        dp_cp=mine(dense, "dp", "cp"),
        ep=mine(expert, "ep"),
        expt_tp=mine(expert, "tp"),
        tp_ep=mine(expert, "tp", "ep"),
        tp_ep_pp=mine(expert, "tp", "ep", "pp"),
        expt_dp=mine(expert, "dp"),
        embd=mine_of(g for pipeline in pipelines for g in _ends_together(pipeline)),
        pos_embd=mine_of([rank] for pipeline in pipelines for rank in pipeline),
        world=mine(dense, *dense.sizes),
        dense_grid=dense,
        expert_grid=expert,
    )


def _ends_together(pipeline: Sequence[int]) -> list[list[int]]:
    """First and last stage in one group, each stage between them in one of its own."""
    if len(pipeline) == 1:
        return [list(pipeline)]
    return [[pipeline[0], pipeline[-1]], *([rank] for rank in pipeline[1:-1])]


def _new_group(ranks: Sequence[int], timeout: timedelta | None) -> ProcessGroup:
    if len(ranks) == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None, "init_process_group comes before create_process_groups"
        return world
    return dist.new_group(list(ranks), timeout=timeout)
