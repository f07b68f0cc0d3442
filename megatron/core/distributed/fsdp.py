"""Parameters, gradients and optimizer cut over the replicas: PyTorch's FSDP2 behind our wrapper.

Each transformer layer is a unit, its experts one of their own where other ranks hold copies of
them, an embedding that the output layer does not share another, the rest of the model the last.  A
unit's parameters are gathered before its forward pass and its gradients are reduced to the owners
as soon as its backward pass is done, in every micro-batch: no rank has room for whole gradients.
Parameters are kept in fp32 and gathered in the model's dtype.  Between steps a rank holds rows of
dim 0 of each tensor-parallel share, as DTensors; the record of a parameter says which
(`ParamInfo.part`).

Collectives, over intra_dp_cp (experts apart: intra_expt_dp), unit by unit: all-gather before
forward (and before backward, where parameters were dropped in between), reduce-scatter after
backward.  With several instances of the whole model (HSDP) the owners' gradients are summed over
inter_dist_opt in the last micro-batch; the owners of one part may update a piece each, and gather
them there (`start_param_sync`).

The order of units is the order in which the model calls them, the same on all ranks of a group.
A model that called other layers on some ranks would deadlock.

Lifetime of buffers.  A rank's own rows live as long as the model.  Gathered parameters exist from
the all-gather of their unit to the end of its pass; those of the root unit until backward.
Autograd saves views of gathered parameters: FSDP2 frees the storage of the tensor, not the tensor,
and gathers into the same storage before backward.  So several micro-batches may be between forward
and backward, as in a pipeline, where each model chunk is a sharded model of its own over the
replicas of its stage.  Whole gradients exist from the backward pass of a unit to its
reduce-scatter; after that ``param.grad`` is a DTensor of this rank's rows.

Hazard: outside of forward and backward a parameter is a DTensor.  Code that reads or writes its
values takes `local_part`, which is this rank's rows, never the whole.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megatron.core import device
from megatron.core.config.errors import ConfigError, NonFiniteError
from megatron.core.distributed.data_parallel_base import DataParallelBase, LossConfig
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp_double_buffer import (
    BufferedAllGather,
    BufferedReduceScatter,
    DoubleBuffers,
    RegisteredMemory,
)
from megatron.core.distributed.grad_buffer import gradient_of
from megatron.core.distributed.non_finite import non_finite_gradients
from megatron.core.distributed.sharding import reshards_after_forward, share_of, shares_instances
from megatron.core.parallel.collectives import all_gather_single
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import FlatPart, ParamInfo, info_of, local_part, set_info

_HALF = (torch.bfloat16, torch.float16)


class FullyShardedDataParallel(DataParallelBase):
    """A model of which each data-parallel rank holds a part.

    Of a model built under ``torch.device("meta")`` only the parts ever get memory; their values
    come from `initialize_parameters`, or a checkpoint.
    """

    def __init__(
        self,
        config: LossConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        # Each backward pass reduces what it has finished: no start that stages could put off.
        ddp_config = replace(ddp_config, align_grad_reduce=False)
        super().__init__(config, ddp_config, module, pg_collection)
        # A view comes out of a model where transposing moves nothing.  Nobody writes into it.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        self.units: list[FSDPModule] = []
        self._unit_kinds: list[tuple[int, dist.ProcessGroup]] = []  # elements, and who holds them
        self._summed: list[nn.Parameter] = []  # whose gradients FSDP2 does not divide
        self._sums: dict[str, Tensor] = {}  # of a parameter's gradients: NaN shows in them
        # Taken before sharding, which replaces the parameters by new objects without a record.
        records = {name: _cut(p, pg_collection) for name, p in module.named_parameters()}
        policy, reshards = self._precision(), reshards_after_forward(self.ddp_config)
        # From the inside outwards: a unit takes what no unit inside it has taken.
        if _experts_are_apart(pg_collection):
            mesh = _mesh(pg_collection, pg_collection.intra_expt_dp, pg_collection.expt_dp)
            for name, unit in module.named_modules():
                if name.endswith(".experts"):
                    self._shard(unit, mesh, policy, reshards)
        mesh = _mesh(pg_collection, pg_collection.intra_dp_cp, pg_collection.dp_cp)
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
        if not torch.is_grad_enabled():  # no backward pass will drop what was gathered
            for unit in self.units:
                unit.reshard()
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add to the gradients, which still go to their owners each time.

        The sum over instances waits; parameters that are kept for backward stay until the next
        micro-batch too.
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
        """Nothing: the backward pass has reduced what it has finished."""

    def finish_grad_sync(self) -> None:
        # One read of the device for all parameters, when it has nothing else to do.
        if self._sums and not torch.stack(list(self._sums.values())).isfinite().all():
            culprits = non_finite_gradients(self._sums.items())
            raise NonFiniteError(f"{culprits}, met before reducing over data-parallel ranks")
        # Experts have tokens of ranks that hold others: their mean too is over all replicas.
        grads = [grad for p in self._summed if (grad := gradient_of(p)) is not None]
        if grads and not self.config.calculate_per_token_loss:
            torch._foreach_mul_(grads, 1 / self.groups.dp_cp.size())

    def zero_grad_buffer(self) -> None:
        self._sums.clear()
        for param in self.module.parameters():
            param.grad = None

    def scale_gradients(self, factor: float | Tensor) -> None:
        grads = [grad for _, grad in self.reduced_gradients()]
        torch._foreach_mul_([grad for grad in grads if grad is not None], factor)

    def reduced_gradients(self) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        for param in self.module.parameters():
            if param.requires_grad:
                yield param, gradient_of(param)

    def broadcast_params(self) -> None:
        """Take the parts of the first instance: within one, every element has one owner."""
        group = self.groups.inter_dist_opt
        if group.size() > 1:
            for param in self.module.parameters():
                dist.broadcast(local_part(param), dist.get_global_rank(group, 0), group=group)

    def owned_parts(self) -> Iterator[tuple[nn.Parameter, int, int]]:
        """What this rank updates where instances share that: elements start to stop of its part."""
        group = self.groups.inter_dist_opt
        for param in self.module.parameters():
            numel = local_part(param).numel()
            start, stop = share_of(numel, group.rank(), group.size())
            if param.requires_grad and start < stop:
                yield param, start, stop

    def spans_by_rank(self) -> Iterator[tuple[nn.Parameter, list[tuple[int, int]]]]:
        groups = self.groups
        for param in self.module.parameters():
            if param.requires_grad:
                inner = groups.intra_expt_dp if info_of(param).is_expert else groups.intra_dp_cp
                held = [_rows_of(tuple(param.shape), r, inner.size()) for r in range(inner.size())]
                if shares_instances(self.ddp_config):
                    size = groups.inter_dist_opt.size()
                    shares = [[share_of(b - a, r, size) for a, b in held] for r in range(size)]
                    starts = [a for a, _ in held] * size
                    flat = [share for of_instance in shares for share in of_instance]
                    held = [(s + a, s + b) for s, (a, b) in zip(starts, flat, strict=True)]
                yield param, held

    @torch.no_grad()
    def start_param_sync(self) -> None:
        """Take what other instances have updated.  Collective over inter_dist_opt, unit by unit."""
        # ``parameters()`` of a unit includes those of the units inside it, which came before.
        group, done = self.groups.inter_dist_opt, set[nn.Parameter]()
        for unit in self.units:
            assert isinstance(unit, nn.Module)  # fully_shard adds FSDPModule to its bases
            params = [p for p in unit.parameters() if p.requires_grad and p not in done]
            if not params:
                continue
            done.update(params)
            flat = [local_part(param).view(-1) for param in params]
            # One gather for all parameters of a unit: each rank's row of ``shares`` holds its share
            # of every parameter, padded to the width of the first rank's, which is the largest.
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
            cast_forward_inputs=False,  # a residual stream may be wider than the parameters
        )

    def _shard(
        self,
        unit: nn.Module,
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ) -> None:
        """Cut what ``unit`` has and no unit inside it."""
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
        if self.ddp_config.check_for_nan_in_grad:
            self._watch(unit, names)
        # FSDP2 divides by the size of the mesh.  An expert's mesh is smaller than dp_cp, over which
        # the mean is taken: `finish_grad_sync` divides those.
        is_apart = mesh.size() != self.groups.dp_cp.size()
        if self.config.calculate_per_token_loss or is_apart:
            sharded.set_gradient_divide_factor(1.0)
        if is_apart:
            self._summed.extend(unit.parameters())
        # AVG is for NCCL; and a sum that is not divided needs no operation of its own there.
        sums = self.config.calculate_per_token_loss or not device.is_cuda()
        sharded.set_force_sum_reduction_for_comms(
            sums or not self.ddp_config.gradient_reduce_div_fusion
        )
        self.units.append(sharded)
        group = self.groups.intra_expt_dp if is_apart else self.groups.intra_dp_cp
        self._unit_kinds.append((numel, group))

    def _choose_buffers(self) -> None:
        """Two fixed buffers for units of equal size, registered memory for the others, as asked."""
        registers, of_group = self.ddp_config.nccl_ub, {}
        for group in {group for _, group in self._unit_kinds}:
            allocate = RegisteredMemory(group).allocate if registers else torch.empty
            # Apart, since backward passes gather and reduce at once.
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
        """Look at the gradients of ``unit`` from its first forward pass on: then they are whole.

        A hook of a gathered parameter runs before the reduce-scatter, whose sums would hide which
        rank a NaN came from.  The gathered parameters are created by the first
        all-gather, inside FSDP2's own pre-hook, which runs before this one.
        """

        def begin(*_: object) -> None:
            handle.remove()
            for (part, attribute), name in names.items():
                param = part.get_parameter(attribute)
                if param.requires_grad:
                    param.register_hook(partial(self._look_at, name))

        handle = unit.register_forward_pre_hook(begin)

    def _look_at(self, name: str, grad: Tensor) -> None:
        # A sum is not finite if any value is not; adding those of the micro-batches keeps that.
        total = grad.detach().sum(dtype=torch.promote_types(grad.dtype, torch.float32))
        self._sums[name] = self._sums[name] + total if name in self._sums else total


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """Parts that are gathered and dropped apart from the rest: layers, an embedding of its own."""
    for name, part in module.named_modules():
        last = name.rpartition(".")[2]
        if last == "layers" and isinstance(part, nn.ModuleList):
            yield from part
        if last == "embedding" and not _is_shared(module, name):
            yield part


def _is_shared(module: nn.Module, name: str) -> bool:
    """Whether the owner of the embedding at ``name`` uses it for its output too."""
    owner = module.get_submodule(name.rpartition(".")[0])
    return bool(vars(owner).get("share_embeddings_and_output_weights", True))


def _give_memory(module: nn.Module, records: dict[str, ParamInfo]) -> None:
    """Memory without values for the parts of parameters that have none.  Raises ConfigError."""
    lost = [name for name, _ in module.named_buffers()]
    lost += [name for name, record in records.items() if not record.name or record.init == "own"]
    if lost:
        raise ConfigError(
            f"--init-model-with-meta-device: no record of the initial values of {lost[0]}; "
            "create it with param_init.new_parameter, or initialise the model in device memory, "
            "which is the default"
        )
    module.to_empty(device=device.current())


def _experts_are_apart(groups: ProcessGroupCollection) -> bool:
    """Whether the replicas of an expert are other ranks than those of a dense layer."""
    ranks = dist.get_process_group_ranks
    return ranks(groups.expt_dp) != ranks(groups.dp_cp)


def _mesh(
    groups: ProcessGroupCollection, inner: dist.ProcessGroup, replicas: dist.ProcessGroup
) -> DeviceMesh:
    """The ranks that cut the parameters; with several instances [instance, rank in it]."""
    kind, outer = device.current().type, groups.inter_dist_opt
    with unset_fake_temporarily():  # the mesh reads the numbers of the ranks
        if outer.size() == 1:
            return DeviceMesh.from_group(inner, kind)
        ranks = torch.tensor(dist.get_process_group_ranks(replicas)).view(outer.size(), -1)
        return DeviceMesh.from_group(
            [outer, inner], kind, mesh=ranks, mesh_dim_names=("replicate", "shard")
        )


def _rows_of(shape: tuple[int, ...], rank: int, size: int) -> tuple[int, int]:
    """Elements start to stop of what a rank holds, flattened."""
    start, stop = share_of(shape[0], rank, size)
    return start * prod(shape[1:]), stop * prod(shape[1:])


def _cut(param: nn.Parameter, groups: ProcessGroupCollection) -> ParamInfo:
    """The record of ``param`` once it is cut; FSDP2 deals rows out as torch.chunk does."""
    outer, shape = groups.inter_dist_opt, tuple(param.shape)
    inner = groups.intra_expt_dp if info_of(param).is_expert else groups.intra_dp_cp
    start, _ = _rows_of(shape, inner.rank(), inner.size())
    return replace(
        info_of(param),
        part=FlatPart(shape, start, outer.rank(), outer.size()),
        dtype=param.dtype if param.dtype in _HALF else None,
    )
