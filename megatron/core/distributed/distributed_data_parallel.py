"""The data-parallel wrapper: gradients of replicas become one.

Collectives, all over ``dp_cp`` (experts: ``expt_dp``): one all-reduce per bucket and step, always
in the order of `DistributedDataParallel.buckets`, so that ranks whose backward passes finish
parameters in different orders still meet in the same collective.  With overlap they start inside
backward, else in `start_grad_sync`.

A parameter whose gradient needs no reduction, no scaling and no other dtype keeps it in
``param.grad`` and costs nothing here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core.config import states
from megatron.core.config.errors import ConfigError
from megatron.core.distributed.buckets import (
    PARAM_ALIGNMENT,
    bucket_multiple,
    plan_buffer,
    target_bucket_size,
)
from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from megatron.core.distributed.grad_buffer import (
    GradBucket,
    GradBuffer,
    GradSlot,
    Reduction,
    takes_products,
)
from megatron.core.param_info import info_of
from megatron.core.process_groups_config import ProcessGroupCollection


class LossConfig(Protocol):
    """What the wrapper asks of a model's configuration."""

    @property
    def calculate_per_token_loss(self) -> bool: ...
    @property
    def gradient_accumulation_fusion(self) -> bool: ...


class BufferKey(NamedTuple):
    """Gradients that share a buffer."""

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    is_expert: bool


