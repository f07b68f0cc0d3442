"""The optimizer, its numbers and its precision."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, its numbers and its precision."""

    weight_decay: float = option(0.01, "", group="regularization")
    clip_grad: float = option(1.0, "", group="regularization")
    adam_beta1: float = option(0.9, "", group="regularization")
    adam_beta2: float = option(0.999, "", group="regularization")
    adam_eps: float = option(1e-08, "", group="regularization")
    sgd_momentum: float = option(0.9, "", group="regularization")
    optimizer: str = option("adam", "", group="training", choices=("adam", "sgd"))
    optimizer_cpu_offload: bool = option(False, "", group="training")
    optimizer_offload_fraction: float = option(1.0, "", group="training")
    use_torch_optimizer_for_cpu_offload: bool = option(False, "", group="training")
    overlap_cpu_optimizer_d2h_h2d: bool = option(False, "", group="training")
    pin_cpu_grads: bool = option(True, "", group="training")
    pin_cpu_params: bool = option(True, "", group="training")
    lr: float | None = option(None, "", group="learning rate")
    min_lr: float = option(0.0, "", group="learning rate")
    decoupled_lr: float | None = option(None, "", group="learning rate")
    decoupled_min_lr: float | None = option(None, "", group="learning rate")
    loss_scale: float | None = option(None, "", group="mixed precision")
    initial_loss_scale: float = option(4294967296.0, "", group="mixed precision")
    min_loss_scale: float = option(1.0, "", group="mixed precision")
    loss_scale_window: float = option(1000.0, "", group="mixed precision")
    hysteresis: int = option(2, "", group="mixed precision")
    reuse_grad_buf_for_mxfp8_param_ag: bool = option(False, "", group="mixed precision")
    overlap_param_gather_with_optimizer_step: bool = option(False, "", group="distributed")
    use_distributed_optimizer: bool = option(False, "", group="distributed")
    log_num_zeros_in_grad: bool = option(False, "", group="logging")
    barrier_with_L1_time: bool = option(
        True,
        "",
        group="logging",
        flag="--no-barrier-with-level-1-timing",
    )
    use_precision_aware_optimizer: bool = option(False, "", group="experimental")
    main_grads_dtype: str = option("fp32", "", group="experimental", choices=("fp32", "bf16"))
    main_params_dtype: str = option("fp32", "", group="experimental", choices=("fp32", "fp16"))
    exp_avg_dtype: str = option(
        "fp32",
        "",
        group="experimental",
        choices=("fp32", "fp16", "bf16", "fp8"),
    )
    exp_avg_sq_dtype: str = option(
        "fp32",
        "",
        group="experimental",
        choices=("fp32", "fp16", "bf16", "fp8"),
    )
