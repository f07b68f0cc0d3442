"""Helper functions that training scripts import."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError
from megatron.core.datasets.gpt_dataset import (
    get_ltor_masks_and_position_ids as get_ltor_masks_and_position_ids,
)
from megatron.core.optimizer import clip_grads
from megatron.core.parallel import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank as get_batch_on_this_cp_rank
from megatron.training.compat import global_vars
from megatron.training.data.batch import load_batch
from megatron.training.data.loaders import (
    get_blend_and_blend_per_split as get_blend_and_blend_per_split,
)
from megatron.training.models.registry import implementation_of
from megatron.training.process.rank_print import is_last_rank as is_last_rank
from megatron.training.process.rank_print import is_rank0 as is_rank0
from megatron.training.process.rank_print import print_device_memory
from megatron.training.process.rank_print import print_rank_0 as print_rank_0
from megatron.training.process.rank_print import print_rank_last as print_rank_last

Model = nn.Module | Sequence[nn.Module]


@overload
def unwrap_model(model: nn.Module, wrappers: Iterable[type] | None = None) -> nn.Module: ...
@overload
def unwrap_model(
    model: list[nn.Module], wrappers: Iterable[type] | None = None
) -> list[nn.Module]: ...


def unwrap_model(
    model: nn.Module | list[nn.Module], wrappers: Iterable[type] | None = None
) -> nn.Module | list[nn.Module]:
    """Return the model inside data-parallel and precision wrappers; for a list, a list."""
    if isinstance(model, list):
        return [unwrap_model(m) for m in model]
    while isinstance(inner := model._modules.get("module"), nn.Module):
        model = inner
    return model


def average_losses_across_data_parallel_group(losses: Iterable[Tensor]) -> Tensor:
    """Return the mean of each loss over the data-parallel ranks, in one 1-D tensor.

    Collective over dp_cp.
    """
    stacked = torch.cat([loss.detach().reshape(1) for loss in losses])
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(stacked, group=group)
    return stacked / group.size()


def chunks_of(model: Model) -> list[nn.Module]:
    """Return the model chunks as a list; a script may pass a single module."""
    return [model] if isinstance(model, nn.Module) else list(model)


def calc_params_l2_norm(model: Model, force_create_fp32_copy: bool = False) -> float:
    """Return the L2 norm of all parameters of the model.

    Collective over the ranks that hold it.
    """
    del force_create_fp32_copy  # sums are in fp32 whatever the parameters are
    return clip_grads.calc_params_l2_norm(chunks_of(model), parallel_state.current())


def get_batch_on_this_tp_rank(
    data_iterator: Iterator[dict[str, Tensor]] | None,
) -> dict[str, Tensor | None]:
    """Return the tensors of a micro-batch that the stages of this rank need.

    TP rank 0 reads them from the iterator and broadcasts them.  Collective over tp.
    """
    run = global_vars.get_run()
    tables = [
        implementation_of(run.config).batch(run.config, stage, run.placement.num_stages)
        for stage in run.stages
    ]
    table = {name: next((t[name] for t in tables if t[name]), None) for name in tables[0]}
    return load_batch(data_iterator, table, parallel_state.current().tp)


def report_memory(name: str) -> None:
    """Print the memory of the GPU on the first data-parallel rank."""
    if parallel_state.get_data_parallel_rank() == 0:
        print_device_memory(name)


def check_adlr_autoresume_termination(
    iteration: int, model: object, optimizer: object, opt_param_scheduler: object
) -> NoReturn:
    """Refuse to ask NVIDIA's cluster whether the run is to end.  Raises ConfigError."""
    del model, optimizer, opt_param_scheduler
    raise ConfigError(
        f"check_adlr_autoresume_termination() at iteration {iteration}: --adlr-autoresume works on "
        "NVIDIA's own cluster; use --exit-signal-handler, which saves at SIGTERM"
    )


def _initialize_tp_communicators() -> None:
    """Do nothing: get_model() creates the communicators that --tp-comm-overlap needs."""
