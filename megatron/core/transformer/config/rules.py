"""Rules about the fields of TransformerConfig; the command line evaluates RULES too."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from megatron.core.config.rule import first_of, given, rules, where
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.plan import wrong_chunks
from megatron.core.transformer.config.attention import KDA, LINEAR_VARIANTS, SPARSE_VARIANT
from megatron.core.transformer.config.memory_rules import MEMORY_RULES, OFFLOADS
from megatron.core.transformer.layer_layout import (
    has_explicit_layout,
    has_linear_attention,
    indexer_of_layer,
    layer_ranges,
    layout_problems,
)

# ---- architecture --------------------------------------------------------------------------------


def _find_wrong_yarn(c: Any) -> str:
    """Return the betas of YaRN, which interpolates between fast and slow pairs of channels."""
    fast = 32.0 if c.yarn_beta_fast is None else c.yarn_beta_fast
    slow = 1.0 if c.yarn_beta_slow is None else c.yarn_beta_slow
    return "" if fast >= slow > 0 else f"--yarn-beta-fast {fast} and --yarn-beta-slow {slow}"


_ARCHITECTURE = rules(
    {
        "{--num-query-groups} does not divide "
        "{--num-attention-heads}: use a divisor of it": lambda c: (
            c.num_query_groups != c.num_attention_heads
            and (c.num_query_groups < 1 or c.num_attention_heads % c.num_query_groups)
        ),
        "{found}: a number greater than 0 is needed": given(
            "--activation-func-clamp-value", lambda clamp: clamp <= 0
        ),
        "{found}: a probability from 0 up to, but not including, 1 is needed": given(
            "--attention-dropout --hidden-dropout", lambda p: not 0 <= p < 1
        ),
        "{found}: use a cap greater than 0; the default is no cap": given(
            "--attn-logit-softcapping --final-logit-softcapping", lambda cap: cap <= 0
        ),
        "--qk-l2-norm and --multi-latent-attention exclude each other: use --qk-layernorm, which "
        "normalizes the latent vectors": None,
        "--window-size {window_size[0]},{window_size[1]}: sides are counts of tokens, or -1 for "
        "no limit": lambda c: c.window_size is not None and min(c.window_size) < -1,
        "--window-attn-skip-freq needs --window-size": None,
        "--qk-layernorm-after-rope needs --qk-layernorm: add it": None,
        "--qk-layernorm-after-rope and --multi-latent-attention exclude each other: its norms are "
        "those of latent vectors, which are not rotated": None,
        "{found} and --num-layers is {num_layers}: they must agree": lambda c: [
            f"{flag} has {len(pattern)} entries"
            for flag in ("--window-attn-skip-freq", "--no-rope-freq")
            if isinstance(pattern := c.value(flag), tuple | list)
            and c.num_layers
            and len(pattern) != c.num_layers
        ],
        "{found}: at least 1 is needed": given(
            "--window-attn-skip-freq --no-rope-freq --moe-layer-freq",
            lambda n: isinstance(n, int) and n < 1,
        ),
        "--apply-residual-connection-post-layernorm needs a norm at the input of a sublayer, and "
        "{--layer-norm-placement}": lambda c: (
            c.apply_residual_connection_post_layernorm and "post" in c.layer_norm_placement
        ),
        "--layer-norm-placement post_softmax differs from post in layers of linear attention "
        "only: give --experimental-attention-variant, or use post": lambda c: (
            c.layer_norm_placement == "post_softmax" and not c.experimental_attention_variant
        ),
        "{found}: make the first the larger one": _find_wrong_yarn,
    },
    where(
        "--enable-mhc-connections",
        {
            "--enable-mhc-connections and {found} exclude each other: several residual streams "
            "have no counterpart in it; drop one of the flags": (
                "--apply-residual-connection-post-layernorm --heterogeneous-layers-config-path "
                "--mtp-num-layers --batch-invariant-mode"
            ),
            "--mhc-recompute-layer-num and {found} exclude each other: both change what a layer "
            "saves; keep one": lambda c: (
                c.mhc_recompute_layer_num is not None
                and (
                    "--enable-cuda-graph"
                    if c.uses_graphs
                    else given(f"{OFFLOADS} --recompute-granularity full")(c)
                )
            ),
        },
    ),
    where(
        "--multi-latent-attention",
        {
            "--rotary-interleaved and --multi-latent-attention exclude each other: use "
            "--multi-latent-attention alone, which always rotates neighbouring channels": None,
            "{found} is odd: channels rotate in pairs; use an even number": given(
                "--qk-pos-emb-head-dim", lambda width: width % 2
            ),
            "{--v-head-dim} is greater than --qk-head-dim plus --qk-pos-emb-head-dim, {found}: "
            "lower it": lambda c: (
                c.v_head_dim > (width := c.qk_head_dim + c.qk_pos_emb_head_dim) and f"{width}"
            ),
        },
    ),
    where(
        "--use-mup",
        {
            "--use-mup and {found} exclude each other: the scaling of its weights with the width "
            "is not defined; keep one": (
                "--multi-latent-attention --init-method-xavier-uniform "
                "--experimental-attention-variant --heterogeneous-layers-config-path"
            ),
            "{found}: a number greater than 0 is needed": given(
                "--mup-base-head-dim --mup-embedding-mult --mup-output-mult", lambda size: size <= 0
            ),
        },
    ),
    where(
        "--qk-clip",
        {
            "--qk-clip and {found} exclude each other: attention logits then do not follow the "
            "scale of query and key weights; keep one": lambda c: given(
                "--qk-l2-norm --attn-logit-softcapping"
                + ("" if c.multi_latent_attention else " --qk-layernorm")
            )(c),
            "--qk-clip and --enable-cuda-graph exclude each other: a captured graph does not "
            "record the largest logits anew in each step; keep one": lambda c: c.uses_graphs,
            "{found}: a number greater than 0 is needed": given(
                "--qk-clip-threshold", lambda threshold: threshold <= 0
            ),
            "{found}: a number from 0 to 1 is needed": given(
                "--qk-clip-alpha", lambda alpha: not 0 <= alpha <= 1
            ),
        },
    ),
    where(
        "--batch-invariant-mode",
        {
            "{found}: --batch-invariant-mode computes values that do not depend on a random mask; "
            "use 0": given("--attention-dropout --hidden-dropout", lambda p: p > 0),
            "{--context-parallel-size}: ranks that share a sequence add in an order of their own; "
            "use 1, or leave --batch-invariant-mode out": lambda c: c.context_parallel_size > 1,
            "--batch-invariant-mode: scales of --{found} depend on all rows; leave one out": (
                lambda c: c.is_quantized and c.format_flag
            ),
            "--batch-invariant-mode and --cache-mla-latents exclude each other: training does not "
            "absorb its weights as generation from latents does; leave one out": None,
        },
    ),
    where(
        "--require-transformer-engine",
        first_of(
            {
                "--require-transformer-engine and --transformer-impl local exclude each other: "
                "keep the first for Transformer Engine's layers, the second for PyTorch's": None,
                "--require-transformer-engine: {found}; keep --require-transformer-engine for "
                "Transformer Engine's "
                "GEMMs, or the other flag, which runs without it": lambda c: c.why_own_matrices,
            },
        ),
    ),
)

# ---- linear and sparse attention -----------------------------------------------------------------

_LINEAR_ATTENTION = rules(
    {
        "--attention-output-gate and --multi-latent-attention exclude each other: the gate is a "
        "part of the QKV projection; drop one of them": None,
    },
    where(
        lambda c: c.experimental_attention_variant in LINEAR_VARIANTS,
        {
            "{--linear-num-value-heads} is not a multiple of {--linear-num-key-heads}: each key "
            "head serves the same number of value heads": lambda c: (
                c.linear_num_value_heads % c.linear_num_key_heads
            ),
            "{--linear-num-key-heads} cannot be split over {--tensor-model-parallel-size}: use a "
            "tensor-parallel size that divides {linear_num_key_heads}": lambda c: (
                c.tensor_model_parallel_size >= 1
                and c.linear_num_key_heads % c.tensor_model_parallel_size
            ),
            "--linear-attention-freq {found[0]} has {found[1]} entries for {--num-layers}: give "
            "a 0 or 1 for each layer": lambda c: (
                isinstance(freq := c.linear_attention_freq, tuple | list)
                and (len(freq) != c.num_layers or {*freq} - {0, 1})
                and (list(freq), len(freq))
            ),
            "{found}: at least 1 is needed": given(
                "--linear-attention-freq", lambda n: isinstance(n, int) and n < 1
            ),
            "--experimental-attention-variant and {found} exclude each other: keep the first for "
            "layers of linear attention": "--heterogeneous-layers-config-path",
            "{--mtp-num-layers}: layers of multi-token prediction are like the last one, which "
            "has linear attention; give a --linear-attention-freq that ends with softmax "
            "attention": lambda c: (
                c.mtp_num_layers
                and c.num_layers
                and has_linear_attention(c.model, c.num_layers - 1)
            ),
            "{--fp8-format}: the input projection of linear attention has {found} rows on each "
            "tensor-parallel rank, not a multiple of 16; change --linear-num-value-heads": (
                lambda c: c.fp8 is not None and (rows := _rows_of_linear_attention(c)) % 16 and rows
            ),
        },
    ),
)


def _find_stages_without_selection(c: Any) -> list[int]:
    """Return the first layers of stages, from 1, whose keys a layer of another stage selects."""
    ranks = c.pipeline_model_parallel_size
    if c.pipeline_split == "auto" or not c.num_layers or ranks < 1:
        return []
    if [*layout_problems(c.model, ranks)]:
        return []
    starts = [layers.start for layers in layer_ranges(c.model, ranks) if layers]
    return [start + 1 for start in starts if start > indexer_of_layer(c.model, start) >= 0]


_SPARSE_ATTENTION = where(
    lambda c: c.experimental_attention_variant == SPARSE_VARIANT,
    {
        "--experimental-attention-variant dsa selects keys of latent attention: add "
        "--multi-latent-attention": lambda c: not c.multi_latent_attention,
        "{found} and --experimental-attention-variant dsa exclude each other: sparse attention "
        "does not support it; drop one of them": given(
            "--qk-clip --attn-logit-softcapping --window-size --softmax-type off-by-one learnable "
            "--heterogeneous-layers-config-path --batch-invariant-mode --enable-cuda-graph"
        ),
        "--cp-comm-type {found}: sparse attention gathers keys over context-parallel ranks; use "
        "allgather": lambda c: (
            c.context_parallel_size > 1 and ",".join({"a2a", "a2a+p2p"} & {*c.cp_comm_types})
        ),
        "{--dsa-indexer-head-dim} is below {--qk-pos-emb-head-dim}, whose channels the indexer "
        "rotates: raise it": lambda c: c.dsa_indexer_head_dim < c.qk_pos_emb_head_dim,
        "{--dsa-indexer-topk-freq} and {--dsa-indexer-skip-topk-offset}: the first layer needs an "
        "indexer of its own; use an offset of at least 1": lambda c: (
            c.dsa_indexer_topk_freq > 1 and c.dsa_indexer_skip_topk_offset < 1
        ),
        "{--dsa-indexer-topk-freq} and --pipeline-split auto exclude each other: a stage may begin "
        "with a layer whose keys another stage selects; give the layers of the stages": lambda c: (
            c.dsa_indexer_topk_freq > 1 and c.pipeline_split == "auto"
        ),
        "{--dsa-indexer-topk-freq}: layers {found} begin a pipeline stage, and a layer of another "
        "stage selects their keys: change --dsa-indexer-skip-topk-offset or the split of the "
        "layers": lambda c: (
            c.dsa_indexer_topk_freq > 1 and ", ".join(map(str, _find_stages_without_selection(c)))
        ),
        "{--mtp-num-layers}: layers of multi-token prediction are like the last one, whose keys "
        "another layer selects (--dsa-indexer-topk-freq): change "
        "--dsa-indexer-skip-topk-offset": lambda c: (
            c.mtp_num_layers
            and c.num_layers
            and indexer_of_layer(c.model, c.num_layers - 1) < c.num_layers - 1
        ),
    },
)


def _rows_of_linear_attention(c: Any) -> int:
    keys = c.linear_num_key_heads * c.linear_key_head_dim
    values = c.linear_num_value_heads * c.linear_value_head_dim
    rows = 2 * (keys + values + c.linear_num_value_heads)
    if c.experimental_attention_variant == KDA:  # latents of the gates
        narrow = c.linear_key_head_dim + c.linear_value_head_dim
        rows = 2 * keys + values + c.linear_num_value_heads + narrow
    return int(rows // max(1, c.tensor_model_parallel_size))


# ---- parallelism ---------------------------------------------------------------------------------


def _find_undivided_all_to_all(c: Any) -> list[tuple[str, int, int]]:
    """Return type, heads and ranks of the all-to-alls that cannot divide the heads.

    Key/value heads are repeated to fit, so only query heads matter.
    """
    heads, rest = divmod(c.num_attention_heads, c.tensor_model_parallel_size)
    ring_levels = c.hierarchical_context_parallel_sizes or (c.context_parallel_size,)
    ranks = {"a2a": c.context_parallel_size, "a2a+p2p": ring_levels[0]}
    return [
        (name, heads, count)
        for name, count in ranks.items()
        if not rest and name in c.cp_comm_types and count >= 1 and heads % count
    ]


_PARALLEL = rules(
    where(
        lambda c: c.tensor_model_parallel_size >= 1 and c.has_attention,
        {
            "{--num-attention-heads} cannot be split over {--tensor-model-parallel-size}: use a "
            "tensor-parallel size that divides {num_attention_heads}": lambda c: (
                c.num_attention_heads % c.tensor_model_parallel_size
            ),
            "{--num-query-groups} cannot be split over {--tensor-model-parallel-size}: use a "
            "tensor-parallel size that divides {num_query_groups}": lambda c: (
                c.num_query_groups != c.num_attention_heads
                and c.num_query_groups % c.tensor_model_parallel_size
            ),
        },
    ),
    where(
        lambda c: c.context_parallel_size > 1 and c.tensor_model_parallel_size >= 1,
        {
            "--cp-comm-type {found[0]} cannot split {found[1]} heads ({--num-attention-heads} "
            "over {--tensor-model-parallel-size}) over {found[2]} ranks: use p2p or allgather, or "
            "a2a+p2p with a first "
            "--hierarchical-context-parallel-sizes that divides them": _find_undivided_all_to_all,
        },
    ),
    {
        "--cp-comm-type has {found} and --num-layers is {num_layers}: give one for all layers, or "
        "one for each": lambda c: (
            len(c.cp_comm_types) not in (1, c.num_layers) and f"{len(c.cp_comm_types)} entries"
        ),
    },
    where(
        lambda c: c.num_layers and c.pipeline_model_parallel_size >= 1 and c.has_one_stack,
        {
            "{found}": lambda c: (
                list(layout_problems(c.model, c.pipeline_model_parallel_size))
                if has_explicit_layout(c.model)
                else ()
            ),
        },
    ),
    where(
        lambda c: c.pipeline_model_parallel_size > 1,
        {
            "{found}": lambda c: (
                c.pipeline_schedule is not None
                and wrong_chunks(c.pipeline_schedule, c.virtual_pipeline_model_parallel_size or 1)
            ),
        },
    ),
)

# ---- experts -------------------------------------------------------------------------------------


def _group_size(c: Any) -> int:
    return int(c.num_moe_experts // c.moe_router_num_groups)


_SIZES_OF_EXPERTS = rules(
    where(
        lambda c: c.num_moe_experts is None,
        {
            "{--expert-model-parallel-size} needs --num-experts: a dense model has no experts to "
            "split over ranks": lambda c: c.expert_model_parallel_size > 1,
        },
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
            "--moe-layer-freq {found[0]} has {found[1]} entries for {--num-layers}: give a 0 or 1 "
            "for each layer": lambda c: (
                isinstance(c.moe_layer_freq, tuple | list)
                and (len(c.moe_layer_freq) != c.num_layers or {*c.moe_layer_freq} - {0, 1})
                and (list(c.moe_layer_freq), len(c.moe_layer_freq))
            ),
        },
    ),
)

_ROUTER = where(
    "--num-experts",
    {
        "{--moe-router-topk} is not between 1 and {--num-experts}": lambda c: (
            not 1 <= c.moe_router_topk <= c.num_moe_experts
        ),
        "--moe-router-topk 1 needs --moe-router-pre-softmax: the softmax over one expert is always "
        "1, so the router would have no gradient": lambda c: (
            c.moe_router_score_function == "softmax"
            and c.moe_router_topk == 1
            and not c.moe_router_pre_softmax
            and c.load_balancing_types != ("sinkhorn",)
        ),
        "--moe-apply-probs-on-input needs --moe-router-topk 1, not {moe_router_topk}": lambda c: (
            c.moe_apply_probs_on_input and c.moe_router_topk != 1
        ),
        "{--moe-num-hash-layers} of {--num-layers}: lower it": lambda c: (
            c.num_layers and c.moe_num_hash_layers > c.num_layers
        ),
        "--moe-num-hash-layers and {found} exclude each other: the first chooses experts by token "
        "id; drop one of them": lambda c: (
            c.moe_num_hash_layers
            and (
                "--moe-router-load-balancing-type sinkhorn"
                if "sinkhorn" in c.load_balancing_types
                else given(
                    "--moe-router-force-load-balancing --moe-router-fusion "
                    "--moe-enable-routing-replay"
                )(c)
            )
        ),
        "{--mtp-num-layers}: layers of multi-token prediction are like the last one, which routes "
        "by token id; lower --moe-num-hash-layers": lambda c: (
            c.mtp_num_layers and c.num_layers and c.moe_num_hash_layers == c.num_layers
        ),
        "{found}: at least 1 is needed": given(
            "--moe-shared-expert-intermediate-size --moe-latent-size", lambda width: width < 1
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
            "{--moe-router-score-function} and --moe-router-load-balancing-type sinkhorn "
            "exclude each other: with {--moe-router-topk} it weighs by a softmax": lambda c: (
                c.moe_router_score_function != "softmax" and c.moe_router_topk > 1
            ),
            "{--moe-router-score-function} and --moe-router-load-balancing-type sinkhorn exclude "
            "each other: with --moe-router-topk 1 it weighs by a sigmoid": lambda c: (
                c.moe_router_score_function == "sqrtsoftplus" and c.moe_router_topk == 1
            ),
        },
    ),
)

_DISPATCHER = where(
    "--num-experts",
    {
        "--moe-enable-deepep needs --moe-token-dispatcher-type flex": None,
        "--moe-shared-expert-overlap needs --moe-token-dispatcher-type alltoall or flex: allgather "
        "has no all-to-all to overlap": lambda c: (
            c.moe_shared_expert_overlap and c.moe_token_dispatcher_type == "allgather"
        ),
        "--moe-enable-deepep and --moe-shared-expert-overlap exclude each other: keep the first "
        "for DeepEP's fused dispatch, the second to compute shared experts during the all-to-all "
        "of --moe-token-dispatcher-type alltoall": None,
        "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor": None,
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

# ---- execution and precision ---------------------------------------------------------------------

_GRAPHS = rules(
    {
        "--enable-cuda-graph and --external-cuda-graph enable "
        "the same CUDA graphs: keep one": lambda c: c.enable_cuda_graph and c.external_cuda_graph,
        "{--cuda-graph-warmup-steps}: use 1 or more; communicators are created and kernels chosen "
        "in steps that run eagerly": lambda c: c.uses_graphs and c.cuda_graph_warmup_steps < 1,
    },
)

_PRECISION = rules(
    {
        "--bf16 and --fp16 exclude each other: keep --bf16 on hardware with bf16 matmuls, --fp16, "
        "with its loss scaling, on older GPUs": None,
        "--fp8-format and --fp4-format exclude each other: keep --fp8-format for the smaller "
        "rounding error, --fp4-format for the smaller operands": None,
    },
    where(
        lambda c: c.is_quantized,
        {
            "{--num-layers-at-start-in-bf16} and {--num-layers-at-end-in-bf16} leave none of "
            "{--num-layers} to --{format_flag}: lower them": lambda c: (
                c.first_last_layers_bf16
                and c.num_layers_at_start_in_bf16 + c.num_layers_at_end_in_bf16 >= c.num_layers
            ),
        },
    ),
)

RULES = rules(
    [*ModelParallelConfig.RULES],
    _ARCHITECTURE,
    _LINEAR_ATTENTION,
    _SPARSE_ATTENTION,
    _PARALLEL,
    _SIZES_OF_EXPERTS,
    _ROUTER,
    _BALANCING,
    _DISPATCHER,
    _OVERLAP,
    [*MEMORY_RULES],
    _GRAPHS,
    _PRECISION,
)

# ---- values that a command line derives or drops with a warning ----------------------------------

LIBRARY_RULES = rules(
    [*ModelParallelConfig.LIBRARY_RULES],
    {
        "--num-attention-heads 0: give the number of heads, or --kv-channels": lambda c: (
            not c.num_attention_heads and c.kv_channels is None
        ),
        "--num-experts 0: use None for a dense model": lambda c: c.num_moe_experts == 0,
        "--num-experts with --tensor-model-parallel-size and --expert-model-parallel-size above 1 "
        "needs --sequence-parallel": lambda c: (
            c.expert_model_parallel_size > 1
            and c.tensor_model_parallel_size > 1
            and not c.sequence_parallel
        ),
        "--moe-token-dispatcher-type allgather and variable_seq_lengths exclude each other: use "
        "alltoall": lambda c: (
            c.num_moe_experts
            and c.moe_token_dispatcher_type == "allgather"
            and c.variable_seq_lengths
        ),
        "{found}: use full": "--recompute-granularity adaptive",
        "--fp8-param-gather needs --fp8-format": None,
        "--enable-cuda-graph and {found} exclude each other: recomputation runs layers again in "
        "backward": lambda c: c.uses_graphs and given("--recompute-granularity")(c),
        "bias_activation_fusion needs activation_func gelu, with biases, or silu": lambda c: (
            c.bias_activation_fusion
            and c.activation_func is not F.silu
            and not (c.activation_func is F.gelu and (c.gated_linear_unit or c.add_bias_linear))
        ),
    },
    where(
        lambda c: c.num_moe_experts is None,
        {"{found} needs --num-experts": "--moe-ffn-hidden-size"},
    ),
)
