"""The order of work of every pipeline rank: 1F1B, interleaved, forward only.  Pure.

An order is a list of Work for each rank.  Each is proved free of deadlocks by `simulate`.
"""

from __future__ import annotations

from functools import lru_cache

from megatron.core.config.errors import ConfigError
from megatron.core.pipeline_parallel.plan import Placement, Work

Orders = tuple[tuple[Work, ...], ...]


@lru_cache(maxsize=16)
def schedule_of(
    name: str | None,
    *,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    group: int | None = None,
    forward_only: bool = False,
) -> tuple[Placement, Orders]:
    """Where the stages lie and what each rank does, for ``--pipeline-schedule name``.

    ``group`` is the number of micro-batches that go through one chunk in a row (default: as many
    as there are ranks).  None is 1f1b, or interleaved where a rank has several chunks.
    """
    name = name or ("interleaved" if num_chunks > 1 else "1f1b")
    placement = Placement(num_ranks, num_chunks)
    group = group or num_ranks
    if forward_only:
        return placement, _forward_only(placement, num_microbatches, group)
    return placement, tuple(
        _alternate(placement, rank, num_microbatches, group) for rank in range(num_ranks)
    )


def _alternate(
    placement: Placement, rank: int, num_microbatches: int, group: int
) -> tuple[Work, ...]:
    """Warm up with forwards, alternate forward and backward, drain with backwards."""
    sizes = _groups(placement, num_microbatches, group)
    passes = _in_groups(sizes, placement.num_chunks)
    last_chunk = placement.num_chunks - 1
    forwards = [Work("forward", m, c) for m, c in passes]
    backwards = [Work("backward", m, last_chunk - c) for m, c in passes]
    behind = placement.num_ranks - 1 - rank
    # With chunks a rank runs one more forward ahead, so that transfers overlap with work.
    warmup = 2 * behind + last_chunk * sizes[0] if last_chunk else behind
    warmup = min(warmup, len(passes))
    work = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        work += [forward, backward]
    return tuple(work + backwards[len(passes) - warmup :])


def _forward_only(placement: Placement, num_microbatches: int, group: int) -> Orders:
    passes = _in_groups(_groups(placement, num_microbatches, group), placement.num_chunks)
    work = tuple(Work("forward", m, c) for m, c in passes)
    return (work,) * placement.num_ranks


def _groups(placement: Placement, num_microbatches: int, group: int) -> list[int]:
    """Sizes of the groups of micro-batches.

    A last group smaller than the number of ranks would make the first rank wait for itself; its
    micro-batches join the first group, which the warm-up is as long as.
    """
    if placement.num_chunks == 1:
        return [num_microbatches]
    if group < placement.num_ranks:
        raise ConfigError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is smaller than "
            f"--pipeline-model-parallel-size {placement.num_ranks}: the pipeline would wait for "
            f"itself; give {placement.num_ranks} or more"
        )
    full, rest = divmod(num_microbatches, group)
    if not full:
        return [rest]
    if rest < placement.num_ranks:
        return [group + rest] + [group] * (full - 1)
    return [group] * full + [rest]


def _in_groups(sizes: list[int], num_chunks: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) in the order of forwards: each group through one chunk after another."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        (start + i, chunk)
        for start, size in zip(starts, sizes, strict=True)
        for chunk in range(num_chunks)
        for i in range(size)
    ]
