"""Checks of mixture-of-experts (MoE) layers."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.distributed.sharding import is_fully_sharded
from megatron.training.config.run import RunConfig
from megatron.training.models.registry import model_kind_of


def experts_are_dealt_out(run: RunConfig) -> Iterator[str]:
    """Require equally many experts on each rank of an expert-parallel group."""
    m = run.model
    ep, etp = m.expert_model_parallel_size, m.expert_tensor_parallel_size
    if m.num_moe_experts is None:
        if ep > 1:
            yield (
                f"--expert-model-parallel-size {ep} needs --num-experts: a dense model has no "
                "experts to split over ranks"
            )
        return
    if ep >= 1 and m.num_moe_experts % ep:
        yield (
            f"--num-experts {m.num_moe_experts} is not a multiple of "
            f"--expert-model-parallel-size {ep}: change one of them"
        )
    width = m.moe_ffn_hidden_size or 0
    if etp is not None and etp < 1:
        yield f"--expert-tensor-parallel-size {etp}: at least 1 is needed"
    elif etp is not None and width % etp:
        yield (
            f"--moe-ffn-hidden-size {width} is not a multiple of "
            f"--expert-tensor-parallel-size {etp}: change one of them"
        )


def experts_need_a_cut_sequence(run: RunConfig) -> Iterator[str]:
    """Require sequence parallelism for MoE layers with tensor parallelism.

    Otherwise all tensor-parallel ranks would route the same tokens, and count their gradients
    several times.
    """
    m = run.model
    tp = m.tensor_model_parallel_size
    if run.trains and m.num_moe_experts is not None and tp > 1 and not m.sequence_parallel:
        yield (
            f"--num-experts with --tensor-model-parallel-size {tp} needs --sequence-parallel: "
            "add it"
        )


def layers_with_experts_are_named(run: RunConfig) -> Iterator[str]:
    """Require one --moe-layer-freq entry per layer; refuse --num-experts with a spec."""
    m, freq = run.model, run.model.moe_layer_freq
    if isinstance(freq, int):
        if freq < 1:
            yield f"--moe-layer-freq {freq}: at least 1 is needed"
    elif m.num_moe_experts is not None and (len(freq) != m.num_layers or set(freq) - {0, 1}):
        yield (
            f"--moe-layer-freq {list(freq)} has {len(freq)} entries for --num-layers "
            f"{m.num_layers}: give a 0 or 1 for each layer"
        )
    lm = run.language_model
    if m.num_moe_experts is not None and lm.spec and not model_kind_of(run).is_hybrid:
        yield (
            f"--num-experts {m.num_moe_experts} and --spec {' '.join(lm.spec)} exclude each other: "
            "keep --num-experts for the built-in MoE layers, --spec for layers that code describes"
        )


def choice_can_be_made(run: RunConfig) -> Iterator[str]:
    """Require enough experts for top-k, and a router that receives a gradient."""
    m = run.model
    if m.num_moe_experts is None:
        return
    k, num_experts = m.moe_router_topk, m.num_moe_experts
    if not 1 <= k <= num_experts:
        yield f"--moe-router-topk {k} is not between 1 and --num-experts {num_experts}"
    is_softmax = m.moe_router_score_function == "softmax"
    even = m.moe_router_load_balancing_type == ("sinkhorn",)
    if k == 1 and is_softmax and not m.moe_router_pre_softmax and not even:
        yield (
            "--moe-router-topk 1 needs --moe-router-pre-softmax: the softmax over one expert is "
            "always 1, so the router would have no gradient"
        )
    if m.moe_router_enable_expert_bias and is_softmax:
        yield "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid: add it"
    if m.moe_apply_probs_on_input and k != 1:
        yield f"--moe-apply-probs-on-input needs --moe-router-topk 1, not {k}"
    shared = m.moe_shared_expert_intermediate_size
    if shared is not None and shared < 1:
        yield f"--moe-shared-expert-intermediate-size {shared}: at least 1 is needed"
    yield from _groups_can_hold_the_choice(run)


def _groups_can_hold_the_choice(run: RunConfig) -> Iterator[str]:
    m = run.model
    assert m.num_moe_experts is not None, "called with experts"
    groups, chosen, k = m.moe_router_num_groups, m.moe_router_group_topk, m.moe_router_topk
    judged_by = m.moe_router_group_score_topk
    if groups is None and chosen is None:
        if judged_by is not None:
            yield f"--moe-router-group-score-topk {judged_by} needs --moe-router-num-groups"
        return
    if not groups or not chosen or groups < 1 or chosen < 1:
        yield (
            f"--moe-router-num-groups {groups} and --moe-router-group-topk {chosen} go together: "
            "give both"
        )
    elif m.num_moe_experts % groups:
        yield (
            f"--num-experts {m.num_moe_experts} is not a multiple of --moe-router-num-groups "
            f"{groups}: change one of them"
        )
    elif judged_by is not None and not 1 <= judged_by <= m.num_moe_experts // groups:
        yield (
            f"--moe-router-group-score-topk {judged_by}: groups have "
            f"{m.num_moe_experts // groups} experts"
        )
    elif (
        chosen > groups
        or (judged_by is None and k % chosen)
        or k > chosen * (m.num_moe_experts // groups)
    ):
        yield (
            f"--moe-router-topk {k} experts cannot be taken evenly from --moe-router-group-topk "
            f"{chosen} of {groups} groups of {m.num_moe_experts // groups} experts"
        )


def balancing_fits_together(run: RunConfig) -> Iterator[str]:
    """Require one coefficient per load balancing type.

    Refuse options that contradict Sinkhorn balancing.
    """
    m = run.model
    kinds, coefficients = m.moe_router_load_balancing_type, m.moe_aux_loss_coeff
    if m.num_moe_experts is None:
        return
    if len(kinds) != len(coefficients):
        yield (
            f"--moe-router-load-balancing-type names {len(kinds)} and --moe-aux-loss-coeff "
            f"{len(coefficients)}: give a coefficient for each"
        )
    alone = {"sinkhorn", "none"} & set(kinds)
    if alone and len(kinds) > 1:
        yield f"--moe-router-load-balancing-type {' '.join(kinds)}: {min(alone)} stands alone"
    has_other_scores = m.moe_router_score_function == "sigmoid" and m.moe_router_topk > 1
    for flag, is_on, reason in (
        ("--moe-expert-capacity-factor", m.moe_expert_capacity_factor is not None, ""),
        ("--moe-router-force-load-balancing", m.moe_router_force_load_balancing, ""),
        ("--moe-router-num-groups", m.moe_router_num_groups is not None, ": it chooses among all"),
        (
            "--moe-router-enable-expert-bias",
            m.moe_router_enable_expert_bias,
            ": it balances the load by itself",
        ),
        (
            "--moe-router-topk-scaling-factor",
            m.moe_router_topk_scaling_factor is not None,
            ": it weighs by plain scores",
        ),
        (
            "--moe-router-score-function sigmoid",
            has_other_scores,
            f": with --moe-router-topk {m.moe_router_topk} it weighs by a softmax",
        ),
    ):
        if is_on and "sinkhorn" in kinds:
            yield f"{flag} and --moe-router-load-balancing-type sinkhorn exclude each other{reason}"


def dispatcher_suits_the_load(run: RunConfig) -> Iterator[str]:
    """Refuse options that the token dispatcher does not support."""
    m = run.model
    if m.num_moe_experts is None:
        return
    if m.moe_enable_deepep and m.moe_token_dispatcher_type != "flex":
        yield "--moe-enable-deepep needs --moe-token-dispatcher-type flex"
    if m.moe_enable_deepep and m.moe_shared_expert_overlap:
        yield (
            "--moe-enable-deepep and --moe-shared-expert-overlap exclude each other: keep the "
            "first for DeepEP's fused dispatch, the second to compute shared experts during the "
            "all-to-all of --moe-token-dispatcher-type alltoall"
        )
    if m.moe_shared_expert_overlap and m.moe_token_dispatcher_type == "allgather":
        yield (
            "--moe-shared-expert-overlap needs --moe-token-dispatcher-type alltoall or flex: "
            "allgather has no all-to-all to overlap"
        )
    if m.moe_pad_expert_input_to_capacity and m.moe_expert_capacity_factor is None:
        yield "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor"


def tokens_can_travel_beside_work(run: RunConfig) -> Iterator[str]:
    """Refuse --overlap-moe-expert-parallel-comm where it cannot work.

    It interleaves two passes at each all-to-all, so there must be an all-to-all, and a pass must be
    able to stop inside a layer, which it cannot while the layer is recomputed.
    """
    m, flag = run.model, "--overlap-moe-expert-parallel-comm"
    if not m.overlap_moe_expert_parallel_comm:
        return
    if m.num_moe_experts is None or m.expert_model_parallel_size < 2:
        yield (
            f"{flag} needs --expert-model-parallel-size above 1: with 1 there is no all-to-all to "
            "overlap"
        )
    if m.moe_token_dispatcher_type == "allgather":
        yield f"{flag} needs --moe-token-dispatcher-type alltoall or flex, not allgather"
    if m.recompute_granularity in ("full", "adaptive") or "moe" in m.modules_to_recompute:
        yield (
            f"{flag} does not support recomputing complete MoE layers: use --recompute-granularity "
            "selective with --recompute-modules core_attn or moe_act"
        )
    if (m.pipeline_schedule or "").startswith("zb"):
        yield (
            f"{flag} and --pipeline-schedule {m.pipeline_schedule} exclude each other: keep the "
            "first, with the default schedule, to hide the all-to-all, the second for a smaller "
            "pipeline bubble"
        )
    if is_fully_sharded(run.ddp):
        yield (
            f"{flag} and fully sharded parameters exclude each other: a layer is gathered for one "
            "pass at a time; use --use-distributed-optimizer"
        )
    if run.distributed.virtual_ranks is not None:
        ranks = run.distributed.virtual_ranks
        yield f"{flag} needs one process per rank: use torchrun instead of --virtual-ranks {ranks}"
    for other, is_given, purpose in (
        ("--mtp-num-layers", m.mtp_num_layers is not None, "for multi-token prediction"),
        (
            "--defer-embedding-wgrad-compute",
            m.defer_embedding_wgrad_compute,
            "to defer the embedding's weight gradient alone",
        ),
    ):
        if m.delay_wgrad_compute and is_given:
            yield (
                f"--delay-wgrad-compute and {other} exclude each other: keep the first to overlap "
                f"weight gradients with the all-to-all, the second {purpose}"
            )


def experts_can_be_made_of_an_mlp(run: RunConfig) -> Iterator[str]:
    """Check that upcycling is possible.

    The weighted outputs of a token's experts must add up to the output of the dense MLP.
    """
    m, c = run.model, run.checkpoint
    flag, parts = "--moe-use-upcycling", c.moe_upcycling_granularity
    if not c.moe_use_upcycling:
        return
    for needed, is_there in (
        ("--num-experts", m.num_moe_experts is not None),
        ("--load: the dense checkpoint", c.load is not None),
        ("--save: where the model with experts goes", c.save is not None),
    ):
        if not is_there:
            yield f"{flag} needs {needed}"
    is_sigmoid, k = m.moe_router_score_function == "sigmoid", m.moe_router_topk
    even = m.moe_router_load_balancing_type == ("sinkhorn",)
    if even or (k == 1 if is_sigmoid else m.moe_router_pre_softmax):
        yield (
            f"{flag}: the weights of a token's experts would not add up to 1; use "
            "--moe-router-topk 2 or more with sigmoid scores, or with softmax scores without "
            "--moe-router-pre-softmax, and another load balancing than sinkhorn"
        )
    width, dense = m.moe_ffn_hidden_size or 0, m.ffn_hidden_size
    if parts > 0 and m.num_moe_experts is not None:
        for name, value in (("--moe-router-topk", k), ("--num-experts", m.num_moe_experts)):
            if value % parts:
                yield f"{name} {value} is not a multiple of --moe-upcycling-granularity {parts}"
        if width * parts != dense:
            yield (
                f"{flag} makes {parts} experts of an MLP: --moe-ffn-hidden-size {width} x {parts} "
                f"is not --ffn-hidden-size {dense}"
            )
    if parts > 1 and is_fully_sharded(run.ddp):
        yield (
            f"--moe-upcycling-granularity {parts} does not support fully sharded parameters: "
            "upcycle and save with --use-distributed-optimizer, then load that checkpoint"
        )
