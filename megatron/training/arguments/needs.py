"""What flags of experts, latent attention and YaRN need to do anything."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class FlagRequirement:
    """What some flags need, in words, and whether a derived namespace has it.

    Words that are one flag, alone or with a value, are their own condition.
    """

    words: str
    dests: str  # of the flags, between spaces
    condition: Callable[[Namespace], bool] | None = None

    @property
    def flags(self) -> list[str]:
        return self.dests.split()

    def is_met(self, ns: Namespace) -> bool:
        if self.condition is not None:
            return self.condition(ns)
        flag, _, value = self.words.partition(" ")
        found = vars(ns)[flag[2:].replace("-", "_")]
        return found == value if value else found is not None and found is not False


NEEDS_OF_LAYERS = (
    FlagRequirement("--moe-shared-expert-intermediate-size", "moe_shared_expert_overlap"),
    FlagRequirement("--moe-enable-deepep", "moe_deepep_num_sms"),
    FlagRequirement("--moe-use-upcycling", "moe_upcycling_granularity"),
    FlagRequirement(
        "--num-experts",
        "expert_tensor_parallel_size moe_aux_loss_coeff moe_apply_probs_on_input "
        "moe_enable_deepep moe_expert_capacity_factor moe_ffn_hidden_size moe_input_jitter_eps "
        "moe_grouped_gemm moe_layer_freq moe_layer_recompute moe_pad_expert_input_to_capacity "
        "moe_per_layer_logging moe_permute_fusion moe_router_dtype moe_router_fusion "
        "moe_router_enable_expert_bias "
        "moe_router_force_load_balancing moe_router_group_topk moe_router_group_score_topk "
        "moe_router_load_balancing_type moe_router_num_groups moe_router_pre_softmax "
        "moe_router_score_function moe_router_topk moe_router_topk_scaling_factor "
        "moe_shared_expert_gate moe_shared_expert_intermediate_size moe_token_dispatcher_type "
        "moe_z_loss_coeff",
    ),
    FlagRequirement(
        "another --moe-router-load-balancing-type than sinkhorn or none",
        "moe_aux_loss_coeff",
        lambda ns: not {"sinkhorn", "none"}.intersection(ns.moe_router_load_balancing_type),
    ),
    FlagRequirement("--moe-router-score-function softmax", "moe_router_pre_softmax"),
    FlagRequirement(
        "another --moe-router-load-balancing-type than sinkhorn",
        "moe_router_pre_softmax",
        lambda ns: "sinkhorn" not in ns.moe_router_load_balancing_type,
    ),
    FlagRequirement(
        "routing by score, without --moe-router-force-load-balancing",
        "moe_router_enable_expert_bias moe_router_group_score_topk moe_router_group_topk "
        "moe_router_num_groups",
        lambda ns: not ns.moe_router_force_load_balancing,
    ),
    FlagRequirement(
        "--swiglu, --geglu or --quick-geglu",
        "activation_func_clamp_value glu_linear_offset",
        lambda ns: ns.gated_linear_unit,
    ),
    FlagRequirement(
        "--multi-latent-attention",
        "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim cache_mla_latents",
    ),
    FlagRequirement(
        "--multi-latent-attention or --rope-type yarn",
        "rotary_scaling_factor mscale mscale_all_dim",
        lambda ns: ns.multi_latent_attention or ns.rope_type == "yarn",
    ),
    FlagRequirement(
        "--rope-type yarn",
        "yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow "
        "yarn_correction_range_round_to_int",
        lambda ns: ns.rope_type == "yarn" or (ns.multi_latent_attention and ns.rope_type is None),
    ),
    FlagRequirement(
        "router logits in fp32: --moe-router-dtype fp32, or neither --bf16 nor --fp16",
        "moe_router_fusion",
        lambda ns: (
            ns.moe_router_dtype == "fp32"
            or (ns.moe_router_dtype is None and not (ns.bf16 or ns.fp16))
        ),
    ),
    FlagRequirement("--moe-expert-capacity-factor", "moe_token_drop_policy"),
    FlagRequirement("--moe-router-enable-expert-bias", "moe_router_bias_update_rate"),
)
