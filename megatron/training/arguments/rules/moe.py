"""Rules about mixture-of-experts (MoE) layers."""

from __future__ import annotations

from megatron.core.config.rule import rules, where
from megatron.training.arguments.rules.rule import Settings


def _weights_add_up(c: Settings) -> bool:
    """Return whether the weights of a token's experts add up to 1."""
    if c.load_balancing_types == ("sinkhorn",):
        return False
    if c.moe_router_score_function != "softmax":
        return bool(c.moe_router_topk != 1)
    return not c.moe_router_pre_softmax


# The weighted outputs of a token's experts must add up to the output of the dense MLP.
_UPCYCLING = where(
    "--moe-use-upcycling",
    {
        "--moe-use-upcycling needs --num-experts": None,
        "--moe-use-upcycling and {found} exclude each other: experts start as copies of the dense "
        "MLP, which has the full width": "--moe-latent-size",
        "--moe-use-upcycling needs --load: the dense checkpoint": None,
        "--moe-use-upcycling needs --save: where the model with experts goes": None,
        "--moe-use-upcycling: the weights of a token's experts would not add up to 1; use "
        "--moe-router-topk 2 or more with sigmoid or sqrtsoftplus scores, or with softmax scores "
        "without --moe-router-pre-softmax, and another load balancing than sinkhorn": lambda c: (
            not _weights_add_up(c)
        ),
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
        "--num-experts",
        {
            # or all tensor-parallel ranks route the same tokens and count their gradients
            "--num-experts with {--tensor-model-parallel-size} "
            "needs --sequence-parallel: add it": lambda c: (
                c.trains and c.tensor_model_parallel_size > 1 and not c.sequence_parallel
            ),
            "{--num-experts} and {--spec} exclude each other: keep --num-experts for the built-in "
            "MoE layers, "
            "--spec for layers that code describes": lambda c: c.spec and not c.kind.is_hybrid,
        },
    ),
    where(
        "--moe-enable-routing-replay",
        {
            "--moe-enable-routing-replay and {--moe-router-load-balancing-type} exclude each "
            "other: its experts depend on other tokens; use aux_loss": lambda c: (
                "sinkhorn" in c.load_balancing_types
            ),
            "--moe-enable-routing-replay and {found} exclude each other: no score chooses the "
            "experts; leave one out": "--moe-router-force-load-balancing",
        },
    ),
    where(
        "--overlap-moe-expert-parallel-comm",
        {
            "--overlap-moe-expert-parallel-comm and fully sharded parameters exclude each other: a "
            "layer is gathered "
            "for one pass at a time; use --use-distributed-optimizer": lambda c: c.is_fully_sharded,
            "--overlap-moe-expert-parallel-comm needs one process per rank: use torchrun instead "
            "of {found}": "--virtual-ranks",
        },
    ),
    _UPCYCLING,
)
