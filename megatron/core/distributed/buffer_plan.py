"""Plan the gradient buffers of a rank: which gradients share a buffer, and its layout.

Pure arithmetic on the sizes of parameters: needs no process group and no tensor.  A sharded
gradient buffer is accompanied by a parameter buffer of the same layout.

Parameters are given in the order of the model and laid out in reverse order.  A backward pass
finishes the last layers first, so it completes the first bucket first, and the reduction of that
bucket overlaps with the rest of the pass.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

import torch

from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
    num_instances,
)

PARAM_ALIGNMENT = 64  # a parameter starts on a 128-byte line, also in 16 bits
BUCKET_ALIGNMENT = 128  # divides every rank's share of a bucket; a multiple of PARAM_ALIGNMENT
HIGH_BUS_BANDWIDTH_ALIGNMENT = 2**16  # collectives run fastest on multiples of this


class BufferKey(NamedTuple):
    """Properties that gradients in the same buffer have in common."""

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    is_expert: bool
    gathered_as_codes: bool = False


class ParamSize(NamedTuple):
    """Size and buffer of a trainable parameter: the input of the plan."""

    numel: int
    key: BufferKey
    # A shared embedding has a bucket of its own: first and last stage sum its gradients, so a rank
    # must own the same elements of it on both stages, whatever else these stages hold.
    is_alone: bool = False


def plan_buffers(
    params: Sequence[ParamSize],
    config: DistributedDataParallelConfig,
    replicas: tuple[int, int],
    *,
    is_mean: bool,
    disable_bucketing: bool = False,
) -> dict[BufferKey, tuple[list[int], BufferLayout]]:
    """Plan the buffers of one model chunk; ``params`` are its trainable parameters in model order.

    Returns the indices of the parameters of each buffer, and its layout.  The layout, and so the
    order of sums, does not depend on sharding.  ``replicas``: number of data-parallel ranks that
    hold the same dense and the same expert parameters.

    A parameter in no buffer keeps its gradient in ``param.grad``: the gradient needs no reduction,
    no scaling (``is_mean``: divide by the number of data-parallel ranks) and no other dtype.
    """
    members: dict[BufferKey, list[int]] = {}
    for index, param in enumerate(params):
        members.setdefault(param.key, []).append(index)
    plans = {}
    for key, indices in members.items():
        num_replicas = replicas[key.is_expert]
        is_reduced = num_replicas > 1 or (is_mean and replicas[False] > 1)
        is_buffered = is_reduced or config.use_distributed_optimizer
        if not is_buffered and key.param_dtype == key.grad_dtype:
            continue
        num_sharers = num_replicas // num_instances(config)
        size = target_bucket_size(config, sum(param.numel for param in params), num_sharers)
        layout = plan_buffer(
            [params[i].numel for i in indices],
            None if disable_bucketing else size,
            param_alignment=PARAM_ALIGNMENT,
            bucket_multiple=bucket_multiple(
                num_sharers, for_high_bus_bandwidth=config.pad_buckets_for_high_nccl_busbw
            ),
            alone=[n for n, i in enumerate(indices) if params[i].is_alone],
        )
        plans[key] = indices, layout
    return plans


@dataclass(frozen=True)
class Bucket:
    """Range of the buffer, ``start`` to ``stop``; ``params`` are indices in model order."""

    start: int
    stop: int
    params: tuple[int, ...]  # in the order of the buffer


@dataclass(frozen=True)
class BufferLayout:
    """Layout of a buffer: ``spans[i]`` is (start, stop) of parameter i; the rest is padding."""

    spans: tuple[tuple[int, int], ...]
    buckets: tuple[Bucket, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the buffer, including padding."""
        return self.buckets[-1].stop if self.buckets else 0

    def owned_parts(self, rank: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield (parameter, start, stop): the elements that ``rank`` of ``size`` ranks owns.

        Every bucket is divided into equal shares, one for each rank: the result of a reduce-scatter
        per bucket.  So a rank's part of the buffer is not contiguous.  It contains at most one part
        of each parameter, and may be empty.  ``start`` and ``stop`` count the elements of the
        parameter, flattened row by row.
        """
        for bucket in self.buckets:
            share = (bucket.stop - bucket.start) // size
            low = bucket.start + rank * share
            for param in bucket.params:
                begin, end = self.spans[param]
                start = max(low, begin)
                stop = min(low + share, end)
                if start < stop:
                    yield param, start - begin, stop - begin


def plan_buffer(
    numels: Sequence[int],
    bucket_size: int | None,
    *,
    param_alignment: int = 1,
    bucket_multiple: int = 1,
    alone: Container[int] = (),
) -> BufferLayout:
    """Lay out parameters of ``numels`` elements; close a bucket at ``bucket_size`` or more.

    ``bucket_size=None`` makes one bucket.  No parameter is split over buckets, and a bucket's
    length is a multiple of ``bucket_multiple``.  Each parameter in ``alone`` has its own bucket.

    >>> plan_buffer([4, 3, 5], 6).buckets
    (Bucket(start=0, stop=8, params=(2, 1)), Bucket(start=8, stop=12, params=(0,)))
    """
    spans: list[tuple[int, int]] = [(0, 0)] * len(numels)
    buckets: list[Bucket] = []
    start = end = filled = 0
    members: list[int] = []
    for index in reversed(range(len(numels))):
        begin = _round_up(end, param_alignment)
        end = begin + numels[index]
        spans[index] = (begin, end)
        members.append(index)
        filled += numels[index]
        is_full = bucket_size is not None and filled >= bucket_size
        if index == 0 or is_full or index in alone or index - 1 in alone:
            end = start + _round_up(end - start, bucket_multiple)
            buckets.append(Bucket(start, end, tuple(members)))
            start = end
            filled = 0
            members = []
    return BufferLayout(tuple(spans), tuple(buckets))


def bucket_multiple(group_size: int, *, for_high_bus_bandwidth: bool) -> int:
    """Return the divisor of every bucket length, so that ``group_size`` ranks get equal shares."""
    unit = group_size * BUCKET_ALIGNMENT
    return lcm(unit, HIGH_BUS_BANDWIDTH_ALIGNMENT) if for_high_bus_bandwidth else unit


def target_bucket_size(
    config: DistributedDataParallelConfig, total_numel: int, group_size: int
) -> int | None:
    """Return the number of elements at which a bucket closes; None means one bucket.

    Without overlap several buckets only add latency.  The default grows with the group, since the
    latency of a ring collective is proportional to the number of ranks.
    """
    if not config.overlap_grad_reduce:
        return None
    if config.ddp_num_buckets is not None:
        return -(-total_numel // config.ddp_num_buckets)
    default = max(40_000_000, 1_000_000 * group_size)
    return default if config.bucket_size is None else config.bucket_size


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
