"""Experts, router and dispatcher."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import option
from megatron.core.config.parse import layer_pattern

_moe = partial(option, group="moe")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Experts, router and dispatcher."""

    num_moe_experts: int | None = _moe(
        None,
        "Experts of each expert layer; none means a dense model.",
        flag="--num-experts",
        dest="num_experts",
        harmless=(0,),
    )
    moe_layer_freq: int | tuple[int, ...] = _moe(
        1,
        "Which layers have experts: every Nth, or a list such as [0]+[1]*11.",
        parse=layer_pattern,
    )
    moe_ffn_hidden_size: int | None = _moe(
        None, "Inner width of an expert; that of the MLP if not given."
    )
    moe_shared_expert_intermediate_size: int | None = _moe(
        None, "Inner width of the experts that every token visits."
    )
    moe_shared_expert_gate: bool = _moe(
        False, "Weigh the shared experts' result by a sigmoid of the token."
    )
    moe_shared_expert_overlap: bool = _moe(False, "Compute shared experts while tokens travel.")
    moe_grouped_gemm: bool = _moe(
        False, "Compute all experts of a rank in one grouped matrix product, on a GPU."
    )
    moe_use_legacy_grouped_gemm: bool = _moe(
        False, "Use the older grouped matrix product.", ignored=flag_messages.NO_KERNEL
    )
    moe_router_load_balancing_type: tuple[str, ...] = _moe(
        "aux_loss",
        "How the router is pushed towards equal load, once or several times.",
        nargs="+",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
    )
    moe_router_dtype: str | None = _moe(
        None, "Number format of routing scores.", choices=("fp32", "fp64")
    )
    moe_router_fusion: bool = _moe(
        False, "Compute scores, choice and weights of experts in one kernel, in fp32 on a GPU."
    )
    moe_router_score_function: str = _moe(
        "softmax", "Function that turns router logits into scores.", choices=("softmax", "sigmoid")
    )
    moe_router_topk: int = _moe(2, "Experts that each token visits.")
    moe_router_pre_softmax: bool = _moe(False, "Take the softmax before the top k are chosen.")
    moe_router_num_groups: int | None = _moe(
        None, "Groups that experts are divided into for group-limited routing."
    )
    moe_router_group_topk: int | None = _moe(
        None, "Groups that each token may choose experts from."
    )
    moe_router_group_score_topk: int | None = _moe(
        None,
        "Best experts of a group whose scores add up to the group's; --moe-router-topk over "
        "--moe-router-group-topk if not given.",
    )
    moe_router_topk_scaling_factor: float | None = _moe(
        None, "Factor on the scores of the chosen experts."
    )
    moe_router_enable_expert_bias: bool = _moe(
        False, "Balance load by a bias on each expert's score instead of a loss."
    )
    moe_router_bias_update_rate: float = _moe(0.001, "Step of the balancing bias.")
    moe_router_force_load_balancing: bool = _moe(
        False, "Route at random, to measure speed under equal load."
    )
    moe_router_padding_for_fp8: bool = _moe(
        False,
        "Pad each expert's tokens to what fp8 products need.",
        ignored="any number of tokens can be multiplied: zeros fill up what a kernel needs",
    )
    moe_aux_loss_coeff: tuple[float, ...] = _moe(0.0, "Weight of each balancing loss.", nargs="+")
    moe_z_loss_coeff: float | None = _moe(None, "Weight of the loss on the size of router logits.")
    moe_input_jitter_eps: float | None = _moe(None, "Relative noise on the router's input.")
    moe_token_dispatcher_type: str = _moe(
        "allgather",
        "How tokens travel to their experts.",
        choices=("allgather", "alltoall", "flex"),
    )
    moe_enable_deepep: bool = _moe(
        False, "Send tokens by the DeepEP package where it imports; else by PyTorch, and say so."
    )
    moe_deepep_num_sms: int = _moe(20, "GPU multiprocessors that DeepEP may use.")
    moe_permute_fusion: bool = _moe(
        False, "Compute the order of tokens by expert in one kernel, on a GPU."
    )
    moe_expert_capacity_factor: float | None = _moe(
        None,
        "Largest number of tokens that an expert takes, as a multiple of its even share; further "
        "tokens are dropped. A negative value means no limit, which is the default.",
        at_least=None,
    )
    moe_pad_expert_input_to_capacity: bool = _moe(
        False, "Pad every expert's input to its capacity: shapes that do not depend on the choice."
    )
    moe_token_drop_policy: str = _moe(
        "probs", "Which tokens are dropped beyond the capacity.", choices=("probs", "position")
    )
    moe_apply_probs_on_input: bool = _moe(
        False, "Multiply an expert's input instead of its output by the score."
    )
