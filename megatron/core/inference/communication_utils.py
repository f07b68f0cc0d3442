"""Exchange of tensors between pipeline stages, for scripts with a forward pass of their own.

``pp_group`` defaults to the installed group.  Without pipeline parallelism nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.parallel import parallel_state


def is_pipeline_first_stage(pp_group: ProcessGroup | None) -> bool:
    """Return whether this rank is on the first stage."""
    return _group(pp_group).rank() == 0


def is_pipeline_last_stage(pp_group: ProcessGroup | None) -> bool:
    """Return whether this rank is on the last stage."""
    group = _group(pp_group)
    return group.rank() == group.size() - 1


def broadcast_from_last_pipeline_stage(
    size: Sequence[int],
    dtype: torch.dtype,
    tensor: Tensor | None = None,
    pp_group: ProcessGroup | None = None,
) -> Tensor | None:
    """Return the tensor of the last stage on all stages.  Collective over pp."""
    group = _group(pp_group)
    if group.size() == 1:
        return tensor
    if is_pipeline_last_stage(group):
        assert tensor is not None, "the last stage gives the tensor"
        assert tuple(tensor.shape) == tuple(size), f"shape {tuple(tensor.shape)} is not {size}"
        assert tensor.dtype == dtype, f"{tensor.dtype} is not {dtype}"
        sent = tensor.contiguous()
    else:
        sent = torch.empty(tuple(size), dtype=dtype, device=device.current())
    dist.broadcast(sent, group=group, group_src=group.size() - 1)
    return sent


def recv_from_prev_pipeline_rank_(
    recv_buffer: Tensor | None = None, pp_group: ProcessGroup | None = None
) -> None:
    """Receive into ``recv_buffer`` from the stage before this one."""
    assert recv_buffer is not None, "give the tensor to receive into"
    group = _group(pp_group)
    dist.recv(recv_buffer, group=group, group_src=group.rank() - 1)


def send_to_next_pipeline_rank(
    tensor: Tensor | None = None, pp_group: ProcessGroup | None = None
) -> None:
    """Send ``tensor`` to the stage after this one."""
    assert tensor is not None, "give the tensor to send"
    group = _group(pp_group)
    dist.send(tensor.contiguous(), group=group, group_dst=group.rank() + 1)


def _group(pp_group: ProcessGroup | None) -> ProcessGroup:
    return parallel_state.current().pp if pp_group is None else pp_group
