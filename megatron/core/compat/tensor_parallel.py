"""Megatron Core's functions below its tensor-parallel layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.parallel import parallel_state
from megatron.core.parallel.default_groups import library_call
from megatron.core.tensor_parallel.linear import LinearCall, linear
from megatron.core.tensor_parallel.mappings import all_gather_first_dim, slice_of_first_dim
from megatron.core.tensor_parallel.random import (
    DATA_PARALLEL_STREAM,
    EXPERT_PARALLEL_STREAM,
    MODEL_PARALLEL_STREAM,
    checkpoint,
    get_all_rng_states,
    get_rng_tracker,
    set_all_rng_states,
)
from megatron.core.utils import divide

_DEFAULTS = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}


def set_tensor_model_parallel_attributes(
    tensor: Tensor, is_parallel: bool, dim: int, stride: int
) -> None:
    """Record on ``tensor`` how it is sharded.  Raises AssertionError if it has a record already."""
    for name, value in zip(_DEFAULTS, (is_parallel, dim, stride), strict=True):
        assert not hasattr(tensor, name), f"the tensor has the attribute {name} already"
        setattr(tensor, name, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Record that ``tensor`` is not sharded, unless it has a record."""
    for name, value in _DEFAULTS.items():
        setattr(tensor, name, getattr(tensor, name, value))


def copy_tensor_model_parallel_attributes(
    destination_tensor: Tensor, source_tensor: Tensor
) -> None:
    """Copy the record of `set_tensor_model_parallel_attributes`."""
    for name in _DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def param_is_not_tensor_parallel_duplicate(param: Tensor) -> bool:
    """Return whether this rank counts ``param``: it is sharded, or the rank is the first of tp."""
    is_sharded = getattr(param, "tensor_model_parallel", False)
    return is_sharded or parallel_state.get_tensor_model_parallel_rank() == 0


def _initialize_affine_weight_gpu(
    weight: Tensor,
    init_method: Callable[[Tensor], object],
    partition_dim: int,
    stride: int = 1,
    is_expert: bool = False,
) -> None:
    """Fill this rank's shard from the random stream of its rank."""
    set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    with get_rng_tracker().fork(EXPERT_PARALLEL_STREAM if is_expert else MODEL_PARALLEL_STREAM):
        init_method(weight)


def _initialize_affine_weight_cpu(
    weight: Tensor,
    output_size: int,
    input_size: int,
    per_partition_size: int,
    partition_dim: int,
    init_method: Callable[[Tensor], object],
    stride: int = 1,
    return_master_weight: bool = False,
    *,
    params_dtype: torch.dtype = torch.float32,
    rank: int | None = None,
    world_size: int | None = None,
    skip_set_tensor_parallel_attributes: bool = False,
) -> Tensor | None:
    """Fill the complete weight on every rank, and copy this rank's ``stride`` parts of it."""
    if not skip_set_tensor_parallel_attributes:
        set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    master = torch.empty(output_size, input_size)
    init_method(master)
    master = master.to(params_dtype)
    if rank is None:
        rank = parallel_state.get_tensor_model_parallel_rank()
        world_size = parallel_state.get_tensor_model_parallel_world_size()
    parts = master.split(divide(per_partition_size, stride), partition_dim)
    weight.data.copy_(torch.cat(parts[rank::world_size], partition_dim))
    return master if return_master_weight else None


