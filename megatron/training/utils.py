"""Small helpers that training scripts import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import device, parallel_state
from megatron.core.datasets.gpt_dataset import (
    get_ltor_masks_and_position_ids as get_ltor_masks_and_position_ids,
)
from megatron.training import setup
from megatron.training.batch import get_batch_on_this_cp_rank as get_batch_on_this_cp_rank
from megatron.training.batch import get_batch_on_this_tp_rank as get_batch_on_this_tp_rank
from megatron.training.data import get_blend_and_blend_per_split as get_blend_and_blend_per_split
from megatron.training.data import train_valid_test_num_samples
from megatron.training.global_vars import get_run
from megatron.training.printing import is_last_rank as is_last_rank
from megatron.training.printing import is_rank0 as is_rank0
from megatron.training.printing import print_rank_0 as print_rank_0
from megatron.training.printing import print_rank_last as print_rank_last


def get_model(
    model_provider_func: setup.ModelProvider, model_type: object = None, wrap_with_ddp: bool = True
) -> list[nn.Module]:
    """The model chunks of this rank, for scripts that bring their own loop.  Collective."""
    del model_type
    run = get_run()
    setup.build_model(run, model_provider_func, wrap=wrap_with_ddp)
    return run.model_chunks


def get_train_valid_test_num_samples() -> tuple[int | None, int | None, int | None]:
    """How many samples each set must offer."""
    return train_valid_test_num_samples(get_run())


def unwrap_model(model: Any, wrappers: Iterable[type] | None = None) -> Any:
    """The model inside data-parallel and precision wrappers; lists stay lists."""
    if isinstance(model, list):
        return [unwrap_model(m, wrappers) for m in model]
    while isinstance(model, nn.Module) and isinstance(model._modules.get("module"), nn.Module):
        model = model.module
    return model


def average_losses_across_data_parallel_group(losses: Iterable[Tensor]) -> Tensor:
    """Mean of each loss over the replicas.  Collective over dp_cp."""
    stacked = torch.cat([loss.detach().reshape(1) for loss in losses])
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(stacked, group=group)
    return stacked / group.size()


def to_device(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Move the tensors of ``batch`` to this process's device."""
    target = device.current()
    return {
        k: v.to(target, non_blocking=True) if isinstance(v, Tensor) else v
        for k, v in batch.items()
    }
