"""The optimizer, its numbers and its precision."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core.config import flag_messages
from megatron.core.config.option import option

_regularization = partial(option, group="regularization")
_training = partial(option, group="training")
_learning_rate = partial(option, group="learning rate")
_precision = partial(option, group="mixed precision")
_experimental = partial(option, group="experimental")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, its numbers and its precision."""

    weight_decay: float = _regularization(
        0.01, "Share of each weight that decays per step, times the learning rate."
    )
    clip_grad: float = _regularization(
        1.0,
        "Largest global norm of the gradient; 0 or less turns clipping off.",
        at_least=None,
        infinite=True,
    )
    adam_beta1: float = _regularization(0.9, "Decay of Adam's mean of gradients.")
    adam_beta2: float = _regularization(0.999, "Decay of Adam's mean of squared gradients.")
    adam_eps: float = _regularization(1e-08, "Added to the denominator of Adam's step.")
    sgd_momentum: float = _regularization(0.9, "Momentum of plain gradient descent.")
    optimizer: str = _training(
        "adam",
        "Optimizer: Adam with decoupled weight decay, gradient descent with momentum, Lion, or Muon"
        " for matrices; dist_muon is muon with --use-distributed-optimizer.",
        choices=("adam", "sgd", "lion", "muon", "dist_muon"),
    )
    lion_beta1: float = _regularization(
        0.95, "Weight of Lion's mean of gradients in the direction of a step."
    )
    lion_beta2: float = _regularization(0.98, "Decay of Lion's mean of gradients.")
    muon_momentum: float = _regularization(0.9, "Decay of Muon's mean of gradients.")
    muon_nesterov: bool = _regularization(False, "Let Muon look ahead by the newest gradient.")
    muon_num_ns_steps: int = _regularization(
        5, "Newton-Schulz steps that make a matrix orthogonal.", at_least=1
    )
    muon_coefficient_type: str = _regularization(
        "quintic",
        "Coefficients of the Newton-Schulz steps.",
        choices=("simple", "quintic", "polar_express"),
    )
    muon_scale_mode: str = _regularization(
        "spectral",
        "What a step of Muon is multiplied by: the root of the longer side, of rows over columns,"
        " or of that where it is above 1.",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = _regularization(1.0, "A further factor of Muon's steps.")
    muon_fp32_matmul_prec: str = _regularization(
        "medium",
        "Precision of Muon's products: low is bfloat16, the others are torch's.",
        choices=("low", "medium", "high"),
    )
    muon_split_qkv: bool = _regularization(
        True, "Take query, key and value for one matrix.", flag="--muon-no-split-qkv"
    )
    muon_tp_mode: str = _regularization(
        "duplicated",
        "A matrix that tensor-parallel ranks have cut: gathered, made orthogonal by sums over the"
        " ranks, or taken for several.",
        choices=("blockwise", "duplicated", "distributed"),
    )
    muon_scalar_optimizer: str = _regularization(
        "adam", "Optimizer of what is no matrix under Muon.", choices=("adam", "lion")
    )
    muon_use_syrk: bool = _regularization(
        False, "Compute one half of Muon's symmetric products.", ignored=flag_messages.NO_KERNEL
    )
    optimizer_cpu_offload: bool = _training(
        False, "Keep optimizer state in host memory and step there."
    )
    optimizer_offload_fraction: float = _training(
        1.0, "Share of the optimizer state kept in host memory, 0 to 1."
    )
    use_torch_optimizer_for_cpu_offload: bool = _training(
        False, "Step on the host with PyTorch's own optimizer.", ignored=flag_messages.ALWAYS_SO
    )
    overlap_cpu_optimizer_d2h_h2d: bool = _training(
        False, "Overlap copies between host and device with the step on the host."
    )
    pin_cpu_grads: bool = _training(True, "Do not pin the host copies of gradients.")
    pin_cpu_params: bool = _training(True, "Do not pin the host copies of parameters.")
    lr: float | None = _learning_rate(None, "Peak learning rate.")
    min_lr: float = _learning_rate(0.0, "Learning rate that is never undercut after warm-up.")
    decoupled_lr: float | None = _learning_rate(
        None, "Peak learning rate of word embeddings and output layer."
    )
    decoupled_min_lr: float | None = _learning_rate(
        None, "Lower bound of --decoupled-lr's schedule."
    )
    loss_scale: float | None = _precision(
        None, "Constant loss scale; a power of 2. Without it the scale adapts under --fp16."
    )
    initial_loss_scale: float = _precision(
        4294967296.0, "Loss scale that the adaptive one starts from."
    )
    min_loss_scale: float = _precision(1.0, "Smallest adaptive loss scale.")
    loss_scale_window: float = _precision(
        1000.0, "Steps without overflow after which the adaptive loss scale doubles.", at_least=1
    )
    hysteresis: int = _precision(
        2, "Overflows after which the adaptive loss scale halves.", at_least=1
    )
    reuse_grad_buf_for_mxfp8_param_ag: bool = _precision(
        False,
        "Gather mxfp8 parameters through the gradient buffer.",
        ignored="mxfp8 weights are gathered in 16 bits into their own buffer, not into that of "
        "gradients; layers make codes from them",
    )
    overlap_param_gather_with_optimizer_step: bool = option(
        False,
        "Begin to gather a bucket of parameters as soon as it is updated.",
        group="distributed",
    )
    use_distributed_optimizer: bool = option(
        False, "Shard the optimizer over the replicas.", group="distributed"
    )
    log_num_zeros_in_grad: bool = option(
        False, "Log how many elements of the gradient are zero.", group="logging"
    )
    barrier_with_L1_time: bool = option(
        True,
        "Do not wait for all ranks before a timer of level 1 starts.",
        group="logging",
        flag="--no-barrier-with-level-1-timing",
    )
    use_precision_aware_optimizer: bool = _experimental(
        False,
        "Keep optimizer state in fewer bits: of main parameters the 16 that bf16 weights lack.",
    )
    main_grads_dtype: str = _experimental(
        "fp32", "Number format of main gradients.", choices=("fp32", "bf16")
    )
    main_params_dtype: str = _experimental(
        "fp32", "Number format of main parameters.", choices=("fp32", "fp16")
    )
    exp_avg_dtype: str = _experimental(
        "fp32",
        "Number format of Adam's mean of gradients.",
        choices=("fp32", "fp16", "bf16", "fp8"),
    )
    exp_avg_sq_dtype: str = _experimental(
        "fp32",
        "Number format of Adam's mean of squared gradients.",
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
