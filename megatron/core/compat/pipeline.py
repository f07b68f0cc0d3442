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
from megatron.core.compat.utils import get_pg_rank, get_pg_size
from megatron.core.parallel import parallel_state

Shape = Sequence[int]
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
        return self._each(tensor_shapes, is_first_stage, lambda s: self._exchange(from_prev=s)[0])

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Tensors:
        """Receive the gradient of the sent hidden states from the next stage."""
        return self._each(tensor_shapes, is_last_stage, lambda s: self._exchange(from_next=s)[1])

    def send_forward(self, output_tensors: Tensors, is_last_stage: bool) -> None:
        """Send hidden states to the next stage."""
        self._each(output_tensors, is_last_stage, lambda t: self._exchange(to_next=t))

    def send_backward(self, input_tensor_grads: Tensors, is_first_stage: bool) -> None:
        """Send the gradient of the received hidden states to the previous stage."""
        self._each(input_tensor_grads, is_first_stage, lambda t: self._exchange(to_prev=t))

    def send_forward_recv_backward(
        self, output_tensors: Tensors, tensor_shapes: Any, is_last_stage: bool
    ) -> Tensors:
        """Send hidden states to the next stage and receive a gradient from it."""
        return self._each(
            tensor_shapes,
            is_last_stage,
            lambda shape, tensor: self._exchange(to_next=tensor, from_next=shape)[1],
            output_tensors,
        )

    def send_backward_recv_forward(
        self, input_tensor_grads: Tensors, tensor_shapes: Any, is_first_stage: bool
    ) -> Tensors:
        """Send a gradient to the previous stage and receive hidden states from it."""
        return self._each(
            tensor_shapes,
            is_first_stage,
            lambda shape, tensor: self._exchange(to_prev=tensor, from_prev=shape)[0],
            input_tensor_grads,
        )

    def _each(self, first: Any, is_at_end: bool, call: Any, *others: Any) -> Tensors:
        """Call ``call`` for each element, in order; with None where nothing is communicated."""
        is_list = isinstance(first, list) and not all(isinstance(n, int) for n in first)
        rows = zip(*(arg if is_list else [arg] for arg in (first, *others)), strict=True)
        results = [None if is_at_end or row[0] is None else call(*row) for row in rows]
        return results if is_list else results[0]

    def _exchange(
        self,
        *,
        to_next: Tensor | None = None,
        to_prev: Tensor | None = None,
        from_prev: Sequence[int] | None = None,
        from_next: Sequence[int] | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Send and receive at once; return the tensors from the previous and the next stage."""
        if self.config.variable_seq_lengths:
            sent = [None if t is None else torch.tensor(t.shape, device=t.device)
                    for t in (to_next, to_prev)]  # fmt: skip
            wanted = [None if shape is None else (3,) for shape in (from_prev, from_next)]
            found = self._post(*sent, *wanted, torch.int64)
            from_prev, from_next = (None if f is None else f.tolist() for f in found)
        dtype = self.config.pipeline_dtype or self.config.params_dtype
        received = self._post(to_next, to_prev, from_prev, from_next, dtype)
        for tensor in received:
            if tensor is not None:
                tensor.requires_grad_()
        return received

    def _post(
        self,
        to_next: Tensor | None,
        to_prev: Tensor | None,
        from_prev: Sequence[int] | None,
        from_next: Sequence[int] | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor | None, Tensor | None]:
        received = []
        requests = []
        for tensor, rank in ((to_next, self.next_rank), (to_prev, self.prev_rank)):
            if tensor is not None:
                sent = tensor.detach().contiguous()
                requests.append(dist.P2POp(dist.isend, sent, rank, self.pp_group))
        for shape, rank in ((from_prev, self.prev_rank), (from_next, self.next_rank)):
            if shape is not None:
                buffer = torch.empty(tuple(shape), dtype=dtype, device=device.current())
                requests.append(dist.P2POp(dist.irecv, buffer, rank, self.pp_group))
            received.append(None if shape is None else buffer)
        for work in dist.batch_isend_irecv(requests) if requests else ():
            work.wait()
        return received[0], received[1]


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


def is_pp_first_stage(pp_group: ProcessGroup | None) -> bool:
    """Return whether this rank is the first pipeline stage."""
    return get_pg_rank(pp_group) == 0


def is_pp_last_stage(pp_group: ProcessGroup | None) -> bool:
    """Return whether this rank is the last pipeline stage."""
    return get_pg_rank(pp_group) == get_pg_size(pp_group) - 1


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
