"""The collectives under the signatures that scripts know: the group may be left out.

The package exports these; everything inside names its group and takes the functions of the
modules below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core import parallel_state
from megatron.core.tensor_parallel import cross_entropy, mappings
from megatron.core.tensor_parallel.data import broadcast_data as broadcast


def _tp(group: ProcessGroup | None) -> ProcessGroup:
    return parallel_state.current().tp if group is None else group


def copy_to_tensor_model_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """Identity; backward sums the gradients of the ranks."""
    return mappings.copy_to_tensor_model_parallel_region(input_, _tp(group))


def reduce_from_tensor_model_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """Sum of the terms that the ranks hold."""
    return mappings.reduce_from_tensor_model_parallel_region(input_, _tp(group))


def gather_from_tensor_model_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """[..., h/tp] -> [..., h]"""
    return mappings.gather_from_tensor_model_parallel_region(input_, _tp(group))


def scatter_to_tensor_model_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """[..., h] -> [..., h/tp]"""
    return mappings.scatter_to_tensor_model_parallel_region(input_, _tp(group))


def all_gather_last_dim_from_tensor_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """[..., h/tp] -> [..., h]; backward sums the ranks' gradients."""
    return mappings.all_gather_last_dim_from_tensor_parallel_region(input_, _tp(group))


def reduce_scatter_last_dim_to_tensor_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """Sum over the ranks, each keeping its slice: [..., h] -> [..., h/tp]."""
    return mappings.reduce_scatter_last_dim_to_tensor_parallel_region(input_, _tp(group))


def gather_from_sequence_parallel_region(
    input_: Tensor, tensor_parallel_output_grad: bool = True, group: ProcessGroup | None = None
) -> Tensor:
    """[s/tp, ...] -> [s, ...]"""
    return mappings.gather_from_sequence_parallel_region(
        input_, tensor_parallel_output_grad, group=_tp(group)
    )


def scatter_to_sequence_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """[s, ...] -> [s/tp, ...]"""
    return mappings.scatter_to_sequence_parallel_region(input_, _tp(group))


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """Sum over the ranks, each keeping its slice: [s, ...] -> [s/tp, ...]."""
    return mappings.reduce_scatter_to_sequence_parallel_region(input_, _tp(group))


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: ProcessGroup | None = None,
) -> Tensor:
    """Loss of each token in float32: logits [..., p/tp], target [...] -> [...].

    What a GPTModel returns as logits has -inf in the columns that pad the vocabulary.
    """
    return cross_entropy.vocab_parallel_cross_entropy(
        vocab_parallel_logits, target, label_smoothing, tp_group=_tp(tp_group)
    )


def broadcast_data(
    keys: Sequence[str],
    data: Mapping[str, Tensor] | None,
    datatype: torch.dtype,
    tp_group: ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """The tensors named ``keys`` of the group's first rank, on the device.  Collective."""
    return broadcast(keys, data, datatype, tp_group=_tp(tp_group))
