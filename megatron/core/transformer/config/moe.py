"""Experts, router and dispatcher."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config import states
from megatron.core.config.option import option
from megatron.core.config.parse import layer_pattern


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Experts, router and dispatcher."""

    num_moe_experts: int | None = option(
        None,
        "Experts of each expert layer; none means a dense model.",
        group="moe",
        flag="--num-experts",
        dest="num_experts",
        harmless=(0,),
    )
    moe_layer_freq: int | tuple[int, ...] = option(
        1,
        "Which layers have experts: every Nth, or a list such as [0]+[1]*11.",
        group="moe",
        parse=layer_pattern,
    )
    moe_ffn_hidden_size: int | None = option(
        None,
        "Inner width of an expert; that of the MLP if not given.",
        group="moe",
    )
    moe_shared_expert_intermediate_size: int | None = option(
        None,
        "Inner width of the experts that every token visits.",
        group="moe",
    )
    moe_shared_expert_gate: bool = option(
        False,
        "Weigh the shared experts' result by a sigmoid of the token.",
        group="moe",
    )
    moe_shared_expert_overlap: bool = option(
        False,
        "Compute shared experts while tokens travel.",
        group="moe",
    )
    moe_grouped_gemm: bool = option(
        False,
        "Compute all experts of a rank in one grouped matrix product, on a GPU.",
        group="moe",
    )
    moe_use_legacy_grouped_gemm: bool = option(
        False,
        "Use the older grouped matrix product.",
        group="moe",
        ignored=states.NO_KERNEL,
    )
    moe_router_load_balancing_type: tuple[str, ...] = option(
        "aux_loss",
        "How the router is pushed towards equal load, once or several times.",
        group="moe",
        nargs="+",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
    )
    moe_router_dtype: str | None = option(
        None,
        "Number format of routing scores.",
        group="moe",
        choices=("fp32", "fp64"),
    )
    moe_router_fusion: bool = option(
        False,
        "Fuse top-k routing and its auxiliary loss.",
        group="moe",
        ignored=states.NO_KERNEL,
    )
    moe_router_score_function: str = option(
        "softmax",
        "Function that turns router logits into scores.",
        group="moe",
        choices=("softmax", "sigmoid"),
    )
    moe_router_topk: int = option(
        2,
        "Experts that each token visits.",
        group="moe",
    )
    moe_router_pre_softmax: bool = option(
        False,
        "Take the softmax before the top k are chosen.",
        group="moe",
    )
    moe_router_num_groups: int | None = option(
        None,
        "Groups that experts are divided into for group-limited routing.",
        group="moe",
    )
    moe_router_group_topk: int | None = option(
        None,
        "Groups that each token may choose experts from.",
        group="moe",
    )
    moe_router_group_score_topk: int | None = option(
        None,
        "Best experts of a group whose scores add up to the group's; --moe-router-topk over "
        "--moe-router-group-topk if not given.",
        group="moe",
    )
    moe_router_topk_scaling_factor: float | None = option(
        None,
        "Factor on the scores of the chosen experts.",
        group="moe",
    )
    moe_router_enable_expert_bias: bool = option(
        False,
        "Balance load by a bias on each expert's score instead of a loss.",
        group="moe",
    )
    moe_router_bias_update_rate: float = option(
        0.001,
        "Step of the balancing bias.",
        group="moe",
    )
    moe_router_force_load_balancing: bool = option(
        False,
        "Route at random, to measure speed under equal load.",
        group="moe",
    )
    moe_router_padding_for_fp8: bool = option(
        False,
        "Pad each expert's tokens to what fp8 products need.",
        group="moe",
        ignored="any number of tokens can be multiplied: zeros fill up what a kernel needs",
    )
    moe_aux_loss_coeff: tuple[float, ...] = option(
        0.0,
        "Weight of each balancing loss.",
        group="moe",
        nargs="+",
    )
    moe_z_loss_coeff: float | None = option(
        None,
        "Weight of the loss on the size of router logits.",
        group="moe",
    )
    moe_input_jitter_eps: float | None = option(
        None,
        "Relative noise on the router's input.",
        group="moe",
    )
    moe_token_dispatcher_type: str = option(
        "allgather",
        "How tokens travel to their experts.",
        group="moe",
        choices=("allgather", "alltoall", "flex"),
    )
    moe_enable_deepep: bool = option(
        False,
        "Send tokens by the DeepEP package where it imports; else by PyTorch, and say so.",
        group="moe",
    )
    moe_deepep_num_sms: int = option(
        20,
        "GPU multiprocessors that DeepEP may use.",
        group="moe",
    )
    moe_permute_fusion: bool = option(
        False,
        "Fuse the reordering of tokens.",
        group="moe",
        ignored=states.NO_KERNEL,
    )
    moe_expert_capacity_factor: float | None = option(
        None,
        "Tokens an expert takes, over its fair share; more are dropped.",
        group="moe",
    )
    moe_pad_expert_input_to_capacity: bool = option(
        False,
        "Pad every expert's input to its capacity: shapes that do not depend on the choice.",
        group="moe",
    )
    moe_token_drop_policy: str = option(
        "probs",
        "Which tokens are dropped beyond the capacity.",
        group="moe",
        choices=("probs", "position"),
    )
    moe_apply_probs_on_input: bool = option(
        False,
        "Multiply an expert's input instead of its output by the score.",
        group="moe",
    )
