"""DistributedDataParallel: reduce gradients and all-gather updated parameters, in buckets.

Collectives over ``dp_cp`` (experts: ``expt_dp``): one reduction per bucket and step, always in the
order of `DistributedDataParallel.buckets`.  The backward passes of two ranks may finish parameters
in different orders, so a complete bucket waits until all buckets before it are started.  With
overlap, reductions start inside backward, else in `start_grad_sync`.

With a distributed optimizer, each rank of an instance (``intra_dp_cp``, experts:
``intra_expt_dp``) ends with the sums of its share of every bucket, added over the instances
(``inter_dist_opt``).  After the update `start_param_sync` gathers the parameters, one all-gather
per bucket; with overlap, each starts as the forward pass reaches the modules before those that need
it.  Code that reads parameters without calling their module must call `finish_param_sync` first.
All gathers start before the first reduction of the step, so that both kinds of collectives have the
same order on every rank.

A gradient that needs no reduction, no scaling and no other dtype stays in ``param.grad``, without a
buffer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from megatron.core.autograd import runs_hooks_without_gradient
from megatron.core.device.nccl_allocator import registered_memory
from megatron.core.distributed.buffer_plan import (
    BufferKey,
    BufferLayout,
    ParamSize,
    plan_buffers,
)
from megatron.core.distributed.data_parallel_base import DataParallelBase
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.grad_buffer import (
    GradBucket,
    GradBuffer,
    GradientHook,
    GradSlot,
    Reduction,
    gradient_of,
    take_over,
    takes_products,
)
from megatron.core.distributed.param_buffer import ParamBucket, ParamGather, make_param_buckets
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import info_of


class DistributedDataParallel(DataParallelBase):
    """Data parallelism with complete parameters on every rank and gradients reduced in buckets."""

    @library_call("config ddp_config module disable_bucketing grad_comm_pgs model_comm_pgs")
    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config, ddp_config, module, pg_collection)
        self.is_last_microbatch = True
        params = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self._position = {param: i for i, (_, param) in enumerate(params)}
        for param in self._position:
            take_over(param)
        plans = plan_buffers(
            [self._size_of(param) for _, param in params],
            ddp_config,
            (self.groups.dp_cp.size(), self.groups.expt_dp.size()),
            is_mean=not config.calculate_per_token_loss,
            disable_bucketing=disable_bucketing,
        )
        buffered = {i for members, _ in plans.values() for i in members}
        # Parameters whose gradients stay in param.grad.
        self.direct = [param for i, (_, param) in enumerate(params) if i not in buffered]
        self.grad_buffers: dict[BufferKey, GradBuffer] = {}
        self._param_buckets: list[ParamBucket] = []
        # Lives as long as the buffers: it owns the memory pool that they are allocated from.
        self._memory: AbstractContextManager[None] = nullcontext()
        if ddp_config.nccl_ub:
            groups = [self._group(is_expert) for is_expert in (False, True)]
            self._memory = registered_memory([*groups, self.groups.inter_dist_opt])
        with self._memory:
            for key, (members, layout) in plans.items():
                self._make_buffers(key, layout, [params[i] for i in members])
        # In the order in which a backward pass completes them.  It follows from the positions of
        # parameters alone, so it is the same on all ranks.
        self.buckets: list[GradBucket] = sorted(
            (b for buffer in self.grad_buffers.values() for b in buffer.buckets),
            key=lambda b: -min(self._position[slot.param] for slot in b.slots),
        )
        # Megatron Core's names, which projects walk to move the tensors of a model to the host.
        self.buffers = [b for key, b in self.grad_buffers.items() if not key.is_expert]  # type: ignore[assignment]
        self.expert_parallel_buffers = [b for key, b in self.grad_buffers.items() if key.is_expert]
        self._next = 0  # index of the first bucket whose reduction has not started
        self.param_gather = self._in_gather_order()
        for bucket in self.buckets:
            for slot in bucket.slots:
                hook = GradientHook(self._on_gradient, slot, bucket)
                slot.param.register_post_accumulate_grad_hook(hook)
        self.remove_forward_pre_hook_handles: list[RemovableHandle] = []
        if ddp_config.overlap_param_gather:
            self.enable_forward_pre_hook()
        if config.gradient_accumulation_fusion:
            # Layers accumulate weight gradients in the buffers themselves, if that is faster.
            # A parameter with two uses must go through autograd, which adds both gradients.
            uses = Counter(p for _, p in module.named_parameters(remove_duplicate=False))
            runs_hooks_without_gradient()  # tries it now, outside of a measured or captured pass
            for key, buffer in self.grad_buffers.items():
                for param in (slot.param for slot in buffer.slots):
                    if uses[param] == 1 and takes_products(param, key.grad_dtype):
                        param.overwrite_main_grad = True  # type: ignore[attr-defined]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before = self.is_last_microbatch
        self.is_last_microbatch = False
        try:
            yield
        finally:
            self.is_last_microbatch = before

    def start_grad_sync(self, *_: object) -> None:
        while self._next < len(self.buckets):
            self._start_next()

    def finish_grad_sync(self) -> None:
        self.start_grad_sync()
        for bucket in self.buckets:
            bucket.finish()
        for param in self.direct:
            if param.grad is not None:
                vars(param)["main_grad"] = param.grad  # Megatron Core's name, for projects
        for i, bucket in enumerate(self.buckets):
            if bucket.checked is not None:
                named = ((slot.name, slot.main_grad) for slot in bucket.slots)
                self.check.validate(bucket.checked, i, named)
        if self.check.for_large:
            read = self.check.read([p.grad for p in self.direct if p.grad is not None])
            if read is not None:
                named = ((info_of(p).name, p.grad) for p in self.direct if p.grad is not None)
                self.check.validate(read, len(self.buckets), named)

    def zero_grad_buffer(self) -> None:
        for param in self.direct:
            param.grad = None
            vars(param).pop("main_grad", None)
        for bucket in self.buckets:
            bucket.reset()
        self._next = 0

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        for bucket in self.buckets:
            bucket.owned.mul_(scaling_factor)
        grads = [param.grad for param in self.direct if param.grad is not None]
        if grads:
            torch._foreach_mul_(grads, scaling_factor)

    def owned_parts(self) -> Iterator[tuple[nn.Parameter, int, int]]:
        """Yield (parameter, start, stop): the elements that this rank's optimizer updates.

        The range counts elements of the parameter, flattened row by row; at most one range per
        parameter.
        """
        for buffer in self.grad_buffers.values():
            reduction = buffer.reduction
            if reduction.is_sharded:
                group = reduction.group
                for i, start, stop in buffer.layout.owned_parts(group.rank(), group.size()):
                    yield buffer.slots[i].param, start, stop

    def spans_by_rank(self) -> Iterator[tuple[nn.Parameter, list[tuple[int, int]]]]:
        for buffer in self.grad_buffers.values():
            if buffer.reduction.is_sharded:
                size = buffer.reduction.group.size()
                spans = [[(0, 0)] * size for _ in buffer.slots]
                for rank in range(size):
                    for i, start, stop in buffer.layout.owned_parts(rank, size):
                        spans[i][rank] = start, stop
                yield from zip((slot.param for slot in buffer.slots), spans, strict=True)

    def reduced_gradients(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        if not self.ddp_config.use_distributed_optimizer:
            yield from ((param, gradient_of(param)) for param in self._position)
        for param, start, stop in self.owned_parts():
            grad = gradient_of(param)
            assert grad is not None, "a sharded parameter has its gradient in a buffer"
            yield param, grad.view(-1)[start:stop]

    def start_param_sync(
        self, *_: object, force_sync: bool = False, force_dispatch: bool = False
    ) -> None:
        """All-gather the parameters, after this rank has updated its shares.

        Collective over data-parallel ranks.  With overlap, start only the first bucket.
        """
        if not force_dispatch and self.param_gather.is_complete:
            self.finish_param_sync()  # a caller has changed values, not the codes of them
        if force_dispatch or self.param_gather.is_complete:
            self.param_gather.begin()
        if self.remove_forward_pre_hook_handles and not force_sync:
            self.param_gather.start(1)
        else:
            self.param_gather.finish()

    def start_param_sync_by_bucket(self) -> Iterator[ParamBucket]:
        """Yield each bucket, so that the caller updates this rank's share, then start its gather.

        The order is that of the forward pass.  Collective over data-parallel ranks.
        """
        self.param_gather.begin()
        for count, bucket in enumerate(self.param_gather.buckets, start=1):
            yield bucket
            self.param_gather.start(count)
        if not self.remove_forward_pre_hook_handles:
            self.param_gather.finish()

    def keep_values(self) -> None:
        for bucket in self.param_gather.buckets:
            bucket.keeps_values = True

    def prepare_param_update(self) -> None:
        for bucket in self.param_gather.buckets:
            bucket.prepare_update()

    def finish_param_sync(self, *, values: bool = True) -> None:
        self.param_gather.finish()
        for bucket in self.param_gather.buckets if values else ():
            bucket.restore_values()

    def broadcast_params(self) -> None:
        for param in self.module.parameters():
            group = self.groups.expt_dp if info_of(param).is_expert else self.groups.dp_cp
            if group.size() > 1:
                dist.broadcast(param.data, dist.get_global_rank(group, 0), group=group)

    def _size_of(self, param: nn.Parameter) -> ParamSize:
        info = info_of(param)
        grad_dtype = torch.float32 if self.ddp_config.grad_reduce_in_fp32 else param.dtype
        key = BufferKey(param.dtype, grad_dtype, info.is_expert, info.gathered_as_codes)
        return ParamSize(param.numel(), key, is_alone=info.shared_over is not None)

    def _make_buffers(
        self, key: BufferKey, layout: BufferLayout, params: list[tuple[str, nn.Parameter]]
    ) -> None:
        named = [(info_of(param).name or name, param) for name, param in params]
        group = self._group(key.is_expert)
        groups = self.groups
        buffer = GradBuffer(named, layout, key.grad_dtype, self._reduction(group))
        self.grad_buffers[key] = buffer
        if self.ddp_config.use_distributed_optimizer:
            tp = groups.expt_tp if key.is_expert else groups.tp
            values = [p for _, p in params]
            buffer.param_data, buckets = make_param_buckets(values, layout, group, tp)
            self._param_buckets += buckets

    def _group(self, is_expert: bool) -> ProcessGroup:
        """Return the ranks of one optimizer instance if sharded, else all data-parallel ranks."""
        groups = self.groups
        if self.ddp_config.use_distributed_optimizer:
            return groups.intra_expt_dp if is_expert else groups.intra_dp_cp
        return groups.expt_dp if is_expert else groups.dp_cp

    def _reduction(self, group: ProcessGroup) -> Reduction:
        # An expert's gradient already contains the tokens of all expert-parallel ranks.  It is
        # summed over expt_dp, which has fewer ranks than dp_cp, but also divided by dp_cp's size.
        is_mean = not self.config.calculate_per_token_loss
        is_sharded = self.ddp_config.use_distributed_optimizer
        outer = self.groups.inter_dist_opt if is_sharded else None
        num_ranks = group.size() * (1 if outer is None else outer.size())
        factor = 1.0 / self.groups.dp_cp.size() if is_mean else 1.0
        is_average = is_mean and self.ddp_config.average_in_collective
        is_checked = self.check.for_large or (self.check.for_nan and num_ranks > 1)
        return Reduction(
            group=group,
            # ReduceOp.AVG divides by the number of ranks already.
            factor=factor * num_ranks if is_average else factor,
            op=dist.ReduceOp.AVG if is_average else dist.ReduceOp.SUM,
            check=self.check if is_checked else None,
            is_sharded=is_sharded,
            outer=outer,
            in_fixed_order=self.config.deterministic_mode,
        )

    def _in_gather_order(self) -> ParamGather:
        """Return the gather of sharded parameters, in the order in which forward needs them.

        A shared embedding comes first: the output layer uses it without calling its module, so no
        forward pre-hook of that module would wait for it.
        """
        return ParamGather(
            sorted(
                self._param_buckets,
                key=lambda b: (
                    not any(info_of(p).is_shared_embedding for p in b.params),
                    min(self._position[p] for p in b.params),
                ),
            )
        )

    def enable_forward_pre_hook(self) -> None:
        """Let modules wait for the parameters that they hold directly, by forward pre-hooks.

        From now on `start_param_sync` overlaps with the forward pass.  Code that reads a module's
        parameters without calling the module must run its pre-hooks.
        """
        assert not self.remove_forward_pre_hook_handles, (
            "the forward pre-hooks are registered already"
        )
        needed = {
            param: count
            for count, bucket in enumerate(self.param_gather.buckets, start=1)
            for param in bucket.params
        }
        first = max((n for p, n in needed.items() if info_of(p).is_shared_embedding), default=0)
        for module in self.module.modules():
            own = [needed.get(p, 0) for p in module.parameters(recurse=False)]
            count = max(own, default=0) if module is not self.module else max(first, *own, 0)
            if count > 0:
                self.remove_forward_pre_hook_handles.append(
                    module.register_forward_pre_hook(
                        lambda *_, count=count: self.param_gather.finish(count)
                    )
                )

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Remove the pre-hooks; from now on `start_param_sync` waits for the parameters.

        ``param_sync``: finish a gather that is in progress.  Collective over data-parallel ranks.
        """
        for wait in self.remove_forward_pre_hook_handles:
            wait.remove()
        self.remove_forward_pre_hook_handles.clear()
        if param_sync:
            self.finish_param_sync()

    def _on_gradient(self, slot: GradSlot, bucket: GradBucket) -> None:
        if not slot.take():
            return
        assert not bucket.is_started, f"{slot.name} got a gradient after its bucket was reduced"
        if self.is_last_microbatch and self.ddp_config.overlap_grad_reduce:
            bucket.missing.discard(slot)
            while self._next < len(self.buckets) and not self.buckets[self._next].missing:
                self._start_next()

    def _start_next(self) -> None:
        # Gather also buckets that no forward pass has used: every rank must issue all gathers
        # before the first reduction, or the order of the two kinds would differ between ranks.
        self.param_gather.finish()
        self.buckets[self._next].start()
        self._next += 1
