"""All-gather and reduce-scatter of one tensor, without torch's Python code around them; helpers.

torch.distributed examines the arguments of each call, which takes 2 us of the host: a layer with
tensor and sequence parallelism runs ten of these collectives per micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ProcessGroup

from megatron.core import device

_Operation = dist.ReduceOp | dist.ReduceOp.RedOpType
# torch 2.11 has only the old names, which torch 2.13 deprecates with a warning.
_IS_NEW = hasattr(ProcessGroup, "all_gather_single")
_gather_in_torch = vars(dist).get("all_gather_single", dist.all_gather_into_tensor)
_scatter_in_torch = vars(dist).get("reduce_scatter_single", dist.reduce_scatter_tensor)
_is_compiling = torch.compiler.is_compiling
_SUM = dist.ReduceOp.SUM


def _new_gather_options(async_op: bool) -> AllgatherOptions:
    options = AllgatherOptions()
    options.asyncOp = async_op
    return options


def _scatter_options(op: _Operation, async_op: bool) -> dist.ReduceScatterOptions:
    options = dist.ReduceScatterOptions()
    options.reduceOp = op  # type: ignore[assignment]
    options.asyncOp = async_op
    return options


# By ``async_op``: backends only read them.
_gather_options = {is_async: _new_gather_options(is_async) for is_async in (False, True)}
_sum_options = {is_async: _scatter_options(_SUM, is_async) for is_async in (False, True)}


@overload
def all_gather_single(
    output: Tensor, input: Tensor, /, *, group: ProcessGroup, async_op: Literal[True]
) -> dist.Work: ...
@overload
def all_gather_single(output: Tensor, input: Tensor, /, *, group: ProcessGroup) -> None: ...
def all_gather_single(
    output: Tensor, input: Tensor, /, *, group: ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Concatenate ``input`` of every rank in ``output``; return the work if ``async_op``."""
    if _is_compiling():  # torch.compile knows torch's function
        work: dist.Work | None = _gather_in_torch(output, input, group=group, async_op=async_op)
        return work
    options = _gather_options[async_op]
    method = group.all_gather_single if _IS_NEW else group._allgather_base
    return _begun(method(output, input, options), async_op)


@overload
def reduce_scatter_single(
    output: Tensor,
    input: Tensor,
    /,
    *,
    op: _Operation = ...,
    group: ProcessGroup,
    async_op: Literal[True],
) -> dist.Work: ...
@overload
def reduce_scatter_single(
    output: Tensor, input: Tensor, /, *, op: _Operation = ..., group: ProcessGroup
) -> None: ...
def reduce_scatter_single(
    output: Tensor,
    input: Tensor,
    /,
    *,
    op: _Operation = _SUM,
    group: ProcessGroup,
    async_op: bool = False,
) -> dist.Work | None:
    """Reduce ``input`` and keep this rank's part; return the work if ``async_op``."""
    if _is_compiling():
        return _scatter_in_torch(output, input, op=op, group=group, async_op=async_op)  # type: ignore[no-any-return]
    options = _sum_options[async_op] if op is _SUM else _scatter_options(op, async_op)
    method = group.reduce_scatter_single if _IS_NEW else group._reduce_scatter_base
    return _begun(method(output, input, options), async_op)


def _begun(work: dist.Work | None, async_op: bool) -> dist.Work | None:
    if async_op:
        return work
    if work is not None:  # some backends do not wait themselves
        work.wait()
    return None


def wait_for_ranks(group: ProcessGroup | None = None) -> None:
    """Wait for all ranks of ``group``, by default all ranks.  Collective.

    On NCCL it is an all-reduce.  As the first operation of a group torch runs it on the GPU with
    the number of the rank modulo the GPUs of the host, which may be that of another rank.
    """
    if dist.get_backend(group) == dist.Backend.NCCL:
        dist.barrier(group=group, device_ids=[device.current().index])
    else:
        dist.barrier(group=group)


def largest_of_ranks(values: Sequence[float]) -> list[float]:
    """Return the maximum of each value over all ranks.  Collective over all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(values)
    largest = torch.tensor(values, dtype=torch.float64, device=device.current())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return [float(value) for value in largest.tolist()]
