"""Small JSON values between ranks.  Bytes on the wire are JSON, never pickles.

``group`` None is a world of one: nothing is sent.  Each function is collective over its group.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core import device


def rank_in(group: ProcessGroup | None) -> int:
    """This rank's number in ``group``."""
    return 0 if group is None else group.rank()


def gather_json(value: Any, group: ProcessGroup | None) -> list[Any] | None:
    """The values of all ranks, on rank 0; None elsewhere."""
    if group is None or group.size() == 1:
        return [value]
    lengths, padded = _padded(value, group)
    received = [torch.empty_like(padded) for _ in lengths] if group.rank() == 0 else None
    dist.gather(padded, received, group=group, group_dst=0)
    if received is None:
        return None
    return [_decode(data[:length]) for data, length in zip(received, lengths, strict=True)]


def all_gather_json(value: Any, group: ProcessGroup | None) -> list[Any]:
    """The values of all ranks, everywhere."""
    if group is None or group.size() == 1:
        return [value]
    lengths, padded = _padded(value, group)
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded, group=group)
    return [_decode(data[:length]) for data, length in zip(received, lengths, strict=True)]


def is_so_everywhere(value: bool, group: ProcessGroup | None) -> bool:
    """Whether ``value`` is true on all ranks."""
    if group is None or group.size() == 1:
        return value
    flag = on_wire(torch.tensor([int(value)]), group)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag)


def broadcast_json(value: Any, group: ProcessGroup | None) -> Any:
    """The value of rank 0, everywhere."""
    if group is None or group.size() == 1:
        return value
    data = _encode(value if group.rank() == 0 else None, group)
    length = torch.tensor([data.numel()], device=data.device)
    dist.broadcast(length, group=group, group_src=0)
    if group.rank() > 0:
        data = data.new_empty(int(length))
    dist.broadcast(data, group=group, group_src=0)
    return _decode(data)


def _padded(value: Any, group: ProcessGroup) -> tuple[list[int], Tensor]:
    """Lengths of all ranks, and this rank's bytes filled up to the longest."""
    data = _encode(value, group)
    length = torch.tensor([data.numel()], device=data.device)
    lengths = [torch.empty_like(length) for _ in range(group.size())]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(n) for n in lengths]
    return sizes, torch.cat([data, data.new_zeros(max(sizes) - data.numel())])


def _encode(value: Any, group: ProcessGroup) -> Tensor:
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return on_wire(data, group)


def on_wire(data: Tensor, group: ProcessGroup) -> Tensor:
    """``data`` where the collectives of ``group`` take it."""
    return data.to(device.current()) if dist.get_backend(group) == "nccl" else data


def _decode(data: Tensor) -> Any:
    return json.loads(bytes(data.cpu().numpy()))
