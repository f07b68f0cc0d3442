"""`parallel.collectives` gives what torch.distributed gives, without its Python code."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.core.diagnostics import collective_tracer
from megatron.core.parallel.collectives import all_gather_single, reduce_scatter_single
from tests.support.ranks import run_ranks


def _collectives(rank: int, world_size: int) -> None:
    collective_tracer.note_collectives()
    group = dist.group.WORLD
    assert group is not None
    share = torch.arange(3.0) + 10 * rank
    shares = [torch.arange(3.0) + 10 * peer for peer in range(world_size)]
    whole = torch.cat(shares)
    gathered = torch.zeros(3 * world_size)
    all_gather_single(gathered, share, group=group)
    assert gathered.equal(whole)
    gathered.zero_()
    all_gather_single(gathered, share, group=group, async_op=True).wait()
    assert gathered.equal(whole)
    given = whole * (rank + 1)
    mine = whole[3 * rank : 3 * rank + 3]
    part = torch.zeros(3)
    reduce_scatter_single(part, given, group=group)
    assert part.equal(mine * sum(range(1, world_size + 1)))
    work = reduce_scatter_single(part, given, op=dist.ReduceOp.MAX, group=group, async_op=True)
    work.wait()
    assert part.equal(mine * world_size)
    names = [note[0] for note in collective_tracer.record.begun]
    assert names[-4:] == ["all_gather"] * 2 + ["reduce_scatter"] * 2


def test_gathered_and_reduced_values_also_without_waiting_and_traced() -> None:
    run_ranks(_collectives, 2)
