"""Optimizers with main parameters, clipping and loss scaling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, GradScaler
from megatron.core.optimizer.optimizer import MegatronOptimizer as MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig as OptimizerConfig
from megatron.core.optimizer.param_groups import (
    ParamCondition,
    make_param_groups,
    trainable_parameters,
)
from megatron.core.optimizer.reduced_precision_state import StateChunk as StateChunk
from megatron.core.optimizer.update_rules import State as State
from megatron.core.optimizer.update_rules import UpdateRule as UpdateRule
from megatron.core.optimizer.update_rules import register_optimizer as register_optimizer
from megatron.core.parallel import parallel_state
from megatron.core.parallel.process_groups_config import ProcessGroupCollection


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    no_weight_decay_cond: ParamCondition | None = None,
    scale_lr_cond: ParamCondition | None = None,
    lr_mult: float = 1.0,
    use_gloo_process_groups: bool = True,
    pg_collection: ProcessGroupCollection | None = None,
) -> MegatronOptimizer:
    """Build the optimizer for the trainable parameters of this rank.

    ``no_weight_decay_cond`` and ``scale_lr_cond`` are called with (name, parameter); ``lr_mult``
    multiplies the learning rate of parameters that ``scale_lr_cond`` selects.  --loss-scale makes a
    constant loss scale, fp16 parameters a dynamic one.
    ``use_gloo_process_groups`` has no effect; Megatron-LM's signature has it.
    """
    del use_gloo_process_groups
    scaler: GradScaler | None = None
    if config.loss_scale is not None:
        scaler = ConstantGradScaler(config.loss_scale)
    elif any(param.dtype == torch.float16 for _, param in trainable_parameters(model_chunks)):
        scaler = DynamicGradScaler(
            initial_scale=config.initial_loss_scale,
            min_scale=config.min_loss_scale,
            growth_interval=int(config.loss_scale_window),
            hysteresis=config.hysteresis,
        )
    param_groups = make_param_groups(
        model_chunks,
        config,
        no_weight_decay_cond=no_weight_decay_cond,
        scale_lr_cond=scale_lr_cond,
        lr_mult=lr_mult,
    )
    kind = DistributedOptimizer if config.use_distributed_optimizer else MegatronOptimizer
    groups = pg_collection or parallel_state.current()
    return kind(config, model_chunks, param_groups, groups, scaler)
