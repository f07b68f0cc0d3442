"""Compatibility API: collectives with Megatron-LM's signatures, in which the group is optional.

The default is the tensor-parallel group of `parallel_state`.  The package exports these functions
for user scripts.  Code in this repository passes groups and calls the functions of `mappings`,
`cross_entropy` and `data` directly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.parallel import parallel_state
from megatron.core.tensor_parallel import cross_entropy, mappings
from megatron.core.tensor_parallel.data import broadcast_data as broadcast


def _tp(group: ProcessGroup | None) -> ProcessGroup:
    return parallel_state.current().tp if group is None else group


def _with_default_group(move: Callable[[Tensor, ProcessGroup], Tensor]) -> Callable[..., Tensor]:
    @wraps(move)
    def moved(input_: Tensor, group: ProcessGroup | None = None) -> Tensor:
        return move(input_, _tp(group))

    return moved


copy_to_tensor_model_parallel_region = _with_default_group(
    mappings.copy_to_tensor_model_parallel_region
)
reduce_from_tensor_model_parallel_region = _with_default_group(
    mappings.reduce_from_tensor_model_parallel_region
)
gather_from_tensor_model_parallel_region = _with_default_group(
    mappings.gather_from_tensor_model_parallel_region
)
scatter_to_tensor_model_parallel_region = _with_default_group(
    mappings.scatter_to_tensor_model_parallel_region
)
all_gather_last_dim_from_tensor_parallel_region = _with_default_group(
    mappings.all_gather_last_dim_from_tensor_parallel_region
)
reduce_scatter_last_dim_to_tensor_parallel_region = _with_default_group(
    mappings.reduce_scatter_last_dim_to_tensor_parallel_region
)
scatter_to_sequence_parallel_region = _with_default_group(
    mappings.scatter_to_sequence_parallel_region
)
reduce_scatter_to_sequence_parallel_region = _with_default_group(
    mappings.reduce_scatter_to_sequence_parallel_region
)


def gather_from_sequence_parallel_region(
    input_: Tensor, tensor_parallel_output_grad: bool = True, group: ProcessGroup | None = None
) -> Tensor:
    """All-gather along the first dimension: [s/tp, ...] -> [s, ...].  Collective."""
    return mappings.gather_from_sequence_parallel_region(
        input_, tensor_parallel_output_grad, group=_tp(group)
    )


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: ProcessGroup | None = None,
) -> Tensor:
    """Return the loss of each token in float32: logits [..., p/tp], target [...] -> [...].

    Padding columns need no special treatment: the logits of a GPTModel are -inf there.  Collective.
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
    """Broadcast the tensors ``keys`` from the group's rank 0; return them on the device.

    Collective.
    """
    return broadcast(keys, data, datatype, tp_group=_tp(tp_group))
