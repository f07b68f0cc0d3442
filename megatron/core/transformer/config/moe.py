"""Mixture-of-experts options: experts, router and token dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megatron.core.config import flag_messages
from megatron.core.config.option import option
from megatron.core.config.parse import layer_frequency
from megatron.core.model_parallel_config import as_tuple

_moe = partial(option, group="moe")
SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")


@dataclass(kw_only=True)
class MoEConfig:
    """Mixture-of-experts options: experts, router and token dispatcher."""

    num_moe_experts: int | None = _moe(
        None,
        "Number of experts in each MoE layer; a dense model if not given.",
        flag="--num-experts",
        dest="num_experts",
        harmless=(0,),
    )
    moe_layer_freq: int | tuple[int, ...] = _moe(
        1,
        "MoE layers: every Nth, or a list such as [0]+[1]*11 where 1 is MoE.",
        parse=layer_frequency,
    )
    moe_ffn_hidden_size: int | None = _moe(
        None, "Hidden size of each expert; --ffn-hidden-size if not given."
    )
    moe_latent_size: int | None = _moe(
        None,
        "Width of the tokens that are dispatched to experts, and of the experts' inputs and "
        "outputs (latent MoE): one projection per layer narrows them to it, another widens the "
        "combined outputs to --hidden-size, the default. Router and shared experts keep "
        "--hidden-size.",
    )
    moe_shared_expert_intermediate_size: int | None = _moe(
        None, "Total hidden size of the shared experts, which process every token."
    )
    moe_shared_expert_gate: bool = _moe(
        False, "Multiply the output of the shared experts by a learned sigmoid gate per token."
    )
    moe_shared_expert_overlap: bool = _moe(
        False,
        "Overlap shared experts with the token all-to-all; excludes --moe-enable-deepep and "
        "needs dispatcher alltoall or flex.",
    )
    moe_grouped_gemm: bool = _moe(
        False,
        "Let Transformer Engine compute all local experts in one grouped GEMM; this program's own "
        "bf16 experts are grouped on every GPU, with or without the flag.",
    )
    moe_use_legacy_grouped_gemm: bool = _moe(
        False, "Use the legacy grouped GEMM.", ignored=flag_messages.NO_KERNEL
    )
    moe_router_load_balancing_type: str | Sequence[str] = _moe(
        "aux_loss",
        "Load balancing of the router; several losses may be combined, sinkhorn and none "
        "stand alone.",
        nargs="+",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
    )
    moe_router_dtype: str | None = _moe(
        None,
        "Data type of the router's logits and scores; that of the hidden states if not given.",
        choices=("fp32", "fp64"),
    )
    moe_router_fusion: bool = _moe(
        False,
        "Compute router scores, top-k and weights in one kernel; needs fp32 logits and a GPU.",
    )
    moe_router_score_function: str = _moe(
        "softmax",
        "Score function of the router; sqrtsoftplus is sqrt(log(1 + exp(logit))), as in "
        "DeepSeek-V4.",
        choices=SCORE_FUNCTIONS,
    )
    moe_router_topk: int = _moe(2, "Number of experts per token.")
    moe_num_hash_layers: int = _moe(
        0,
        "Number of first layers whose experts are chosen by a fixed table of token ids, as in "
        "DeepSeek-V4; scores only weigh the chosen experts.",
    )
    moe_router_pre_softmax: bool = _moe(False, "Apply softmax before top-k instead of after it.")
    moe_router_num_groups: int | None = _moe(
        None, "Number of expert groups for group-limited routing; needs --moe-router-group-topk."
    )
    moe_router_group_topk: int | None = _moe(
        None, "Number of groups per token in group-limited routing; needs --moe-router-num-groups."
    )
    moe_router_group_score_topk: int | None = _moe(
        None,
        "Number of top experts whose scores sum to the score of a group; --moe-router-topk / "
        "--moe-router-group-topk if not given.",
    )
    moe_router_topk_scaling_factor: float | None = _moe(
        None, "Multiplier of the scores of the selected experts."
    )
    moe_router_enable_expert_bias: bool = _moe(
        False,
        "Balance load by a bias per expert, which is added to its score (softmax over all "
        "experts) when experts are chosen, without an auxiliary loss.",
    )
    moe_router_bias_update_rate: float = _moe(0.001, "Update rate of the expert bias.")
    moe_router_force_load_balancing: bool = _moe(
        False, "Route tokens at random, to benchmark with balanced load."
    )
    moe_enable_routing_replay: bool = _moe(
        False,
        "Train each token of a rollout on the experts that computed it in generation, for "
        "pretrain_rl.py; the weights of the experts follow from the logits of training. The "
        "reference policy and the last token of an answer choose their own experts.",
    )
    moe_router_padding_for_fp8: bool = _moe(
        False,
        "Pad the tokens of each expert to the multiple that fp8 GEMMs need.",
        aliases=("--moe-router-padding-for-quantization",),
        ignored="expert GEMMs accept any number of tokens and pad them where a kernel needs it",
    )
    moe_aux_loss_coeff: float | Sequence[float] = _moe(
        0.0,
        "Coefficient of each load balancing loss, one per --moe-router-load-balancing-type.",
        nargs="+",
    )
    moe_z_loss_coeff: float | None = _moe(None, "Coefficient of the router z-loss.")
    moe_input_jitter_eps: float | None = _moe(None, "Relative noise added to the router's input.")
    moe_token_dispatcher_type: str = _moe(
        "allgather",
        "Token dispatcher: collective that sends tokens to their experts.",
        choices=("allgather", "alltoall", "flex"),
    )
    moe_enable_deepep: bool = _moe(
        False,
        "Dispatch tokens with the DeepEP package if it is installed, otherwise with PyTorch; "
        "needs dispatcher flex.",
    )
    moe_flex_dispatcher_backend: str | None = _moe(
        None,
        "Package of dispatcher flex: deepep sets --moe-enable-deepep; the other two are dispatched "
        "with PyTorch, with a warning.",
        choices=("deepep", "hybridep", "ncclep"),
    )
    moe_deepep_num_sms: int = _moe(
        20,
        "Number of SMs (GPU multiprocessors) that DeepEP uses.",
        aliases=("--moe-flex-dispatcher-num-sms",),
    )
    moe_permute_fusion: bool = _moe(
        False,
        "Fuse token permutation into one kernel, on a GPU.",
        ignored="on a GPU, one kernel always computes the order of the tokens",
    )
    moe_expert_capacity_factor: float | None = _moe(
        None,
        "Capacity of each expert as a multiple of its even share of tokens; further tokens "
        "are dropped. Negative: no limit, the default.",
        at_least=None,
    )
    moe_pad_expert_input_to_capacity: bool = _moe(
        False,
        "Pad the input of each expert to its capacity, so that shapes are static; needs "
        "--moe-expert-capacity-factor.",
    )
    moe_token_drop_policy: str = _moe(
        "probs",
        "Tokens to drop beyond the capacity: those of lowest score (probs) or last position "
        "(position).",
        choices=("probs", "position"),
    )
    moe_apply_probs_on_input: bool = _moe(
        False,
        "Multiply the input of each expert, instead of its output, by the score; needs "
        "--moe-router-topk 1.",
        aliases=("--export-moe-apply-probs-on-input",),
    )

    @property
    def load_balancing_types(self) -> tuple[str, ...]:
        """Load balancing of the router: several losses, or one type."""
        return as_tuple(self.moe_router_load_balancing_type)

    @property
    def aux_loss_coeffs(self) -> tuple[float, ...]:
        """Coefficient of each type of load balancing."""
        return as_tuple(self.moe_aux_loss_coeff)
