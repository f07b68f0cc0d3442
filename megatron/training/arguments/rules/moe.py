"""Rules about mixture-of-experts (MoE) layers."""

from __future__ import annotations

from megatron.training.arguments.rules.rule import Settings, first_of, given, rules, where


def _weights_add_up(c: Settings) -> bool:
    """Return whether the weights of a token's experts add up to 1."""
    if c.load_balancing_types == ("sinkhorn",):
        return False
    if c.moe_router_score_function == "sigmoid":
        return bool(c.moe_router_topk != 1)
    return not c.moe_router_pre_softmax


def _group_size(c: Settings) -> int:
    return int(c.num_moe_experts // c.moe_router_num_groups)


_ROUTER = where(
    "--num-experts",
    {
        "{--moe-router-topk} is not between 1 and {--num-experts}": lambda c: (
            not 1 <= c.moe_router_topk <= c.num_moe_experts
        ),
        "{found}": lambda c: list(c.config.model.moe_problems()),
        "--moe-apply-probs-on-input needs --moe-router-topk 1, not {moe_router_topk}": lambda c: (
            c.moe_apply_probs_on_input and c.moe_router_topk != 1
        ),
        "{found}: at least 1 is needed": given(
            "--moe-shared-expert-intermediate-size", lambda width: width < 1
        ),
    },
    first_of(
        {
            "{--moe-router-group-score-topk} needs --moe-router-num-groups": lambda c: (
                c.moe_router_num_groups is None
                and c.moe_router_group_topk is None
                and c.moe_router_group_score_topk is not None
            ),
        },
        where(
            lambda c: {c.moe_router_num_groups, c.moe_router_group_topk} != {None},
            first_of(
                {
                    "{--moe-router-num-groups} and {--moe-router-group-topk} go together: give "
                    "both": lambda c: (
                        not c.moe_router_num_groups
                        or not c.moe_router_group_topk
                        or min(c.moe_router_num_groups, c.moe_router_group_topk) < 1
                    ),
                    "{--num-experts} is not a multiple of {--moe-router-num-groups}: change one "
                    "of them": lambda c: c.num_moe_experts % c.moe_router_num_groups,
                    "{--moe-router-group-score-topk}: {found}": lambda c: (
                        c.moe_router_group_score_topk is not None
                        and not 1 <= c.moe_router_group_score_topk <= (size := _group_size(c))
                        and f"groups have {size} experts"
                    ),
                    "{--moe-router-topk} experts cannot be taken evenly from "
                    "{--moe-router-group-topk} of {moe_router_num_groups} "
                    "groups of {found}": lambda c: (
                        (
                            c.moe_router_group_topk > c.moe_router_num_groups
                            or (
                                c.moe_router_group_score_topk is None
                                and c.moe_router_topk % c.moe_router_group_topk
                            )
                            or c.moe_router_topk > c.moe_router_group_topk * _group_size(c)
                        )
                        and f"{_group_size(c)} experts"
                    ),
                },
            ),
        ),
    ),
)

_BALANCING = where(
    "--num-experts",
    {
        "--moe-router-load-balancing-type names {found[0]} and --moe-aux-loss-coeff {found[1]}: "
        "give a coefficient for each": lambda c: (
            len(c.load_balancing_types) != len(c.aux_loss_coeffs)
            and (len(c.load_balancing_types), len(c.aux_loss_coeffs))
        ),
        "{--moe-router-load-balancing-type}: {found} stands alone": lambda c: (
            len(c.load_balancing_types) > 1
            and min({"sinkhorn", "none"} & {*c.load_balancing_types}, default=None)
        ),
    },
    where(
        lambda c: "sinkhorn" in c.load_balancing_types,
        {
            "{found} and --moe-router-load-balancing-type sinkhorn exclude "
            "each other": "--moe-expert-capacity-factor --moe-router-force-load-balancing",
            "{found} and --moe-router-load-balancing-type sinkhorn exclude each other: it chooses "
            "among all": "--moe-router-num-groups",
            "{found} and --moe-router-load-balancing-type sinkhorn exclude each other: it "
            "balances the load by itself": "--moe-router-enable-expert-bias",
            "{found} and --moe-router-load-balancing-type sinkhorn exclude each other: it weighs "
            "by plain scores": "--moe-router-topk-scaling-factor",
            "--moe-router-score-function sigmoid and --moe-router-load-balancing-type sinkhorn "
            "exclude each other: with {--moe-router-topk} it weighs by a softmax": lambda c: (
                c.moe_router_score_function == "sigmoid" and c.moe_router_topk > 1
            ),
        },
    ),
)

_DISPATCHER = where(
    "--num-experts",
    {
        "--moe-enable-deepep and --moe-shared-expert-overlap exclude each other: keep the first "
        "for DeepEP's fused dispatch, the second to compute shared experts during the all-to-all "
        "of --moe-token-dispatcher-type alltoall": None,
    },
)

# It interleaves two passes at each all-to-all, so there must be an all-to-all, and a pass must be
# able to stop inside a layer, which it cannot while the layer is recomputed.
_OVERLAP = where(
    "--overlap-moe-expert-parallel-comm",
    {
        "--overlap-moe-expert-parallel-comm needs --expert-model-parallel-size above 1: with 1 "
        "there is no all-to-all to overlap": lambda c: (
            c.num_moe_experts is None or c.expert_model_parallel_size < 2
        ),
        "--overlap-moe-expert-parallel-comm needs --moe-token-dispatcher-type alltoall or flex, "
        "not allgather": "--moe-token-dispatcher-type allgather",
        "--overlap-moe-expert-parallel-comm does not support recomputing complete MoE layers: use "
        "--recompute-granularity selective with "
        "--recompute-modules core_attn or moe_act": lambda c: (
            c.recompute_granularity == "full" or "moe" in c.modules_to_recompute
        ),
        "--overlap-moe-expert-parallel-comm and {found} exclude each other: keep the first, with "
        "the default schedule, to hide the all-to-all, the second for a smaller "
        "pipeline bubble": given("--pipeline-schedule", lambda name: name.startswith("zb")),
        "--overlap-moe-expert-parallel-comm and fully sharded parameters exclude each other: a "
        "layer is gathered "
        "for one pass at a time; use --use-distributed-optimizer": lambda c: c.is_fully_sharded,
        "--overlap-moe-expert-parallel-comm needs one process per rank: use torchrun instead of "
        "{found}": "--virtual-ranks",
    },
    where(
        "--delay-wgrad-compute",
        {
            "--delay-wgrad-compute and {found} exclude each other: keep the first to overlap "
            "weight gradients "
            "with the all-to-all, the second for multi-token prediction": "--mtp-num-layers",
            "--delay-wgrad-compute and {found} exclude each other: keep the first to overlap "
            "weight gradients with the all-to-all, the second to defer the embedding's weight "
            "gradient alone": "--defer-embedding-wgrad-compute",
        },
    ),
)

# The weighted outputs of a token's experts must add up to the output of the dense MLP.
_UPCYCLING = where(
    "--moe-use-upcycling",
    {
        "--moe-use-upcycling needs --num-experts": None,
        "--moe-use-upcycling needs --load: the dense checkpoint": None,
        "--moe-use-upcycling needs --save: where the model with experts goes": None,
        "--moe-use-upcycling: the weights of a token's experts would not add up to 1; use "
        "--moe-router-topk 2 or more with sigmoid scores, or with softmax scores without "
        "--moe-router-pre-softmax, "
        "and another load balancing than sinkhorn": lambda c: not _weights_add_up(c),
    },
    where(
        lambda c: c.moe_upcycling_granularity > 0 and c.num_moe_experts is not None,
        {
            "{found} is not a multiple of {--moe-upcycling-granularity}": lambda c: [
                c.shown(flag)
                for flag in ("--moe-router-topk", "--num-experts")
                if c.value(flag) % c.moe_upcycling_granularity
            ],
            "--moe-use-upcycling makes {moe_upcycling_granularity} experts of an MLP: "
            "{--moe-ffn-hidden-size} x {moe_upcycling_granularity} "
            "is not {--ffn-hidden-size}": lambda c: (
                (c.moe_ffn_hidden_size or 0) * c.moe_upcycling_granularity != c.ffn_hidden_size
            ),
        },
    ),
    {
        "{--moe-upcycling-granularity} does not support fully sharded parameters: upcycle and "
        "save with --use-distributed-optimizer, then "
        "load that checkpoint": lambda c: c.moe_upcycling_granularity > 1 and c.is_fully_sharded,
    },
)

RULES = rules(
    where(
        lambda c: c.num_moe_experts is None,
        {"{found}": lambda c: list(c.config.model.dense_problems())},
    ),
    where(
        "--num-experts",
        {
            "{--num-experts} is not a multiple of {--expert-model-parallel-size}: change one of "
            "them": lambda c: (
                c.expert_model_parallel_size >= 1
                and c.num_moe_experts % c.expert_model_parallel_size
            ),
        },
        first_of(
            {
                "{found}: at least 1 is needed": given(
                    "--expert-tensor-parallel-size", lambda size: size < 1
                ),
                "{--moe-ffn-hidden-size} is not a multiple of {--expert-tensor-parallel-size}: "
                "change one of them": lambda c: (
                    (c.moe_ffn_hidden_size or 0) % (c.expert_tensor_parallel_size or 1)
                ),
            },
        ),
        {
            # or all tensor-parallel ranks route the same tokens and count their gradients
            "--num-experts with {--tensor-model-parallel-size} "
            "needs --sequence-parallel: add it": lambda c: (
                c.trains and c.tensor_model_parallel_size > 1 and not c.sequence_parallel
            ),
            "{--num-experts} and {--spec} exclude each other: keep --num-experts for the built-in "
            "MoE layers, "
            "--spec for layers that code describes": lambda c: c.spec and not c.kind.is_hybrid,
            "--moe-layer-freq {found[0]} has {found[1]} entries for {--num-layers}: give a 0 or 1 "
            "for each layer": lambda c: (
                isinstance(c.moe_layer_freq, tuple)
                and (len(c.moe_layer_freq) != c.num_layers or {*c.moe_layer_freq} - {0, 1})
                and (list(c.moe_layer_freq), len(c.moe_layer_freq))
            ),
        },
    ),
    {
        "{found}: at least 1 is needed": given(
            "--moe-layer-freq", lambda freq: isinstance(freq, int) and freq < 1
        ),
    },
    _ROUTER,
    _BALANCING,
    _DISPATCHER,
    _OVERLAP,
    _UPCYCLING,
)
