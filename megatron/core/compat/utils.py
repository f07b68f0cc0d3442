"""Megatron Core's helper functions that nothing in this project needs."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.autograd import Context, Function
from megatron.core.distributed import DistributedDataParallel, FullyShardedDataParallel
from megatron.core.parallel import parallel_state
from megatron.core.parallel.collectives import all_gather_json, is_so_everywhere
from megatron.core.params.param_info import info_of
from megatron.core.params.param_init import Init
from megatron.core.tensor_parallel.mappings import all_gather_first_dim
from megatron.core.transformer.module import Float16Module

# -- versions ---------------------------------------------------------------------------------


@functools.cache
def _version_of(package: str) -> Version:
    """Return the version of an installed package, 0.0.0 without it."""
    try:
        return Version(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return Version("0.0.0")


def get_torch_version() -> Version:
    """Return the version of torch."""
    return Version(torch.__version__)


def get_te_version() -> Version:
    """Return the version of Transformer Engine, 0.0.0 without it."""
    return _version_of("transformer_engine")


def get_fa_version() -> Version:
    """Return the version of flash-attn, 0.0.0 without it."""
    return _version_of("flash-attn")


def _is_min(installed: Version, version: str, check_equality: bool) -> bool:
    return installed >= Version(version) if check_equality else installed > Version(version)


def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """Return whether torch is at least ``version``; newer without ``check_equality``."""
    return _is_min(get_torch_version(), version, check_equality)


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """Return whether Transformer Engine is at least ``version``, as `is_torch_min_version`."""
    return _is_min(get_te_version(), version, check_equality)


def is_fa_min_version(version: str, check_equality: bool = True) -> bool:
    """Return whether flash-attn is at least ``version``, as `is_torch_min_version`."""
    return _is_min(get_fa_version(), version, check_equality)


# -- process groups ---------------------------------------------------------------------------


def get_pg_size(group: ProcessGroup | None = None) -> int:
    """Return the number of ranks of ``group``, 1 without a group or torch.distributed."""
    return group.size() if group is not None and dist.is_initialized() else 1


def get_pg_rank(group: ProcessGroup | None = None) -> int:
    """Return this rank's index in ``group``, 0 without a group or torch.distributed."""
    return group.rank() if group is not None and dist.is_initialized() else 0


def get_tensor_model_parallel_group_if_none(
    tp_group: ProcessGroup | None, is_expert: bool = False, check_initialized: bool = True
) -> ProcessGroup | None:
    """Return ``tp_group``, or the installed tensor-parallel group if it is None."""
    if tp_group is not None or not dist.is_initialized():
        return tp_group
    if is_expert:
        return parallel_state.get_expert_tensor_parallel_group(check_initialized)
    return parallel_state.get_tensor_model_parallel_group(check_initialized)


def check_param_hashes_across_dp_replicas(
    model: Sequence[nn.Module], cross_check: bool = False
) -> bool:
    """Return whether the parameters equal those of data-parallel rank 0, with a warning if not.

    With ``cross_check``: whether they are equal on all data-parallel ranks.  Collective.
    """
    groups = parallel_state.current()
    equal = True
    for is_expert, group in ((False, groups.dp), (True, groups.expt_dp)):
        hashes = {
            f"{number}.{name}": hashlib.sha1(param.detach().float().cpu().numpy()).hexdigest()
            for number, chunk in enumerate(model)
            for name, param in chunk.named_parameters()
            if info_of(param).is_expert == is_expert
        }
        of_first = all_gather_json(hashes, group)[0]
        for name in (name for name in hashes if hashes[name] != of_first.get(name)):
            equal = False
            warnings.warn(f"{name} differs from data-parallel rank 0", stacklevel=2)
        if cross_check:
            equal = is_so_everywhere(equal, group)
    return equal


# -- models -----------------------------------------------------------------------------------

_WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel, Float16Module)


def unwrap_model(model: Any, module_instances: Any = None) -> Any:
    """Return the model inside of its wrappers; of a list, a list.

    ``module_instances``: classes of wrappers, by default those for data parallelism and 16 bits.
    """
    if isinstance(model, list):
        return [unwrap_model(chunk, module_instances) for chunk in model]
    while isinstance(model, _WRAPPERS if module_instances is None else module_instances):
        model = model.module
    return model


