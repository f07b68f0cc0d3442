"""Shard parameters, gradients and optimizer state over data-parallel ranks with PyTorch's FSDP2.

FSDP2 units: each transformer layer; its experts, if other ranks hold copies of them than of dense
layers; an embedding that the output layer does not share; last, as the root, the rest of the model.
A unit's parameters are gathered before its forward pass, and its gradients are reduce-scattered as
soon as its backward pass is done, in every micro-batch: no rank stores complete gradients.
Parameters are stored in fp32 and gathered in the model's dtype.  Between steps a rank holds rows of
dim 0 of each tensor-parallel shard, as DTensors; `ParamInfo.part` records which ones.

Collectives, over intra_dp_cp (a unit of experts: intra_expt_dp), unit by unit: all-gather before
forward (and before backward, if parameters were freed in between), reduce-scatter after backward.
With several instances of the complete model (HSDP) the reduced gradients are summed over
inter_dist_opt in the last micro-batch.  The ranks of that group hold the same part; with
--enable-full-sharding-in-hsdp each updates a piece of it and all-gathers the pieces
(`start_param_sync`).

The order of units is the order in which the model calls them, the same on all ranks of a group.
A model that calls other layers on some ranks deadlocks.

Lifetime of buffers.  A rank's own rows live as long as the model.  Gathered parameters exist from
the all-gather of their unit to the end of its pass; those of the root unit until backward.
Autograd saves views of gathered parameters: FSDP2 frees the storage of the tensor, not the tensor,
and gathers into the same storage before backward.  So several micro-batches may be between forward
and backward, as in a pipeline, where each model chunk is a sharded model of its own over the
data-parallel ranks of its stage.  Complete gradients exist from the backward pass of a unit to its
reduce-scatter; after that ``param.grad`` is a DTensor of this rank's rows.

Hazard: outside of forward and backward a parameter is a DTensor.  Code that reads or writes values
uses `local_part`, which is this rank's rows, never the complete parameter.

Fixed communication buffers (--fsdp-double-buffer), in place of one allocation per collective.
FSDP2 gathers a unit into a staging buffer and copies the parameters out of it; it copies gradients
into another staging buffer and reduce-scatters them from it.  Two such buffers are in use at a
time: that of the unit that computes, and that of the unit whose collective overlaps with it.  So
layers of equal size alternate between two buffers, whose addresses never change: memory does not
fragment, and NCCL registers them once.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
    ProcessGroupAllocMixin,
)

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.device.async_host_copy import AsyncHostCopy
from megatron.core.distributed.data_parallel_base import DataParallelBase
from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
    reshards_after_forward,
    share_of,
    shares_instances,
)
from megatron.core.distributed.grad_buffer import gradient_of
from megatron.core.parallel.collectives import all_gather_single
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import FlatPart, ParamInfo, info_of, local_part, set_info

_HALF = (torch.bfloat16, torch.float16)
_BUFFERS = 2
Size = Sequence[int | torch.SymInt]  # FSDP2's type; the sizes passed to this file are integers


class FullyShardedDataParallel(DataParallelBase):
    """Data-parallel wrapper that shards the parameters of ``module`` with FSDP2.

    If ``module`` was built under ``torch.device("meta")``, memory is allocated for this rank's
    parts only, without values: call `initialize_parameters` or load a checkpoint.
    """

    @library_call(
        "config ddp_config module fsdp_unit_modules disable_bucketing device grad_comm_pgs "
        "model_comm_pgs",
        unused="fsdp_unit_modules disable_bucketing device",
    )
    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        # Every backward pass reduces the gradients of its units itself: stages cannot align it.
        ddp_config = replace(ddp_config, align_grad_reduce=False)
        super().__init__(config, ddp_config, module, pg_collection)
        # The model returns a view if a transpose needs no copy.  No caller writes into it.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        self.units: list[FSDPModule] = []
        # For each unit: its number of elements, and the group that shards it.
        self._unit_kinds: list[tuple[int, dist.ProcessGroup]] = []
        self._summed: list[nn.Parameter] = []  # FSDP2 sums their gradients without dividing
        # name -> sum of gradient values, or of their squares, over micro-batches, to check them
        self._sums: dict[str, Tensor] = {}
        # Read before sharding, which replaces the parameters by new objects without a record.
        records = {name: _cut(p, pg_collection) for name, p in module.named_parameters()}
        policy = self._precision()
        reshards = reshards_after_forward(self.ddp_config)
        # From the innermost module outwards: a unit has the parameters that no inner unit has.
        groups = pg_collection
        ranks = dist.get_process_group_ranks
        if ranks(groups.expt_dp) != ranks(groups.dp_cp):  # of an expert others hold copies
            mesh = _mesh(groups, groups.intra_expt_dp, groups.expt_dp)
            for name, unit in module.named_modules():
                if name.endswith(".experts"):
                    self._shard(unit, mesh, policy, reshards)
        mesh = _mesh(groups, groups.intra_dp_cp, groups.dp_cp)
        for unit in _units(module):
            self._shard(unit, mesh, policy, reshards)
        self._shard(module, mesh, policy, None)  # the root keeps its parameters until backward
        self._choose_buffers()
        if any(param.is_meta for param in module.parameters()):
            _give_memory(module, records)
        for name, param in module.named_parameters():
            set_info(param, records[name])

    def forward(self, *inputs: object, **kwargs: object) -> object:
        output = self.module(*inputs, **kwargs)
        if not torch.is_grad_enabled():  # no backward pass will free the gathered parameters
            for unit in self.units:
                unit.reshard()
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which gradients are reduce-scattered, but not summed over instances.

        Parameters that are not freed between forward and backward stay gathered until the next
        micro-batch, too.
        """
        root = self.units[-1]  # the setters reach all units inside it
        root.set_requires_all_reduce(False)
        root.set_reshard_after_backward(reshards_after_forward(self.ddp_config))
        try:
            yield
        finally:
            root.set_requires_all_reduce(True)
            root.set_reshard_after_backward(True)

    def start_grad_sync(self, *_: object) -> None:
        """Do nothing: the backward pass itself reduces the gradients of every unit."""

    def stop_communication(self) -> None:
        """Do nothing: no collective outlives the pass that started it."""

    def finish_grad_sync(self) -> None:
        # One device-to-host copy for all parameters, after all kernels of the backward pass.
        if self._sums:
            total = torch.stack(list(self._sums.values())).sum()
            value = total.sqrt() if self.check.for_large else total
            self.check.validate(AsyncHostCopy(value), 0, self._sums.items())
        # Experts process tokens of all expert-parallel ranks: their mean is over dp_cp, too.
        grads = [grad for p in self._summed if (grad := gradient_of(p)) is not None]
        if grads and not self.config.calculate_per_token_loss:
            torch._foreach_mul_(grads, 1 / self.groups.dp_cp.size())

    def zero_grad_buffer(self) -> None:
        self._sums.clear()
        for param in self.module.parameters():
            param.grad = None

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        grads = [grad for _, grad in self.reduced_gradients()]
        torch._foreach_mul_([grad for grad in grads if grad is not None], scaling_factor)

    def reduced_gradients(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        for param in self.module.parameters():
            if param.requires_grad:
                yield param, gradient_of(param)

    def broadcast_params(self) -> None:
        """Broadcast the parts of the first instance to the others.  Collective on inter_dist_opt.

        Within an instance every element has one owner, so that no copies can differ.
        """
        group = self.groups.inter_dist_opt
        if group.size() > 1:
            for param in self.module.parameters():
                dist.broadcast(local_part(param), dist.get_global_rank(group, 0), group=group)

    def owned_parts(self) -> Iterator[tuple[nn.Parameter, int, int]]:
        """Yield (parameter, start, stop): the elements of this rank's part that it updates.

        Instances divide the update of a part that they have in common.
        """
        group = self.groups.inter_dist_opt
        for param in self.module.parameters():
            start, stop = share_of(local_part(param).numel(), group.rank(), group.size())
            if param.requires_grad and start < stop:
                yield param, start, stop

    def spans_by_rank(self) -> Iterator[tuple[nn.Parameter, list[tuple[int, int]]]]:
        for param in self.module.parameters():
            if param.requires_grad:
                size = _sharing_group(self.groups, param).size()
                held = [_rows_of(tuple(param.shape), rank, size) for rank in range(size)]
                if shares_instances(self.ddp_config):
                    copies = self.groups.inter_dist_opt.size()
                    held = [
                        (start + first, start + last)
                        for copy in range(copies)
                        for start, stop in held
                        for first, last in [share_of(stop - start, copy, copies)]
                    ]
                yield param, held

    @torch.no_grad()
    def start_param_sync(
        self, *_: object, force_sync: bool = False, force_dispatch: bool = False
    ) -> None:
        """All-gather the pieces that other instances updated.  Collective over inter_dist_opt.

        One all-gather per unit.
        """
        # ``parameters()`` of a unit includes those of inner units, which precede it in the list.
        group = self.groups.inter_dist_opt
        done = set[nn.Parameter]()
        for unit in self.units:
            assert isinstance(unit, nn.Module)  # fully_shard adds FSDPModule to its bases
            params = [p for p in unit.parameters() if p.requires_grad and p not in done]
            if not params:
                continue
            done.update(params)
            flat = [local_part(param).view(-1) for param in params]
            # One gather for all parameters of a unit: row r of ``shares`` is rank r's share of
            # every parameter, padded to the width of rank 0's share, the largest one.
            widths = [share_of(len(values), 0, group.size())[1] for values in flat]
            shares = flat[0].new_empty(group.size(), sum(widths))
            for values, share in zip(flat, shares[group.rank()].split(widths), strict=True):
                start, stop = share_of(len(values), group.rank(), group.size())
                share[: stop - start] = values[start:stop]
            all_gather_single(shares.view(-1), shares[group.rank()], group=group)
            for values, column in zip(flat, shares.split(widths, dim=1), strict=True):
                values.copy_(column.reshape(-1)[: len(values)])

    def _precision(self) -> MixedPrecisionPolicy:
        dtypes = {p.dtype for p in self.module.parameters()} & set(_HALF)
        return MixedPrecisionPolicy(
            param_dtype=next(iter(dtypes), None),
            reduce_dtype=torch.float32 if self.ddp_config.grad_reduce_in_fp32 else None,
            cast_forward_inputs=False,  # the residual stream may have a wider dtype
        )

    def _shard(
        self,
        unit: nn.Module,
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ) -> None:
        """Shard the parameters of ``unit`` that no inner unit has."""
        names = {
            (part, attribute): info_of(param).name or attribute
            for part in unit.modules()
            for attribute, param in part.named_parameters(recurse=False)
            if local_part(param) is param
        }
        numel = sum(part.get_parameter(attribute).numel() for part, attribute in names)
        # The optimizer updates these rows in fp32; the policy casts them to 16 bits before each
        # all-gather, so that fewer bytes are sent.
        for param in unit.parameters():
            if param.dtype in _HALF:
                param.data = param.data.float()
        sharded = fully_shard(
            unit, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy
        )
        if self.check.for_nan or self.check.for_large:
            self._watch(unit, names)
        # FSDP2 divides by the size of the mesh.  The mean is over dp_cp, and an expert's mesh is
        # smaller: `finish_grad_sync` divides the gradients of experts.
        is_apart = mesh.size() != self.groups.dp_cp.size()
        if self.config.calculate_per_token_loss or is_apart:
            sharded.set_gradient_divide_factor(1.0)
        if is_apart:
            self._summed.extend(unit.parameters())
        # Only NCCL has ReduceOp.AVG; a sum that is not divided needs ReduceOp.SUM.
        sums = self.config.calculate_per_token_loss or not device.is_cuda()
        sharded.set_force_sum_reduction_for_comms(
            sums or not self.ddp_config.gradient_reduce_div_fusion
        )
        self.units.append(sharded)
        group = self.groups.intra_expt_dp if is_apart else self.groups.intra_dp_cp
        self._unit_kinds.append((numel, group))

    def _choose_buffers(self) -> None:
        """Select the communication buffers of each unit, by --fsdp-double-buffer and --use-nccl-ub.

        Units of equal size share two fixed buffers; other units get memory that NCCL registers.
        """
        registers = self.ddp_config.nccl_ub
        of_group = {}
        for group in {group for _, group in self._unit_kinds}:
            allocate = ProcessGroupAllocMixin(group).allocate if registers else torch.empty
            # One pair to gather and one to reduce: a backward pass does both at the same time.
            of_group[group] = DoubleBuffers(allocate), DoubleBuffers(allocate)
        units_of_kind = Counter(self._unit_kinds)
        for unit, kind in zip(self.units, self._unit_kinds, strict=True):
            if units_of_kind[kind] > 1 and (self.ddp_config.fsdp_double_buffer or registers):
                gathered, reduced = of_group[kind[1]]
                unit.set_custom_all_gather(BufferedAllGather(gathered))
                unit.set_custom_reduce_scatter(BufferedReduceScatter(reduced))
            elif registers:
                unit.set_allocate_memory_from_process_group_for_comm(True)

    def _watch(self, unit: nn.Module, names: dict[tuple[nn.Module, str], str]) -> None:
        """Check the gradients of ``unit`` on this rank for NaN, from its first forward pass on.

        A hook of a gathered parameter runs before the reduce-scatter, whose sums would hide which
        rank a NaN came from.  The gathered parameters are created by the first all-gather, inside
        FSDP2's own pre-hook, which runs before this one.
        """

        def begin(*_: object) -> None:
            handle.remove()
            for (part, attribute), name in names.items():
                param = part.get_parameter(attribute)
                if param.requires_grad:
                    param.register_hook(partial(self._look_at, name))

        handle = unit.register_forward_pre_hook(begin)

    def _look_at(self, name: str, grad: Tensor) -> None:
        # A sum is not finite if any value is not; so is the total over micro-batches.
        values = grad.detach()
        dtype = torch.promote_types(grad.dtype, torch.float32)
        values = values.to(dtype).square() if self.check.for_large else values
        total = values.sum(dtype=dtype)
        self._sums[name] = self._sums[name] + total if name in self._sums else total


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that become FSDP2 units: layers, and embeddings that are not shared.

    An encoder inside of a layer belongs to the unit of that layer.
    """
    for name, part in module.named_modules():
        last = name.rpartition(".")[2]
        if last == "layers" and ".layers." not in name and isinstance(part, nn.ModuleList):
            yield from part
        if last == "embedding":
            owner = vars(module.get_submodule(name.rpartition(".")[0]))
            if not owner.get("share_embeddings_and_output_weights", True):
                yield part


def _give_memory(module: nn.Module, records: dict[str, ParamInfo]) -> None:
    """Allocate memory, without values, for this rank's parts of meta parameters.

    Raises ConfigError if a buffer or a parameter has no record of its initial values.
    """
    lost = [name for name, _ in module.named_buffers()]
    lost += [name for name, record in records.items() if not record.name or record.init == "own"]
    if lost:
        raise ConfigError(
            f"--init-model-with-meta-device: no record of the initial values of {lost[0]}; "
            "create it with param_init.new_parameter, or initialize the model in device memory, "
            "which is the default"
        )
    module.to_empty(device=device.current())


def _mesh(
    groups: ProcessGroupCollection, inner: dist.ProcessGroup, replicas: dist.ProcessGroup
) -> DeviceMesh:
    """Return the mesh of the ranks that shard parameters; with several instances, a 2-D mesh.

    Dimensions of the 2-D mesh: [instance, rank in the instance].
    """
    kind = device.current().type
    outer = groups.inter_dist_opt
    with unset_fake_temporarily():  # DeviceMesh reads the values of the tensor of ranks
        if outer.size() == 1:
            return DeviceMesh.from_group(inner, kind)
        ranks = torch.tensor(dist.get_process_group_ranks(replicas)).view(outer.size(), -1)
        return DeviceMesh.from_group(
            [outer, inner], kind, mesh=ranks, mesh_dim_names=("replicate", "shard")
        )


def _rows_of(shape: tuple[int, ...], rank: int, size: int) -> tuple[int, int]:
    """Return (start, stop): the elements of the flattened parameter that ``rank`` holds."""
    start, stop = share_of(shape[0], rank, size)
    return start * prod(shape[1:]), stop * prod(shape[1:])


def _sharing_group(groups: ProcessGroupCollection, param: nn.Parameter) -> ProcessGroup:
    """Return the ranks that hold the rows of ``param``."""
    return groups.intra_expt_dp if info_of(param).is_expert else groups.intra_dp_cp


def _cut(param: nn.Parameter, groups: ProcessGroupCollection) -> ParamInfo:
    """Return the record of ``param`` after sharding; FSDP2 splits rows as torch.chunk does."""
    inner = _sharing_group(groups, param)
    outer = groups.inter_dist_opt
    shape = tuple(param.shape)
    start, _ = _rows_of(shape, inner.rank(), inner.size())
    return replace(
        info_of(param),
        part=FlatPart(shape, start, outer.rank(), outer.size()),
        dtype=param.dtype if param.dtype in _HALF else None,
    )


class DoubleBuffers:
    """At most two buffers for each size and dtype, allocated at their first use and never freed.

    A buffer is free when no tensor but the one in this object refers to its storage.  FSDP2 drops
    its tensor only after the streams that allocate have waited for the copies out of it.
    """

    def __init__(self, allocate: Callable[..., Tensor] = torch.empty) -> None:
        self._allocate = allocate
        self._kept: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, size: Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of ``size`` in a free buffer; in new memory if both are in use."""
        numel = prod(map(int, size))
        buffers = self._kept.setdefault((numel, dtype, device), [])
        for place, buffer in enumerate(buffers):
            if _references(buffer) == _references(torch.empty(0)):
                buffers.append(buffers.pop(place))  # the least recently used one comes first
                return buffer.view(*size)
        buffer = self._allocate((numel,), dtype=dtype, device=device)
        if len(buffers) < _BUFFERS:
            buffers.append(buffer)
        return buffer.view(*size)


class BufferedAllGather(DefaultAllGather):
    """All-gather of FSDP2 into a fixed buffer."""

    def __init__(self, buffers: DoubleBuffers) -> None:
        self.allocate = buffers.take  # type: ignore[method-assign]


class BufferedReduceScatter(DefaultReduceScatter):
    """Reduce-scatter of FSDP2 out of a fixed buffer.

    FSDP2 calls `allocate` for the input, then for the output, which becomes the gradient and so
    needs memory of its own.
    """

    def __init__(self, buffers: DoubleBuffers) -> None:
        self._allocators = cycle((buffers.take, super().allocate))

    def allocate(self, size: Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return next(self._allocators)(size, dtype=dtype, device=device)


def _references(buffer: Tensor) -> int:
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
