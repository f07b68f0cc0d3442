"""Configuration of the optimizer: update rule, hyperparameters, loss scale, precision."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from megatron.core.config import flag_messages
from megatron.core.config.option import library_field, option
from megatron.core.config.rule import CheckedConfig, first_of, given, rules, where
from megatron.core.diagnostics.timers import Timers
from megatron.core.registry import Registry

# A value is a subclass of `UpdateRule`, which imports this module.
OPTIMIZERS = Registry[object](
    "--optimizer",
    {
        "adam": "megatron.core.optimizer.update_rules:AdamW",
        "sgd": "megatron.core.optimizer.update_rules:SGD",
        "lion": "megatron.core.optimizer.update_rules:Lion",
        "muon": "megatron.core.optimizer.muon:Muon",
        "dist_muon": "megatron.core.optimizer.muon:Muon",
        "soap": "megatron.core.optimizer.soap:Soap",
    },
)
_OF_PARAMETERS = "the dtypes of the parameters decide"
_OF_WRAPPER = "DistributedDataParallelConfig decides"
_regularization = partial(option, group="regularization")
_training = partial(option, group="training")
_learning_rate = partial(option, group="learning rate")
_precision = partial(option, group="mixed precision")
_experimental = partial(option, group="experimental")


@dataclass(kw_only=True)
class OptimizerConfig(CheckedConfig):
    """Configuration of the optimizer: update rule, hyperparameters, loss scale, precision.

    Projects derive dataclasses from it and assign to its fields before they build the optimizer.
    Types of numbers are torch.dtype, or their names in `DTYPES` of `reduced_precision_state`.
    """

    weight_decay: float = _regularization(
        0.01, "Decoupled weight decay coefficient, multiplied by the learning rate."
    )
    apply_wd_to_qk_layernorm: bool = _regularization(
        False,
        "Decay the weights of the norms of queries and keys (--qk-layernorm) too, which are "
        "vectors.",
    )
    clip_grad: float = _regularization(
        1.0,
        "Maximum global L2 norm of the gradient; 0 or less disables clipping.",
        at_least=None,
        infinite=True,
    )
    adam_beta1: float = _regularization(0.9, "Decay rate of Adam's first moment.")
    adam_beta2: float = _regularization(0.999, "Decay rate of Adam's second moment.")
    adam_eps: float = _regularization(1e-08, "Epsilon in the denominator of Adam's update.")
    sgd_momentum: float = _regularization(0.9, "Momentum of --optimizer sgd.")
    optimizer: str = _training(
        "adam",
        "Optimizer: adam (with decoupled weight decay), sgd (with momentum), lion, or muon or soap "
        "for matrices; dist_muon is muon with --use-distributed-optimizer.",
        choices=OPTIMIZERS,
    )
    lion_beta1: float = _regularization(
        0.95, "Interpolation weight of the momentum in Lion's update."
    )
    lion_beta2: float = _regularization(0.98, "Decay rate of Lion's momentum.")
    muon_momentum: float = _regularization(0.9, "Decay rate of Muon's momentum.")
    muon_nesterov: bool = _regularization(False, "Use Nesterov momentum in Muon.")
    muon_num_ns_steps: int = _regularization(
        5, "Number of Newton-Schulz iterations in Muon.", at_least=1
    )
    muon_coefficient_type: str = _regularization(
        "quintic",
        "Coefficients of Muon's Newton-Schulz iterations.",
        choices=("simple", "quintic", "polar_express"),
    )
    muon_scale_mode: str = _regularization(
        "spectral",
        "Scale of Muon's update: sqrt(max(rows, columns)) (spectral), sqrt(rows/columns) "
        "(unit_rms_norm) or sqrt(max(1, rows/columns)) (shape_scaling).",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = _regularization(1.0, "Additional multiplier of Muon's update.")
    muon_fp32_matmul_prec: str = _regularization(
        "medium",
        "Precision of Muon's matmuls: low is bf16; medium and high are those of "
        "torch.set_float32_matmul_precision.",
        choices=("low", "medium", "high"),
    )
    muon_split_qkv: bool = _regularization(
        True,
        "Orthogonalise the fused QKV weight as one matrix instead of Q, K and V separately.",
        flag="--muon-no-split-qkv",
    )
    muon_tp_mode: str = _regularization(
        "duplicated",
        "Muon with tensor parallelism: gather each matrix (duplicated), all-reduce within "
        "the iterations (distributed), or treat each shard as a matrix (blockwise).",
        choices=("blockwise", "duplicated", "distributed"),
    )
    muon_scalar_optimizer: str = _regularization(
        "adam",
        "Optimizer for non-matrix parameters when --optimizer is muon, dist_muon or soap.",
        choices=("adam", "lion"),
    )
    soap_shampoo_beta: float = _regularization(
        0.95, "Decay rate of the averages whose eigenvectors SOAP uses."
    )
    soap_precondition_frequency: int = _regularization(
        10, "Steps between updates of SOAP's eigenvectors.", at_least=1
    )
    muon_use_syrk: bool = _regularization(
        False, "Compute only one half of Muon's symmetric matmuls.", ignored=flag_messages.NO_KERNEL
    )
    optimizer_cpu_offload: bool = _training(
        False,
        "Keep optimizer state in host memory and run the optimizer on the CPU; excludes Muon and "
        "SOAP.",
    )
    optimizer_offload_fraction: float = _training(
        0.0,
        "Fraction of the optimizer state that --optimizer-cpu-offload keeps in host memory, "
        "0 to 1.",
        default=1.0,
    )
    use_torch_optimizer_for_cpu_offload: bool = _training(
        False, "Use the PyTorch optimizer on the CPU.", ignored=flag_messages.ALWAYS_SO
    )
    overlap_cpu_optimizer_d2h_h2d: bool = _training(
        False, "Overlap host-device copies with the optimizer step on the CPU."
    )
    pin_cpu_grads: bool = _training(
        True,
        "Copy gradients to pageable host memory; by default --optimizer-cpu-offload pins "
        "(page-locks) their host memory, so that copies overlap with computation.",
    )
    pin_cpu_params: bool = _training(
        True,
        "Keep parameters in pageable host memory; by default --optimizer-cpu-offload pins "
        "(page-locks) their host memory, so that copies overlap with computation.",
    )
    lr: float | None = _learning_rate(None, "Peak learning rate.")
    min_lr: float | None = _learning_rate(None, "Minimum learning rate after warmup.", default=0.0)
    decoupled_lr: float | None = _learning_rate(
        None, "Peak learning rate of the word embeddings and the output layer."
    )
    decoupled_min_lr: float | None = _learning_rate(
        None,
        "Minimum learning rate of the word embeddings and the output layer; needs --decoupled-lr.",
    )
    loss_scale: float | None = _precision(
        None, "Constant loss scale, a power of 2; dynamic with --fp16 if not given."
    )
    initial_loss_scale: float = _precision(4294967296.0, "Initial dynamic loss scale.")
    min_loss_scale: float = _precision(1.0, "Minimum dynamic loss scale.")
    loss_scale_window: float = _precision(
        1000.0, "Steps without overflow after which the dynamic loss scale doubles.", at_least=1
    )
    hysteresis: int = _precision(
        2, "Overflows after which the dynamic loss scale halves.", at_least=1
    )
    reuse_grad_buf_for_mxfp8_param_ag: bool = _precision(
        False,
        "All-gather mxfp8 parameters through the gradient buffer.",
        ignored="mxfp8 weights are gathered in 16 bits into their own buffer, not into that of "
        "gradients; layers quantize them",
    )
    overlap_param_gather_with_optimizer_step: bool = option(
        False,
        "All-gather each parameter bucket as soon as it is updated; needs "
        "--overlap-param-gather, excludes Muon and SOAP.",
        group="distributed",
    )
    use_distributed_optimizer: bool = option(
        False, "Shard optimizer state over data-parallel ranks (ZeRO-1).", group="distributed"
    )
    log_num_zeros_in_grad: bool = option(
        False, "Log the number of zeros in the gradient.", group="logging"
    )
    barrier_with_L1_time: bool = option(
        False,
        "Do not synchronize ranks before timers of level 1.",
        group="logging",
        flag="--no-barrier-with-level-1-timing",
        default=True,
    )
    use_precision_aware_optimizer: bool = _experimental(
        False,
        "Store optimizer state in reduced precision: with bf16 weights only the 16-bit "
        "remainder of main parameters, and the formats that --main-grads-dtype, "
        "--main-params-dtype, --exp-avg-dtype and --exp-avg-sq-dtype set.",
    )
    main_grads_dtype: torch.dtype | str = _experimental(
        torch.float32,
        "Data type of main gradients; bf16 needs --bf16 and --use-precision-aware-optimizer.",
        default="fp32",
        parse=str,
        choices=("fp32", "bf16"),
    )
    main_params_dtype: torch.dtype | str = _experimental(
        torch.float32,
        "Data type of main parameters; fp16 needs --use-precision-aware-optimizer and --bf16 "
        "or --fp16.",
        default="fp32",
        parse=str,
        choices=("fp32", "fp16"),
    )
    exp_avg_dtype: torch.dtype | str = _experimental(
        torch.float32,
        "Data type of the first moment; other than fp32 needs --use-precision-aware-optimizer.",
        default="fp32",
        parse=str,
        choices=("fp32", "fp16", "bf16", "fp8"),
    )
    exp_avg_sq_dtype: torch.dtype | str = _experimental(
        torch.float32,
        "Data type of Adam's second moment; other than fp32 needs --use-precision-aware-optimizer.",
        default="fp32",
        parse=str,
        choices=("fp32", "fp16", "bf16", "fp8"),
    )
    fp16: bool = library_field(False, _OF_PARAMETERS)
    bf16: bool = library_field(False, _OF_PARAMETERS)
    params_dtype: torch.dtype = library_field(torch.float32, _OF_PARAMETERS)
    fp8_recipe: str | None = library_field(None, "layers quantize weights, not the optimizer")
    store_param_remainders: bool = library_field(
        True, "use_precision_aware_optimizer stores remainders where it can"
    )
    overlap_param_gather: bool = library_field(False, _OF_WRAPPER)
    use_megatron_fsdp: bool = library_field(False, _OF_WRAPPER)
    config_logger_dir: str = library_field("", "TransformerConfig.config_logger_dir decides")
    # Measures the parts of a step.
    timers: Timers | None = None

    RULES = rules(
        first_of(
            {
                "--decoupled-min-lr needs --decoupled-lr": None,
                "{--decoupled-min-lr} is greater than {--decoupled-lr}: lower it": lambda c: (
                    c.decoupled_lr is not None and (c.decoupled_min_lr or 0.0) > c.decoupled_lr
                ),
            },
        ),
        {
            "{found}: a number from 0 up to, but not including, 1 is needed": given(
                "--adam-beta1 --adam-beta2 --lion-beta1 --lion-beta2 --muon-momentum "
                "--soap-shampoo-beta",
                lambda rate: not 0 <= rate < 1,
            ),
            "{found}: a number greater than 0 is needed": given(
                "--adam-eps --loss-scale", lambda value: value <= 0
            ),
            "{found}: a number from 0 to 1 is needed": given(
                "--optimizer-offload-fraction", lambda share: not 0 <= share <= 1
            ),
            "{--min-loss-scale} must be greater than 0 and "
            "at most {--initial-loss-scale}": lambda c: (
                not 0 < c.min_loss_scale <= c.initial_loss_scale
            ),
        },
        where(
            lambda c: not c.use_precision_aware_optimizer,
            {
                "{found} needs --use-precision-aware-optimizer: add it": given(
                    "--main-grads-dtype --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype",
                    lambda dtype: dtype not in ("fp32", torch.float32),
                ),
            },
        ),
    )

    @property
    def has_matrix_rule(self) -> bool:
        """Whether a rule of complete matrices (Muon, SOAP) updates the matrices."""
        return self.optimizer in ("muon", "dist_muon", "soap")