def init_method_normal(sigma: float) -> Init:
    """Return a function that fills a tensor from N(0, sigma)."""
    return Init("normal", sigma)


def scaled_init_method_normal(sigma: float, num_layers: int, multiplier: float = 2.0) -> Init:
    """Return a function that fills a tensor from N(0, sigma / sqrt(multiplier * num_layers))."""
    return Init("normal", sigma / math.sqrt(multiplier * num_layers))


# -- tensors ----------------------------------------------------------------------------------


class WrappedTensor:
    """Tensor for a function that frees it: the caller keeps no reference to it."""

    def __init__(self, tensor: Tensor) -> None:
        self._wrapper = [tensor]

    def unwrap(self) -> Tensor:
        """Return the tensor, once.  Raises RuntimeError at a second call."""
        if not self._wrapper:
            raise RuntimeError("this WrappedTensor has already been unwrapped")
        return self._wrapper.pop()


def _without_base(inp: Tensor, requires_grad: bool) -> Tensor:
    out = torch.empty((1,), dtype=inp.dtype, device=inp.device, requires_grad=requires_grad)
    out.data = inp.data
    return out


class MakeViewlessTensor(Function[Tensor]):
    """The identity, with a result that does not keep the base of a view in memory."""

    @staticmethod
    def forward(ctx: Context[None], inp: Tensor, requires_grad: bool) -> Tensor:
        return _without_base(inp, requires_grad)

    @staticmethod
    def backward(ctx: Context[None], grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output, None


def make_viewless_tensor(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
    """Return ``inp`` as a tensor that is no view; ``keep_graph``: as the result of an operation."""
    if inp._base is None:
        return inp
    make: Callable[[Tensor, bool], Tensor] = (
        MakeViewlessTensor.apply if keep_graph else _without_base
    )
    return make(inp, requires_grad)


def safely_set_viewless_tensor_data(tensor: Tensor, new_data_tensor: Tensor) -> None:
    """Set ``tensor.data``.  Raises AssertionError for a view, whose base would stay in memory."""
    assert tensor._base is None, f"a view of shape {tuple(tensor.shape)} keeps its base in memory"
    tensor.data = new_data_tensor


def to_local_if_dtensor(tensor: Any) -> Any:
    """Return this rank's part of a DTensor; other values unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def get_data_parallel_group_if_dtensor(
    tensor: Any, data_parallel_group: ProcessGroup | None = None
) -> ProcessGroup | None:
    """Return the group that shards a DTensor, None for other tensors.

    Raises AssertionError if it is not ``data_parallel_group``.
    """
    if not hasattr(tensor, "device_mesh"):
        return None
    group: ProcessGroup = tensor.device_mesh.get_group()
    assert data_parallel_group in (None, group), "tensors are sharded over different groups"
    return group


# -- gradients --------------------------------------------------------------------------------


def drain_embedding_wgrad_compute(
    config: Any,
    embedding_activation_buffer: list[Tensor],
    grad_output_buffer: list[Tensor],
    weight: Any,
    tp_group: ProcessGroup,
) -> None:
    """Add the weight gradients of the buffered passes to ``weight.main_grad``; empty the buffers.

    Collective over ``tp_group`` with sequence parallelism.
    """
    assert len(embedding_activation_buffer) == len(grad_output_buffer), "a pass lacks a tensor"
    while embedding_activation_buffer:
        x = embedding_activation_buffer.pop(0)
        x = all_gather_first_dim(x, tp_group) if config.sequence_parallel else x
        gradient = grad_output_buffer.pop(0).flatten(0, -2).t() @ x.flatten(0, -2)
        weight.main_grad.add_(gradient.to(weight.main_grad.dtype))


def local_multi_tensor_applier(
    op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Any, *args: Any
) -> Any:
    """Call a function that has the signature of Apex's kernels for many tensors."""
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


def local_multi_tensor_l2_norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Any, per_tensor: bool, *args: Any
) -> tuple[Tensor, None]:
    """Return the norm of all tensors, as a tensor of one element."""
    norms = [torch.linalg.vector_norm(t.float()) for tensors in tensor_lists for t in tensors]
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None
