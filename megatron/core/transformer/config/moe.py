"""Experts, router and dispatcher."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option
from megatron.core.config.parse import layer_pattern


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Experts, router and dispatcher."""

    num_moe_experts: int | None = option(
        None,
        "",
        group="moe",
        flag="--num-experts",
        dest="num_experts",
    )
    moe_layer_freq: int | tuple[int, ...] = option(1, "", group="moe", parse=layer_pattern)
    moe_ffn_hidden_size: int | None = option(None, "", group="moe")
    moe_shared_expert_intermediate_size: int | None = option(None, "", group="moe")
    moe_shared_expert_overlap: bool = option(False, "", group="moe")
    moe_grouped_gemm: bool = option(False, "", group="moe")
    moe_use_legacy_grouped_gemm: bool = option(False, "", group="moe")
    moe_router_load_balancing_type: tuple[str, ...] = option(
        "aux_loss",
        "",
        group="moe",
        nargs="+",
        choices=("aux_loss", "seq_aux_loss", "sinkhorn", "none"),
    )
    moe_router_dtype: str | None = option(None, "", group="moe", choices=("fp32", "fp64"))
    moe_router_fusion: bool = option(False, "", group="moe")
    moe_router_score_function: str = option(
        "softmax",
        "",
        group="moe",
        choices=("softmax", "sigmoid"),
    )
    moe_router_topk: int = option(2, "", group="moe")
    moe_router_pre_softmax: bool = option(False, "", group="moe")
    moe_router_num_groups: int | None = option(None, "", group="moe")
    moe_router_group_topk: int | None = option(None, "", group="moe")
    moe_router_topk_scaling_factor: float | None = option(None, "", group="moe")
    moe_router_enable_expert_bias: bool = option(False, "", group="moe")
    moe_router_bias_update_rate: float = option(0.001, "", group="moe")
    moe_router_force_load_balancing: bool = option(False, "", group="moe")
    moe_router_padding_for_fp8: bool = option(False, "", group="moe")
    moe_aux_loss_coeff: tuple[float, ...] = option(0.0, "", group="moe", nargs="+")
    moe_z_loss_coeff: float | None = option(None, "", group="moe")
    moe_input_jitter_eps: float | None = option(None, "", group="moe")
    moe_token_dispatcher_type: str = option(
        "allgather",
        "",
        group="moe",
        choices=("allgather", "alltoall", "flex"),
    )
    moe_enable_deepep: bool = option(False, "", group="moe")
    moe_deepep_num_sms: int = option(20, "", group="moe")
    moe_permute_fusion: bool = option(False, "", group="moe")
    moe_expert_capacity_factor: float | None = option(None, "", group="moe")
    moe_pad_expert_input_to_capacity: bool = option(False, "", group="moe")
    moe_token_drop_policy: str = option("probs", "", group="moe", choices=("probs", "position"))
    moe_apply_probs_on_input: bool = option(False, "", group="moe")
