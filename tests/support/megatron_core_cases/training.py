"""Optimizers and schedules: updated weights and learning rates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from .frame import Values, case, config, fill, gpt, start, tokens


@case(2)
def optimizer_over_two_replicas() -> Values:
    values = {}
    start()
    for sharded in (False, True):
        settings = config()
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
        model = gpt(settings)
        fill(model)
        wrapped = DistributedDataParallel(settings, ddp, model)
        wrapped.broadcast_params()
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                min_lr=1e-3,
                weight_decay=0.1,
                adam_eps=1e-3,  # values of no gradient are noise, which Adam would amplify
                clip_grad=1.0,
                use_distributed_optimizer=sharded,
            ),
            [wrapped],
        )
        scheduler = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=1e-2,
            min_lr=1e-3,
            lr_warmup_steps=2,
            lr_decay_steps=10,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.2,
            wd_incr_steps=10,
            wd_incr_style="linear",
            use_checkpoint_opt_param_scheduler=False,
        )
        ids, places, mask = tokens(rows=2 + dist.get_rank())
        for step in range(3):
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            wrapped(ids, places, mask, labels=ids.roll(-1, 1)).mean().backward()
            finalize_model_grads([wrapped])
            done, norm, zeros = optimizer.step()
            scheduler.step(increment=1)
            values[f"{sharded} {step}"] = [done, norm, zeros, optimizer.param_groups[0]["lr"]]
        values |= {f"{sharded} {n}": p.detach() for n, p in model.named_parameters()}
    return values


class OwnNorm(torch.nn.LayerNorm):
    """NVIDIA's local layer norm refuses sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps)
        for param in self.parameters():
            param.sequence_parallel = config.sequence_parallel


@case(4)
def balanced_experts_over_four_ranks() -> Values:
    """Tensor, sequence and expert parallelism, two losses of balance, and a bias of experts."""
    sizes = {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    }
    start(**sizes)
    settings = config(
        **sizes,
        sequence_parallel=True,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"],
        moe_aux_loss_coeff=[0.1, 0.2],
        moe_z_loss_coeff=0.01,
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
    )
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = OwnNorm
    model = gpt(settings, TransformerBlockSubmodules([spec, spec], OwnNorm))
    values = stepped(settings, model, steps=2, use_distributed_optimizer=True)
    moe_utils.reduce_aux_losses_tracker_across_ranks()
    tracker = moe_utils.get_moe_layer_wise_logging_tracker()
    for name in ("load_balancing_loss", "seq_load_balancing_loss"):
        values[name] = tracker[name]["values"]
    return {**values, **dict(model.named_buffers()), **dict(model.named_parameters())}


@case(2)
def scaled_losses_in_half_precision() -> Values:
    """The scale falls after overflows and grows after a window of good steps."""
    start()
    settings = config(fp16=True, params_dtype=torch.float16)
    return stepped(
        settings,
        Float16Module(settings, gpt(settings)),
        steps=7,
        fp16=True,
        params_dtype=torch.float16,
        initial_loss_scale=2.0**24,
        min_loss_scale=1.0,
        loss_scale_window=3,
        hysteresis=2,
    )


def stepped(settings: Any, model: torch.nn.Module, steps: int, **of_optimizer: Any) -> Values:
    """Train a model on two replicas; return what the optimizer reports."""
    sharded = of_optimizer.get("use_distributed_optimizer", False)
    fill(model)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
    wrapped = DistributedDataParallel(settings, ddp, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-2, weight_decay=0.0, adam_eps=1e-3, clip_grad=1.0, **of_optimizer),
        [wrapped],
    )
    settings.finalize_model_grads_func = finalize_model_grads
    ids, places, mask = tokens(rows=2)
    values: Values = {}
    for step in range(steps):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        loss = wrapped(ids, places, mask, labels=ids.roll(-1, 1)).float().mean()
        optimizer.scale_loss(loss).backward()
        finalize_model_grads([wrapped])
        done, norm, _ = optimizer.step()
        values[f"step {step}"] = [done, norm, loss, optimizer.get_loss_scale().item()]
    return values


@case()
def learning_rates() -> Values:
    values: Values = {}
    for style in ("constant", "linear", "cosine", "inverse-square-root", "WSD"):
        optimizer = SimpleNamespace(param_groups=[{"params": [], "lr": 1.0}])
        more = {"wsd_decay_steps": 5, "lr_wsd_decay_style": "linear"} if style == "WSD" else {}
        scheduler = OptimizerParamScheduler(
            optimizer, 0.0, 1.0, 0.1, 3, 20, style, 0.1, 0.3, 10, "cosine", False, False, **more
        )
        rates = []
        for _ in range(22):
            scheduler.step(1)
            group = optimizer.param_groups[0]
            rates.append([group["lr"], group["weight_decay"]])
        values[style] = rates
        values[f"{style} state"] = dict(scheduler.state_dict())
    return values
