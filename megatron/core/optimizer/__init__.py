"""Optimizers with main parameters, clipping and loss scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from megatron.core.config.errors import ConfigError
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, GradScaler
from megatron.core.optimizer.optimizer import MegatronOptimizer as MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig as OptimizerConfig
from megatron.core.optimizer.param_groups import (
    ParamCondition,
    ParamGroupOverride,
    ParamKey,
    make_param_groups,
    no_weight_decay_on_embeddings,
    trainable_parameters,
)
from megatron.core.optimizer.reduced_precision_state import StateChunk as StateChunk
from megatron.core.optimizer.update_rules import State as State
from megatron.core.optimizer.update_rules import UpdateRule as UpdateRule
from megatron.core.optimizer.update_rules import register_optimizer as register_optimizer
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection


@library_call(
    "config model_chunks no_weight_decay_cond scale_lr_cond lr_mult use_gloo_process_groups "
    "default_skip_embedding_weight_decay grad_comm_pgs model_comm_pgs",
    unused="use_gloo_process_groups dump_param_to_param_group_map layer_wise_distributed_optimizer",
)
def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    no_weight_decay_cond: ParamCondition | None = None,
    scale_lr_cond: ParamCondition | None = None,
    lr_mult: float = 1.0,
    *,
    default_skip_embedding_weight_decay: bool = False,
    config_overrides: Mapping[ParamKey, ParamGroupOverride] | None = None,
    pg_collection: ProcessGroupCollection,
) -> MegatronOptimizer:
    """Build the optimizer for the trainable parameters of this rank.

    ``no_weight_decay_cond`` and ``scale_lr_cond`` are called with (name, parameter); ``lr_mult``
    multiplies the learning rate of parameters that ``scale_lr_cond`` selects.
    ``default_skip_embedding_weight_decay``: without a condition, neither vectors nor embeddings
    have weight decay.  `make_param_groups` defines ``config_overrides``.  --loss-scale makes a
    constant loss scale, fp16 parameters a dynamic one.  Raises ConfigError without a learning rate.
    """
    config.check()  # fields may have been assigned since it was made
    if config.lr is None:
        raise ConfigError("OptimizerConfig(lr=None): give the peak learning rate, lr")
    if default_skip_embedding_weight_decay and no_weight_decay_cond is None:
        no_weight_decay_cond = no_weight_decay_on_embeddings
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
        overrides=config_overrides,
    )
    kind = DistributedOptimizer if config.use_distributed_optimizer else MegatronOptimizer
    return kind(config, model_chunks, param_groups, pg_collection, scaler)
