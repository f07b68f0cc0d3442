"""Data parallelism as projects use it: groups of `parallel_state`, hooks switched on and off."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    finalize_model_grads,
)
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP
from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
    gather_uneven_dtensor_to_full_tensor,
    preprocess_state_dict_for_uneven_dtensor,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import GradCommProcessGroups, ModelCommProcessGroups
from tests.support import tolerances
from tests.support.one_rank_training import ModelConfig, TinyModel, mean_loss, token_batch
from tests.support.ranks import run_ranks

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 100}

FSDP = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
# name -> whether the optimizer is sharded, settings of the wrapper
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "plain": (False, {}),
    "ZeRO": (True, {}),
    "overlap": (True, OVERLAP),
    "FSDP": (True, FSDP),
    "FSDP2": (False, {"use_torch_fsdp2": True}),
}


def _train_all(rank: int, world_size: int) -> dict[str, dict[str, Tensor]]:
    parallel_state.initialize_model_parallel()
    return {name: _train(rank, world_size, *case) for name, case in CASES.items()}


def _train(rank: int, world_size: int, sharded: bool, ddp: dict) -> dict[str, Tensor]:
    config = DistributedDataParallelConfig(use_distributed_optimizer=sharded, **ddp)
    groups: dict[str, Any] = {}
    if not sharded and not ddp:  # the groups of gradients and of the model apart
        dp = parallel_state.get_data_parallel_group()
        tp = parallel_state.get_tensor_model_parallel_group()
        groups = {
            "grad_comm_pgs": GradCommProcessGroups(dp=dp, dp_cp=dp, expt_dp=dp),
            "model_comm_pgs": ModelCommProcessGroups(tp=tp, mp=tp, tp_ep_pp=tp),
        }
    if config.use_torch_fsdp2:
        dp = parallel_state.get_data_parallel_group()
        wrapper = TorchFullyShardedDataParallel(
            ModelConfig(), config, TinyModel(), {nn.Linear}, process_group=dp
        )
    elif config.use_megatron_fsdp:
        wrapper = FullyShardedDataParallel(ModelConfig(), config, TinyModel(), [nn.Linear], False)
        assert isinstance(wrapper, MegatronFSDP)
    else:
        wrapper = DistributedDataParallel(ModelConfig(), config, TinyModel(), **groups)
    settings = OptimizerConfig(lr=0.01, weight_decay=0.1, use_distributed_optimizer=sharded)
    optimizer = get_megatron_optimizer(settings, [wrapper], **groups)
    for seed in range(4):
        wrapper.zero_grad_buffer()
        optimizer.zero_grad()
        if config.overlap_param_gather and seed == 1:
            wrapper.disable_forward_pre_hook()
            assert not wrapper.remove_forward_pre_hook_handles
        if config.overlap_param_gather and seed == 2:
            wrapper.enable_forward_pre_hook()
        # A call between the update and the forward pass changes nothing, whatever is in progress.
        wrapper.start_param_sync(force_sync=seed == 3)
        mean_loss(wrapper, token_batch(4, seed).chunk(world_size)[rank]).backward()
        finalize_model_grads([wrapper])
        optimizer.step()
    weights = preprocess_state_dict_for_uneven_dtensor(wrapper.state_dict())
    return {
        name: gather_uneven_dtensor_to_full_tensor(value) if isinstance(value, DTensor) else value
        for name, value in weights.items()
    }


def test_two_ranks_without_groups_train_as_adamw_on_the_whole_batch():
    expected = copy.deepcopy(TinyModel())
    groups = [
        {"params": [p for p in expected.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in expected.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.01)
    for seed in range(4):
        reference.zero_grad()
        mean_loss(expected, token_batch(4, seed)).backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
        reference.step()
    for cases in run_ranks(_train_all, 2):
        assert cases.keys() == CASES.keys()
        for weights in cases.values():
            for name, value in expected.state_dict().items():
                torch.testing.assert_close(weights[name], value, **tolerances.DTYPE[torch.float32])


def _average(rank: int, world_size: int, sharded: bool) -> list[float]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
    model = nn.Linear(3, 1)
    model.weight.average_gradients_across_tp_domain = True
    wrapper = DistributedDataParallel(ModelConfig(), config, model)
    wrapper(torch.full((1, 3), float(rank))).sum().backward()
    finalize_model_grads([wrapper])
    grads = [p.grad if p.grad is not None else p.main_grad for p in model.parameters()]
    return [float(grad.mean()) for grad in grads]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_gradient_is_averaged_over_tensor_parallel_ranks_if_a_project_asks(sharded):
    for weight, bias in run_ranks(_average, 2, sharded):
        assert weight == 0.5
        assert bias == 1.0
