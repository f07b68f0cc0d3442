"""What flags of experts, latent attention and YaRN need to do anything."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from megatron.core.device import CPU


@dataclass(frozen=True)
class Need:
    """What some flags need, in words, and whether a derived namespace has it."""

    words: str
    is_met: Callable[[Namespace], bool]
    flags: tuple[str, ...]  # dests


NEEDS_OF_LAYERS = (
    Need(
        "--moe-shared-expert-intermediate-size",
        lambda ns: ns.moe_shared_expert_intermediate_size is not None,
        ("moe_shared_expert_overlap",),
    ),
    Need(
        "--moe-enable-deepep",
        lambda ns: ns.moe_enable_deepep,
        ("moe_deepep_num_sms",),
    ),
    Need(
        "--moe-use-upcycling",
        lambda ns: ns.moe_use_upcycling,
        ("moe_upcycling_granularity",),
    ),
    Need(
        "--num-experts",
        lambda ns: ns.num_experts is not None,
        (
            "expert_tensor_parallel_size",
            "moe_aux_loss_coeff",
            "moe_apply_probs_on_input",
            "moe_enable_deepep",
            "moe_expert_capacity_factor",
            "moe_ffn_hidden_size",
            "moe_input_jitter_eps",
            "moe_layer_freq",
            "moe_layer_recompute",
            "moe_pad_expert_input_to_capacity",
            "moe_per_layer_logging",
            "moe_router_dtype",
            "moe_router_enable_expert_bias",
            "moe_router_force_load_balancing",
            "moe_router_group_topk",
            "moe_router_group_score_topk",
            "moe_router_load_balancing_type",
            "moe_router_num_groups",
            "moe_router_pre_softmax",
            "moe_router_score_function",
            "moe_router_topk",
            "moe_router_topk_scaling_factor",
            "moe_shared_expert_gate",
            "moe_shared_expert_intermediate_size",
            "moe_token_dispatcher_type",
            "moe_z_loss_coeff",
        ),
    ),
    Need(
        "another --moe-router-load-balancing-type than sinkhorn or none",
        lambda ns: not {"sinkhorn", "none"}.intersection(ns.moe_router_load_balancing_type),
        ("moe_aux_loss_coeff",),
    ),
    Need(
        "--moe-router-score-function softmax",
        lambda ns: ns.moe_router_score_function == "softmax",
        ("moe_router_pre_softmax",),
    ),
    Need(
        "another --moe-router-load-balancing-type than sinkhorn",
        lambda ns: "sinkhorn" not in ns.moe_router_load_balancing_type,
        ("moe_router_pre_softmax",),
    ),
    Need(
        "a choice by score, without --moe-router-force-load-balancing",
        lambda ns: not ns.moe_router_force_load_balancing,
        (
            "moe_router_enable_expert_bias",
            "moe_router_group_score_topk",
            "moe_router_group_topk",
            "moe_router_num_groups",
        ),
    ),
    Need(
        "--num-experts on a GPU",
        lambda ns: ns.num_experts is not None and ns.device != CPU,
        ("moe_grouped_gemm",),
    ),
    Need(
        "--swiglu, --geglu or --quick-geglu",
        lambda ns: ns.gated_linear_unit,
        ("activation_func_clamp_value", "glu_linear_offset"),
    ),
    Need(
        "--multi-latent-attention",
        lambda ns: ns.multi_latent_attention,
        (
            "q_lora_rank",
            "kv_lora_rank",
            "qk_head_dim",
            "qk_pos_emb_head_dim",
            "v_head_dim",
            "cache_mla_latents",
        ),
    ),
    Need(
        "--multi-latent-attention or --rope-type yarn",
        lambda ns: ns.multi_latent_attention or ns.rope_type == "yarn",
        ("rotary_scaling_factor", "mscale", "mscale_all_dim"),
    ),
    Need(
        "--rope-type yarn",
        lambda ns: ns.rope_type == "yarn" or (ns.multi_latent_attention and ns.rope_type is None),
        (
            "yarn_original_max_position_embeddings",
            "yarn_beta_fast",
            "yarn_beta_slow",
            "yarn_correction_range_round_to_int",
        ),
    ),
    Need(
        "--moe-expert-capacity-factor",
        lambda ns: ns.moe_expert_capacity_factor is not None,
        ("moe_token_drop_policy",),
    ),
    Need(
        "--moe-router-enable-expert-bias",
        lambda ns: ns.moe_router_enable_expert_bias,
        ("moe_router_bias_update_rate",),
    ),
)