@library_call(
    "input weight bias gradient_accumulation_fusion allreduce_dgrad sequence_parallel "
    "grad_output_buffer wgrad_deferral_limit async_grad_allreduce tp_group",
    unused="grad_output_buffer wgrad_deferral_limit async_grad_allreduce",
)
def linear_with_grad_accumulation_and_async_allreduce(
    input: Tensor,  # noqa: A002  (Megatron Core's name)
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    *,
    tp_group: ProcessGroup,
) -> Tensor:
    """Multiply by a weight whose output dimension is sharded: [s, b, i] -> [s, b, o/tp].

    ``allreduce_dgrad``: sum the input gradient over ``tp_group``; ``sequence_parallel``: gather the
    input and reduce-scatter its gradient; ``gradient_accumulation_fusion``: add the weight gradient
    to ``weight.main_grad``.
    """
    reduces = (allreduce_dgrad or sequence_parallel) and tp_group.size() > 1
    group = tp_group if reduces else None
    call = LinearCall(weight, bias, gradient_accumulation_fusion, group, sequence_parallel)
    return linear(input, call)


@library_call(
    "input weight bias gradient_accumulation_fusion allreduce_dgrad sequence_parallel tp_group "
    "grad_output_buffer wgrad_deferral_limit async_grad_allreduce",
    unused="grad_output_buffer wgrad_deferral_limit async_grad_allreduce",
)
def linear_with_frozen_weight(
    input: Tensor,  # noqa: A002  (Megatron Core's name)
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: ProcessGroup,
) -> Tensor:
    """Multiply by a sharded weight, which gets no gradient: [s, b, i] -> [s, b, o/tp]."""
    frozen = weight.detach(), None if bias is None else bias.detach()
    return linear_with_grad_accumulation_and_async_allreduce(
        input, *frozen, False, allreduce_dgrad, sequence_parallel, tp_group=tp_group
    )


class LinearWithGradAccumulationAndAsyncCommunication:
    """Its ``apply`` is `linear_with_grad_accumulation_and_async_allreduce`."""

    @staticmethod
    def apply(*args: Any) -> Tensor:
        """Take the positional arguments of Megatron Core's autograd function."""
        *first, tp_group = args
        return linear_with_grad_accumulation_and_async_allreduce(*first[:6], tp_group=tp_group)


class VocabUtility:
    """Range of the vocabulary that a tensor-parallel rank holds, as [first, last + 1)."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> Sequence[int]:
        """Return the range of ``rank``, given the size of each rank's part."""
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> Sequence[int]:
        """Return the range of ``rank``, given the size of the vocabulary."""
        size = divide(global_vocab_size, world_size)
        return rank * size, (rank + 1) * size


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> list[Tensor]:
    """Split ``tensor`` into equal parts of its last dimension: views, or contiguous copies."""
    parts = tensor.split(divide(tensor.shape[-1], num_partitions), -1)
    return [part.contiguous() if contiguous_split_chunks else part for part in parts]


@library_call()
def split_tensor_into_1d_equal_chunks(
    tensor: Tensor, new_buffer: bool = False, *, tp_group: ProcessGroup
) -> Tensor:
    """Return this rank's equal part of the flattened ``tensor``: a view, or a copy."""
    part = slice_of_first_dim(tensor.view(-1), tp_group)
    return part.clone() if new_buffer else part


@library_call()
def gather_split_1d_tensor(tensor: Tensor, tp_group: ProcessGroup) -> Tensor:
    """Concatenate the parts of `split_tensor_into_1d_equal_chunks` of all ranks.  Collective."""
    return all_gather_first_dim(tensor, tp_group)


def get_data_parallel_rng_tracker_name() -> str:
    """Return the name of the random stream that data-parallel ranks share."""
    return DATA_PARALLEL_STREAM


def get_expert_parallel_rng_tracker_name() -> str:
    """Return the name of the random stream of experts."""
    return EXPERT_PARALLEL_STREAM


@contextlib.contextmanager
def fork_rng() -> Iterator[None]:
    """Restore all random states at the end of the context."""
    states = get_all_rng_states()
    try:
        yield
    finally:
        set_all_rng_states(*states)


def detach_variable(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the tensors of ``inputs`` without their graphs, and the other values."""
    return tuple(
        x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs
    )


class CheckpointFunction:
    """Its ``apply`` is `checkpoint`; projects that replace its ``backward`` do not change that."""

    apply = staticmethod(checkpoint)
