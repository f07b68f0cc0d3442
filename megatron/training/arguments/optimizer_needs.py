"""Flags of the optimizer and its schedule that need another flag to do anything."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields

from megatron.core.device import CPU
from megatron.core.distributed.sharding import is_fully_sharded
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.training.arguments.needs import FlagRequirement


def _rule_of_vectors(ns: Namespace) -> str:
    rule = ns.muon_scalar_optimizer if "muon" in ns.optimizer else ns.optimizer
    return str(rule)


NEEDS_GPU = FlagRequirement(
    "a GPU",
    "optimizer_cpu_offload enable_cuda_graph external_cuda_graph cpu_offloading moe_grouped_gemm "
    "record_memory_history high_priority_stream_groups nccl_communicator_config_path "
    "moe_permute_fusion moe_router_fusion nccl_ub",
    lambda ns: ns.device != CPU,
)
NEEDS_OF_OPTIMIZER = (
    FlagRequirement("--optimizer sgd", "sgd_momentum"),
    FlagRequirement(
        "--optimizer adam, or --muon-scalar-optimizer adam",
        "adam_beta1 adam_beta2 adam_eps",
        lambda ns: _rule_of_vectors(ns) == "adam",
    ),
    FlagRequirement(
        "--optimizer lion, or --muon-scalar-optimizer lion",
        "lion_beta1 lion_beta2",
        lambda ns: _rule_of_vectors(ns) == "lion",
    ),
    FlagRequirement(
        "--optimizer muon",
        " ".join(
            f.name
            for f in fields(OptimizerConfig)
            if f.name.startswith("muon_") and f.name not in ("muon_tp_mode", "muon_use_syrk")
        ),
        lambda ns: "muon" in ns.optimizer,
    ),
    FlagRequirement(
        "--optimizer muon and --tensor-model-parallel-size",
        "muon_tp_mode",
        lambda ns: "muon" in ns.optimizer and ns.tensor_model_parallel_size > 1,
    ),
    FlagRequirement(
        "--bf16 with main parameters, or --main-grads-dtype, --main-params-dtype, --exp-avg-dtype "
        "or --exp-avg-sq-dtype below fp32",
        "use_precision_aware_optimizer",
        lambda ns: (
            (ns.bf16 and not is_fully_sharded(ns))
            or {ns.main_grads_dtype, ns.main_params_dtype, ns.exp_avg_dtype, ns.exp_avg_sq_dtype}
            != {"fp32"}
        ),
    ),
    FlagRequirement(
        "--fp16 without --loss-scale",
        "initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        lambda ns: ns.fp16 and ns.loss_scale is None,
    ),
    FlagRequirement(
        "--lr-decay-style WSD", "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples"
    ),
    FlagRequirement(
        "--optimizer-cpu-offload",
        "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params",
    ),
    NEEDS_GPU,
)
