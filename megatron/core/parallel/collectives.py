"""Collectives of torch.distributed under the names of torch 2.13."""

from __future__ import annotations

from typing import Literal, Protocol, overload

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_Operation = dist.ReduceOp | dist.ReduceOp.RedOpType


class _Collective(Protocol):
    @overload
    def __call__(
        self,
        output: Tensor,
        input: Tensor,
        /,
        *,
        op: _Operation = ...,
        group: ProcessGroup,
        async_op: Literal[True],
    ) -> dist.Work: ...
    @overload
    def __call__(
        self, output: Tensor, input: Tensor, /, *, op: _Operation = ..., group: ProcessGroup
    ) -> None: ...


# torch 2.11 has only the old names, which torch 2.13 deprecates with a warning.
all_gather_single: _Collective = vars(dist).get("all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: _Collective = vars(dist).get(
    "reduce_scatter_single", dist.reduce_scatter_tensor
)
