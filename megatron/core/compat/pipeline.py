"""Megatron Core's communication between pipeline stages, for loops that projects write.

The schedules of this project use `pipeline_parallel.transfer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.parallel import parallel_state

Tensors = Any  # a tensor, or a list of tensors, of which each may be None


class P2PCommunicator:
    """Sends hidden states to the next stage and gradients to the previous one.

    Each method that takes ``is_first_stage`` or ``is_last_stage`` sends and receives nothing on
    that stage.  Shapes and tensors are single or lists; the result has the form of the argument.
    With ``config.variable_seq_lengths`` the stages also send the shapes.
    """

    def __init__(self, pp_group: ProcessGroup, config: Any) -> None:
        self.pp_group = pp_group
        self.config = config
        ranks = dist.get_process_group_ranks(pp_group)
        self.next_rank = ranks[(pp_group.rank() + 1) % pp_group.size()]
        self.prev_rank = ranks[pp_group.rank() - 1]

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Tensors:
        """Receive hidden states from the previous stage; None on the first."""
        return self._exchange(self.prev_rank, None, tensor_shapes, is_first_stage)

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Tensors:
        """Receive the gradient of the sent hidden states from the next stage."""
        return self._exchange(self.next_rank, None, tensor_shapes, is_last_stage)

    def send_forward(self, output_tensors: Tensors, is_last_stage: bool) -> None:
        """Send hidden states to the next stage."""
        self._exchange(self.next_rank, output_tensors, None, is_last_stage)

    def send_backward(self, input_tensor_grads: Tensors, is_first_stage: bool) -> None:
        """Send the gradient of the received hidden states to the previous stage."""
        self._exchange(self.prev_rank, input_tensor_grads, None, is_first_stage)

    def send_forward_recv_backward(
        self, output_tensors: Tensors, tensor_shapes: Any, is_last_stage: bool
    ) -> Tensors:
        """Send hidden states to the next stage and receive a gradient from it."""
        return self._exchange(self.next_rank, output_tensors, tensor_shapes, is_last_stage)

    def send_backward_recv_forward(
        self, input_tensor_grads: Tensors, tensor_shapes: Any, is_first_stage: bool
    ) -> Tensors:
        """Send a gradient to the previous stage and receive hidden states from it."""
        return self._exchange(self.prev_rank, input_tensor_grads, tensor_shapes, is_first_stage)

    def _exchange(self, peer: int, tensors: Tensors, shapes: Any, is_at_end: bool) -> Tensors:
        """Send tensors to, and receive tensors of ``shapes`` from, ``peer``; at an end neither."""
        given = tensors if shapes is None else shapes
        if isinstance(given, list) and not all(isinstance(n, int) for n in given):
            none = [None] * len(given)
            pairs = zip(tensors or none, shapes or none, strict=True)
            return [self._exchange(peer, *pair, is_at_end) for pair in pairs]
        if is_at_end or given is None:
            return None
        if self.config.variable_seq_lengths:
            sizes = None if tensors is None else torch.tensor(tensors.shape, device=tensors.device)
            received = self._post(peer, sizes, None if shapes is None else (3,), torch.int64)
            shapes = None if received is None else received.tolist()
        dtype = self.config.pipeline_dtype or self.config.params_dtype
        received = self._post(peer, tensors, shapes, dtype)
        return None if received is None else received.requires_grad_()

    def _post(
        self, peer: int, tensor: Tensor | None, shape: Sequence[int] | None, dtype: torch.dtype
    ) -> Tensor | None:
        sent = None if tensor is None else tensor.detach().contiguous()
        received = None
        if shape is not None:
            received = torch.empty(tuple(shape), dtype=dtype, device=device.current())
        for work in _batched_p2p_ops(
            tensor_send_next=sent,
            tensor_recv_next=received,
            group=self.pp_group,
            next_pipeline_rank=peer,
        ):
            work.wait()
        return received


def _batched_p2p_ops(
    *,
    tensor_send_prev: Tensor | None = None,
    tensor_recv_prev: Tensor | None = None,
    tensor_send_next: Tensor | None = None,
    tensor_recv_next: Tensor | None = None,
    group: ProcessGroup,
    prev_pipeline_rank: int | None = None,
    next_pipeline_rank: int | None = None,
) -> list[dist.Work]:
    """Start to send and receive the tensors that are not None; projects replace it."""
    ops = [
        dist.P2POp(operation, tensor, rank, group)
        for operation, tensor, rank in (
            (dist.isend, tensor_send_prev, prev_pipeline_rank),
            (dist.irecv, tensor_recv_prev, prev_pipeline_rank),
            (dist.isend, tensor_send_next, next_pipeline_rank),
            (dist.irecv, tensor_recv_next, next_pipeline_rank),
        )
        if tensor is not None
    ]
    return dist.batch_isend_irecv(ops) if ops else []


def recv_forward(tensor_shape: Any, config: Any, is_first_stage: bool | None = None) -> Tensors:
    """Receive hidden states from the previous stage of the installed groups; None on the first."""
    is_first = (
        parallel_state.is_pipeline_first_stage() if is_first_stage is None else is_first_stage
    )
    return P2PCommunicator(parallel_state.current().pp, config).recv_forward(tensor_shape, is_first)


def send_forward(output_tensor: Tensors, config: Any, is_last_stage: bool | None = None) -> None:
    """Send hidden states to the next stage of the installed groups."""
    is_last = parallel_state.is_pipeline_last_stage() if is_last_stage is None else is_last_stage
    P2PCommunicator(parallel_state.current().pp, config).send_forward(output_tensor, is_last)


def is_vp_first_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Return whether ``vp_stage`` is the first of a rank's ``vp_size`` model chunks."""
    return _is_chunk(vp_stage, vp_size, 0)


def is_vp_last_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Return whether ``vp_stage`` is the last of a rank's ``vp_size`` model chunks."""
    return _is_chunk(vp_stage, vp_size, (vp_size or 1) - 1)


def _is_chunk(vp_stage: int | None, vp_size: int | None, wanted: int) -> bool:
    if vp_size is None or vp_size <= 1:
        assert vp_stage in (None, 0), f"vp_stage is {vp_stage}, and a rank has one model chunk"
        return True
    return vp_stage == wanted


def get_schedule_table(
    num_microbatches: int, num_model_chunks: int, microbatch_group_size_per_vp_stage: int
) -> list[tuple[int, int]]:
    """Return (micro-batch, model chunk) of each forward pass of an interleaved schedule."""
    size = microbatch_group_size_per_vp_stage
    return [
        (microbatch, chunk)
        for start in range(0, num_microbatches, size)
        for chunk in range(num_model_chunks)
        for microbatch in range(start, min(start + size, num_microbatches))
    ]


def get_tensor_shapes(
    *,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None,
    config: Any,
    tp_group: ProcessGroup,
    cp_group: ProcessGroup,
) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors between stages."""
    tokens = (seq_length if decoder_seq_length is None else decoder_seq_length) // cp_group.size()
    if config.sequence_parallel:
        tokens //= tp_group.size()
    return [(tokens, micro_batch_size, config.hidden_size)]