class DistributedDataParallel(nn.Module):
    """``module`` with gradients that are summed over micro-batches and averaged over replicas."""

    def __init__(
        self,
        config: LossConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        if ddp_config.use_distributed_optimizer:
            raise ConfigError(f"--use-distributed-optimizer: {states.DISTRIBUTED_OPTIMIZER}")
        self.config = config
        self.ddp_config = ddp_config
        self.module = module
        self.groups = pg_collection or parallel_state.current()
        self.is_last_microbatch = True
        self.direct: list[tuple[str, nn.Parameter]] = []  # gradients stay in param.grad
        self.grad_buffers: dict[BufferKey, GradBuffer] = {}
        members = self._members()
        total_numel = sum(p.numel() for group in members.values() for _, p in group)
        for key, params in members.items():
            reduction = self._reduction(key)
            if key.param_dtype == key.grad_dtype and not reduction.is_needed:
                self.direct.extend(params)
            else:
                size = None if disable_bucketing else self._bucket_size(reduction, total_numel)
                self.grad_buffers[key] = self._buffer(key, params, size, reduction)
        self.buckets = self._in_launch_order()
        self._next = 0  # the first bucket that is not under way
        self._listen()
        if config.gradient_accumulation_fusion:
            self._open_to_layers()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only add to the gradients; more will follow."""
        before, self.is_last_microbatch = self.is_last_microbatch, False
        try:
            yield
        finally:
            self.is_last_microbatch = before

    def start_grad_sync(self, *_: Any) -> None:
        """Start the collectives not under way yet.  Collective over data-parallel ranks."""
        while self._next < len(self.buckets):
            self._start_next()

    def finish_grad_sync(self) -> None:
        """Wait until all gradients are reduced.  Collective over data-parallel ranks.

        Raises NonFiniteError when a gradient of this rank was not finite and the run checks.
        """
        self.start_grad_sync()
        for bucket in self.buckets:
            bucket.finish()

    def zero_grad_buffer(self) -> None:
        """Begin a step: no gradients, nothing reduced."""
        for _, param in self.direct:
            param.grad = None
        for bucket in self.buckets:
            bucket.reset()
        self._next = 0

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply all gradients, after they were reduced."""
        for buffer in self.grad_buffers.values():
            buffer.data.mul_(factor)
        grads = [param.grad for _, param in self.direct if param.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)

    def broadcast_params(self) -> None:
        """Take the parameters of each group's first rank.  Collective over data-parallel ranks."""
        for param in self.module.parameters():
            group = self.groups.expt_dp if info_of(param).is_expert else self.groups.dp_cp
            if group.size() > 1:
                dist.broadcast(param.data, dist.get_global_rank(group, 0), group=group)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's, without a prefix of the wrapper."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the module."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def _members(self) -> dict[BufferKey, list[tuple[str, nn.Parameter]]]:
        """Trainable parameters in model order, by the buffer that would hold their gradients."""
        members: dict[BufferKey, list[tuple[str, nn.Parameter]]] = {}
        for local_name, param in self.module.named_parameters():
            if param.requires_grad:
                info = info_of(param)
                in_fp32 = self.ddp_config.grad_reduce_in_fp32
                grad_dtype = torch.float32 if in_fp32 else param.dtype
                key = BufferKey(param.dtype, grad_dtype, info.is_expert)
                members.setdefault(key, []).append((info.name or local_name, param))
        return members

    def _reduction(self, key: BufferKey) -> Reduction:
        # Experts see the tokens of all expert-parallel ranks: their sum over fewer ranks is
        # divided by the same number of replicas.
        is_mean = not self.config.calculate_per_token_loss
        return Reduction(
            group=self.groups.expt_dp if key.is_expert else self.groups.dp_cp,
            factor=1.0 / self.groups.dp_cp.size() if is_mean else 1.0,
            average_in_collective=is_mean and self.ddp_config.average_in_collective,
            check_for_nan=self.ddp_config.check_for_nan_in_grad,
        )

    def _bucket_size(self, reduction: Reduction, total_numel: int) -> int | None:
        return target_bucket_size(
            asked=self.ddp_config.bucket_size,
            num_buckets=self.ddp_config.ddp_num_buckets,
            total_numel=total_numel,
            group_size=reduction.group.size(),
            is_overlapped=self.ddp_config.overlap_grad_reduce,
        )

    def _buffer(
        self,
        key: BufferKey,
        params: Sequence[tuple[str, nn.Parameter]],
        bucket_size: int | None,
        reduction: Reduction,
    ) -> GradBuffer:
        layout = plan_buffer(
            [param.numel() for _, param in params],
            bucket_size,
            param_alignment=PARAM_ALIGNMENT,
            bucket_multiple=bucket_multiple(
                reduction.group.size(),
                for_high_bus_bandwidth=self.ddp_config.pad_buckets_for_high_nccl_busbw,
            ),
        )
        return GradBuffer(params, layout, key.grad_dtype, reduction)

    def _in_launch_order(self) -> list[GradBucket]:
        """Buckets in the order in which a backward pass completes them, the same on all ranks."""
        position = {param: i for i, param in enumerate(self.module.parameters())}
        buckets = [b for buffer in self.grad_buffers.values() for b in buffer.buckets]
        return sorted(buckets, key=lambda b: -min(position[slot.param] for slot in b.slots))

    def _listen(self) -> None:
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.param.register_post_accumulate_grad_hook(
                    partial(self._on_gradient, slot, bucket)
                )

    def _open_to_layers(self) -> None:
        """Let layers add weight gradients to the buffers themselves, where that is faster."""
        uses = Counter(p for _, p in self.module.named_parameters(remove_duplicate=False))
        for key, buffer in self.grad_buffers.items():
            for slot in buffer.slots:
                if uses[slot.param] == 1 and takes_products(slot.param, key.grad_dtype):
                    slot.open_to_layers()

    def _on_gradient(self, slot: GradSlot, bucket: GradBucket, _: Tensor) -> None:
        assert not bucket.is_started, f"{slot.name} got a gradient after its bucket was reduced"
        has_come = slot.take()
        is_due = self.is_last_microbatch and self.ddp_config.overlap_grad_reduce
        if has_come and is_due and bucket.mark_ready(slot):
            while self._next < len(self.buckets) and self.buckets[self._next].is_ready:
                self._start_next()

    def _start_next(self) -> None:
        self.buckets[self._next].start()
        self._next += 1
