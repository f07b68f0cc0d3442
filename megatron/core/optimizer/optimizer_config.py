"""The optimizer, its numbers and its precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.config import states
from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, its numbers and its precision."""

    weight_decay: float = option(
        0.01,
        "Share of each weight that decays per step, times the learning rate.",
        group="regularization",
    )
    clip_grad: float = option(
        1.0,
        "Largest global norm of the gradient; 0 turns clipping off.",
        group="regularization",
    )
    adam_beta1: float = option(
        0.9,
        "Decay of Adam's mean of gradients.",
        group="regularization",
    )
    adam_beta2: float = option(
        0.999,
        "Decay of Adam's mean of squared gradients.",
        group="regularization",
    )
    adam_eps: float = option(
        1e-08,
        "Added to the denominator of Adam's step.",
        group="regularization",
    )
    sgd_momentum: float = option(
        0.9,
        "Momentum of plain gradient descent.",
        group="regularization",
    )
    optimizer: str = option(
        "adam",
        "Optimizer: Adam with decoupled weight decay, gradient descent with momentum, Lion, or Muon"
        " for matrices; dist_muon is muon with --use-distributed-optimizer.",
        group="training",
        choices=("adam", "sgd", "lion", "muon", "dist_muon"),
    )
    lion_beta1: float = option(
        0.95,
        "Weight of Lion's mean of gradients in the direction of a step.",
        group="regularization",
    )
    lion_beta2: float = option(
        0.98,
        "Decay of Lion's mean of gradients.",
        group="regularization",
    )
    muon_momentum: float = option(
        0.9,
        "Decay of Muon's mean of gradients.",
        group="regularization",
    )
    muon_nesterov: bool = option(
        False,
        "Let Muon look ahead by the newest gradient.",
        group="regularization",
    )
    muon_num_ns_steps: int = option(
        5,
        "Newton-Schulz steps that make a matrix orthogonal.",
        group="regularization",
    )
    muon_coefficient_type: str = option(
        "quintic",
        "Coefficients of the Newton-Schulz steps.",
        group="regularization",
        choices=("simple", "quintic", "polar_express"),
    )
    muon_scale_mode: str = option(
        "spectral",
        "What a step of Muon is multiplied by: the root of the longer side, of rows over columns,"
        " or of that where it is above 1.",
        group="regularization",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = option(
        1.0,
        "A further factor of Muon's steps.",
        group="regularization",
    )
    muon_fp32_matmul_prec: str = option(
        "medium",
        "Precision of Muon's products: low is bfloat16, the others are torch's.",
        group="regularization",
        choices=("low", "medium", "high"),
    )
    muon_split_qkv: bool = option(
        True,
        "Take query, key and value for one matrix.",
        group="regularization",
        flag="--muon-no-split-qkv",
    )
    muon_tp_mode: str = option(
        "duplicated",
        "A matrix that tensor-parallel ranks have cut: gathered, made orthogonal by sums over the"
        " ranks, or taken for several.",
        group="regularization",
        choices=("blockwise", "duplicated", "distributed"),
    )
    muon_scalar_optimizer: str = option(
        "adam",
        "Optimizer of what is no matrix under Muon.",
        group="regularization",
        choices=("adam", "lion"),
    )
    muon_use_syrk: bool = option(
        False,
        "Compute one half of Muon's symmetric products.",
        group="regularization",
        ignored=states.NO_KERNEL,
    )
    optimizer_cpu_offload: bool = option(
        False,
        "Keep optimizer state in host memory and step there.",
        group="training",
    )
    optimizer_offload_fraction: float = option(
        1.0,
        "Share of the optimizer state kept in host memory, 0 to 1.",
        group="training",
    )
    use_torch_optimizer_for_cpu_offload: bool = option(
        False,
        "Step on the host with PyTorch's own optimizer.",
        group="training",
        ignored=states.ALWAYS_SO,
    )
    overlap_cpu_optimizer_d2h_h2d: bool = option(
        False,
        "Overlap copies between host and device with the step on the host.",
        group="training",
    )
    pin_cpu_grads: bool = option(
        True,
        "Do not pin the host copies of gradients.",
        group="training",
    )
    pin_cpu_params: bool = option(
        True,
        "Do not pin the host copies of parameters.",
        group="training",
    )
    lr: float | None = option(
        None,
        "Peak learning rate.",
        group="learning rate",
    )
    min_lr: float = option(
        0.0,
        "Learning rate that is never undercut after warm-up.",
        group="learning rate",
    )
    decoupled_lr: float | None = option(
        None,
        "Peak learning rate of word embeddings and output layer.",
        group="learning rate",
    )
    decoupled_min_lr: float | None = option(
        None,
        "Lower bound of --decoupled-lr's schedule.",
        group="learning rate",
    )
    loss_scale: float | None = option(
        None,
        "Constant loss scale; a power of 2. Without it the scale adapts under --fp16.",
        group="mixed precision",
    )
    initial_loss_scale: float = option(
        4294967296.0,
        "Loss scale that the adaptive one starts from.",
        group="mixed precision",
    )
    min_loss_scale: float = option(
        1.0,
        "Smallest adaptive loss scale.",
        group="mixed precision",
    )
    loss_scale_window: float = option(
        1000.0,
        "Steps without overflow after which the adaptive loss scale doubles.",
        group="mixed precision",
    )
    hysteresis: int = option(
        2,
        "Overflows after which the adaptive loss scale halves.",
        group="mixed precision",
    )
    reuse_grad_buf_for_mxfp8_param_ag: bool = option(
        False,
        "Gather mxfp8 parameters through the gradient buffer.",
        group="mixed precision",
        ignored="updated weights go into their own buffer, and mxfp8 makes its codes from them",
    )
    overlap_param_gather_with_optimizer_step: bool = option(
        False,
        "Begin to gather a bucket of parameters as soon as it is updated.",
        group="distributed",
    )
    use_distributed_optimizer: bool = option(
        False,
        "Shard the optimizer over the replicas.",
        group="distributed",
    )
    log_num_zeros_in_grad: bool = option(
        False,
        "Log how many elements of the gradient are zero.",
        group="logging",
    )
    barrier_with_L1_time: bool = option(
        True,
        "Do not wait for all ranks before a timer of level 1 starts.",
        group="logging",
        flag="--no-barrier-with-level-1-timing",
    )
    use_precision_aware_optimizer: bool = option(
        False,
        "Keep optimizer state in fewer bits: of main parameters the 16 that bf16 weights lack.",
        group="experimental",
    )
    main_grads_dtype: str = option(
        "fp32",
        "Number format of main gradients.",
        group="experimental",
        choices=("fp32", "bf16"),
    )
    main_params_dtype: str = option(
        "fp32",
        "Number format of main parameters.",
        group="experimental",
        choices=("fp32", "fp16"),
    )
    exp_avg_dtype: str = option(
        "fp32",
        "Number format of Adam's mean of gradients.",
        group="experimental",
        choices=("fp32", "fp16", "bf16", "fp8"),
    )
    exp_avg_sq_dtype: str = option(
        "fp32",
        "Number format of Adam's mean of squared gradients.",
        group="experimental",
        choices=("fp32", "fp16", "bf16", "fp8"),
    )
    # What scripts say of the model once more; the parameters' own dtypes decide.
    fp16: bool = False
    bf16: bool = False
    params_dtype: Any = None

    @property
    def has_muon(self) -> bool:
        """Whether matrices have a rule of their own."""
        return self.optimizer in ("muon", "dist_muon")
