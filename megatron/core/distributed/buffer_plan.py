"""Which gradients share a buffer, and how each buffer is laid out: pure arithmetic.

With the sizes of a model's parameters this says what a rank's buffers hold, without a process
group or a tensor.  A sharded buffer has a twin of the same layout that holds the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron.core.distributed.buckets import (
    PARAM_ALIGNMENT,
    BufferLayout,
    bucket_multiple,
    plan_buffer,
    target_bucket_size,
)
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.sharding import num_instances


class BufferKey(NamedTuple):
    """Gradients that share a buffer."""

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    is_expert: bool
    travels_as_codes: bool = False


class ParamSize(NamedTuple):
    """What the plan has to know of a trainable parameter."""

    numel: int
    key: BufferKey
    # A shared embedding has a bucket for itself: what a rank owns of it must not depend on what
    # else a stage holds, since first and last stage add up their gradients.
    is_alone: bool = False


class Replicas(NamedTuple):
    """How many ranks hold the same dense and the same expert parameters."""

    dense: int
    expert: int

    def of(self, key: BufferKey) -> int:
        return self.expert if key.is_expert else self.dense


@dataclass(frozen=True)
class BufferPlan:
    """A buffer for the parameters ``members`` (indices into those planned)."""

    key: BufferKey
    members: tuple[int, ...]
    layout: BufferLayout


def plan_buffers(
    params: Sequence[ParamSize],
    config: DistributedDataParallelConfig,
    replicas: Replicas,
    *,
    is_mean: bool,
    disable_bucketing: bool = False,
) -> list[BufferPlan]:
    """The buffers of one model chunk, whose trainable ``params`` come in model order.

    Sharded or not, the layout is the same, and with it the order of sums.

    What is in none keeps its gradient in ``param.grad``: it needs no reduction, no scaling
    (``is_mean``: gradients are divided by the number of replicas) and no other dtype.
    """
    members: dict[BufferKey, list[int]] = {}
    for index, param in enumerate(params):
        members.setdefault(param.key, []).append(index)
    is_sharded, instances = config.use_distributed_optimizer, num_instances(config)
    plans = []
    for key, indices in members.items():
        is_reduced = replicas.of(key) > 1 or (is_mean and replicas.dense > 1)
        if not (is_reduced or is_sharded or key.param_dtype != key.grad_dtype):
            continue
        num_sharers = replicas.of(key) // instances
        size = target_bucket_size(
            asked=config.bucket_size,
            num_buckets=config.ddp_num_buckets,
            total_numel=sum(param.numel for param in params),
            group_size=num_sharers,
            is_overlapped=config.overlap_grad_reduce and not disable_bucketing,
        )
        layout = plan_buffer(
            [params[i].numel for i in indices],
            size,
            param_alignment=PARAM_ALIGNMENT,
            bucket_multiple=bucket_multiple(
                num_sharers, for_high_bus_bandwidth=config.pad_buckets_for_high_nccl_busbw
            ),
            alone=[n for n, i in enumerate(indices) if params[i].is_alone],
        )
        plans.append(BufferPlan(key, tuple(indices), layout))
    return plans
