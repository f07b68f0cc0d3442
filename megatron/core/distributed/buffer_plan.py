"""Plan the gradient buffers of a rank: which gradients share a buffer, and its layout.

Pure arithmetic on the sizes of parameters: needs no process group and no tensor.  A sharded
gradient buffer is accompanied by a parameter buffer of the same layout.
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


class Replicas(NamedTuple):
    """Number of data-parallel ranks that hold the same dense and the same expert parameters."""

    dense: int
    expert: int

    def of(self, key: BufferKey) -> int:
        return self.expert if key.is_expert else self.dense


@dataclass(frozen=True)
class BufferPlan:
    """One buffer; ``members`` are indices of the parameters given to `plan_buffers`."""

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
    """Plan the buffers of one model chunk; ``params`` are its trainable parameters in model order.

    The layout, and so the order of sums, does not depend on sharding.

    A parameter in no buffer keeps its gradient in ``param.grad``: the gradient needs no reduction,
    no scaling (``is_mean``: divide by the number of data-parallel ranks) and no other dtype.
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
