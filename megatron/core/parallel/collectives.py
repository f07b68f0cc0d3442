"""Collectives on one tensor, under the names of torch 2.13, and on small JSON values.

Values are sent as JSON, never as pickles.  Their ``group`` None is a world of one: nothing is sent.
Each function that takes a group is collective over it, except `rank_in` and `on_wire`.  A tuple in
a value is received as a list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.config.errors import CheckpointDamaged, CheckpointError

# torch 2.11 has only the old names, which torch 2.13 deprecates with a warning.
all_gather_single: Callable[..., dist.Work] = vars(dist).get(
    "all_gather_single", dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., dist.Work] = vars(dist).get(
    "reduce_scatter_single", dist.reduce_scatter_tensor
)


def all_reduce_over(
    tensor: Tensor, *groups: ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Reduce ``tensor`` in place over each of ``groups``, one after the other; return it."""
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(tensor, op, group=group)
    return tensor


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


def values_of_ranks(values: Sequence[float]) -> list[list[float]]:
    """Return the values of each rank, in rank order.  Collective over all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [list(values)]
    mine = torch.tensor(values, dtype=torch.float64, device=device.current())
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return [row.tolist() for row in rows]


T = TypeVar("T")

JsonError = list[bool | str]  # [is it CheckpointDamaged, message]


def rank_in(group: ProcessGroup | None) -> int:
    """Return this rank's index in ``group``."""
    return 0 if group is None else group.rank()


def gather_json(value: T, group: ProcessGroup | None) -> list[T] | None:
    """Return the values of all ranks on rank 0, None on other ranks."""
    if group is None or group.size() == 1:
        return [value]
    lengths, padded = _padded(value, group)
    received = [torch.empty_like(padded) for _ in lengths] if group.rank() == 0 else None
    dist.gather(padded, received, group=group, group_dst=0)
    return None if received is None else _decode(received, lengths)


def all_gather_json(value: T, group: ProcessGroup | None) -> list[T]:
    """Return the values of all ranks on every rank."""
    if group is None or group.size() == 1:
        return [value]
    lengths, padded = _padded(value, group)
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded, group=group)
    return _decode(received, lengths)


def is_so_everywhere(value: bool, group: ProcessGroup | None) -> bool:
    """Return whether ``value`` is true on all ranks."""
    if group is None or group.size() == 1:
        return value
    flag = on_wire(torch.tensor([int(value)]), group)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag)


def broadcast_json(value: T, group: ProcessGroup | None) -> T:
    """Return rank 0's value on every rank; the argument of other ranks is ignored."""
    if group is None or group.size() == 1:
        return value
    data = _encode(value if group.rank() == 0 else None, group)
    length = torch.tensor([data.numel()], device=data.device)
    dist.broadcast(length, group=group, group_src=0)
    if group.rank() > 0:
        data = data.new_empty(int(length))
    dist.broadcast(data, group=group, group_src=0)
    received: list[T] = _decode([data], [data.numel()])
    return received[0]


def all_or_none(call: Callable[[], T], where: object, group: ProcessGroup | None) -> T:
    """Return this rank's result of ``call``; if it raises on any rank, raise on all.

    An OSError becomes CheckpointDamaged, with ``where`` before its message.  The error is that of
    the lowest rank that has one.
    """
    error: CheckpointError | None = None
    try:
        result = call()
    except CheckpointError as problem:
        error = problem
    except OSError as problem:
        error = CheckpointDamaged(f"{where}: {reason_of(problem)}")
    errors = gather_json(None if error is None else error_as_json(error), group)
    raise_if(broadcast_json(next(filter(None, errors or ()), None), group))
    return result


def on_rank_0(call: Callable[[], T], where: object, group: ProcessGroup | None) -> T:
    """Return on all ranks what ``call`` returns on rank 0, or raise its error as `all_or_none`."""
    results = all_or_none(lambda: [call()] if rank_in(group) == 0 else [], where, group)
    return broadcast_json(results, group)[0]


def error_as_json(error: CheckpointError | OSError) -> JsonError:
    """Convert ``error`` for sending to other ranks; an OSError becomes CheckpointDamaged."""
    is_damaged = not isinstance(error, CheckpointError) or isinstance(error, CheckpointDamaged)
    return [is_damaged, reason_of(error)]


def raise_if(error: JsonError | None) -> None:
    """Raise the error that `error_as_json` converted, if any."""
    if error is not None:
        raise (CheckpointDamaged if error[0] else CheckpointError)(error[1])


def reason_of(error: BaseException) -> str:
    """Return the message of ``error``, or its type if the message is empty."""
    return str(error) or type(error).__name__


def _padded(value: object, group: ProcessGroup) -> tuple[list[int], Tensor]:
    """Return the lengths of all ranks' values, and this rank's bytes padded to the longest."""
    data = _encode(value, group)
    length = torch.tensor([data.numel()], device=data.device)
    lengths = [torch.empty_like(length) for _ in range(group.size())]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(n) for n in lengths]
    return sizes, torch.cat([data, data.new_zeros(max(sizes) - data.numel())])


def _encode(value: object, group: ProcessGroup) -> Tensor:
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return on_wire(data, group)


def on_wire(data: Tensor, group: ProcessGroup) -> Tensor:
    """Return ``data`` on the device that collectives of ``group`` need."""
    return data.to(device.current()) if dist.get_backend(group) == "nccl" else data


def _decode(received: Sequence[Tensor], lengths: Sequence[int]) -> list[Any]:
    sized = zip(received, lengths, strict=True)
    return [json.loads(bytes(data[:length].cpu().numpy())) for data, length in sized]
