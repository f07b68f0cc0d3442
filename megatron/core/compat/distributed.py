"""Megatron Core's functions on gradients and sharded parameters, and its FSDP wrappers.

One wrapper, of FSDP2, stands for both of Megatron Core's.  Its parameters are DTensors of PyTorch,
which know how many rows each rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors as _flatten_dense_tensors
from torch._utils import _unflatten_dense_tensors as _unflatten_dense_tensors
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import FullyShardedDataParallel
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection


class TorchFullyShardedDataParallel(FullyShardedDataParallel):
    """FSDP2 that frees gathered parameters after forward, as --use-torch-fsdp2 does.

    Units are the transformer layers and the embedding: ``sub_modules_to_wrap`` has no effect.
    ``process_group``: the data-parallel ranks, if the other groups have different ones.
    """

    @library_call(
        "config ddp_config module sub_modules_to_wrap disable_bucketing process_group",
        unused="sub_modules_to_wrap disable_bucketing",
    )
    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        *,
        process_group: ProcessGroup | None = None,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        if process_group is not None:
            own = dict.fromkeys(("dp", "dp_cp", "intra_dp_cp"), process_group)
            pg_collection = ProcessGroupCollection(**{**vars(pg_collection), **own})
        ddp_config = replace(ddp_config, use_torch_fsdp2=True)
        super().__init__(config, ddp_config, module, pg_collection=pg_collection)


def _get_main_grad_attr(param: nn.Parameter, use_megatron_fsdp: bool = False) -> str:
    """Return the attribute of ``param`` that holds its gradient."""
    del use_megatron_fsdp
    return "main_grad" if hasattr(param, "main_grad") else "grad"


def _unshard_if_dtensor(tensor: Tensor) -> Tensor:
    """Return the complete tensor, with the attributes of ``tensor``.  Collective for a DTensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    return _with_attributes(tensor.full_tensor(), tensor)


def _reshard_if_dtensor(tensor_to_shard: Tensor, reference_tensor: Tensor) -> Tensor:
    """Return the tensor sharded as a DTensor is, else ``reference_tensor`` itself."""
    if not isinstance(reference_tensor, DTensor):
        return reference_tensor
    mesh = reference_tensor.device_mesh
    placements = reference_tensor.placements
    sharded = distribute_tensor(tensor_to_shard, device_mesh=mesh, placements=placements)
    return _with_attributes(sharded, reference_tensor)


def _with_attributes(tensor: Tensor, source: Tensor) -> Tensor:
    for name, value in vars(source).items():
        if not name.startswith("_"):  # DTensor's own names
            setattr(tensor, name, value)
    return tensor


def gather_uneven_dtensor_to_full_tensor(
    dtensor: DTensor, target_device: torch.device | str | None = None
) -> Tensor:
    """Return the complete tensor, on ``target_device`` if given.  Collective over its mesh."""
    full = dtensor.full_tensor()
    return full if target_device is None else full.to(target_device)


def preprocess_state_dict_for_uneven_dtensor(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``state_dict``: PyTorch saves DTensors with unequal numbers of rows as they are."""
    return state_dict
