"""Rules about recomputation, offloading, compilation, CUDA graphs, and the order of sums."""

from __future__ import annotations

from megatron.training.arguments.rules.rule import given, rules, where

_MODULES = ("core_attn", "mlp", "layernorm", "moe", "moe_act", "shared_experts", "mla_up_proj")
_MODULE_NEEDS = {
    "moe": "--num-experts",
    "moe_act": "--num-experts",
    "shared_experts": "--moe-shared-expert-intermediate-size",
    "mla_up_proj": "--multi-latent-attention",
}

_RECOMPUTATION = rules(
    where(
        "--recompute-granularity full",
        {
            "--recompute-granularity full needs --recompute-method uniform or block": lambda c: (
                c.recompute_method is None
            ),
            "--recompute-granularity full needs --recompute-num-layers": None,
        },
    ),
    where(
        lambda c: c.recompute_granularity != "full",
        {
            "{found} needs --recompute-granularity full": (
                "--recompute-method --recompute-num-layers"
            ),
        },
    ),
    {
        "--recompute-modules {found[0]} needs {found[1]}: add it; core_attn and layernorm are in "
        "every transformer layer": lambda c: [
            (module, flag)
            for module, flag in _MODULE_NEEDS.items()
            if module in (c.recompute_modules or ()) and not given(flag)(c)
        ],
        f"--recompute-modules {{found}}: use {', '.join(_MODULES)}": lambda c: " ".join(
            name for name in c.recompute_modules or () if name not in _MODULES
        ),
        f"--recompute-modules names no module: give some of {', '.join(_MODULES)}": lambda c: (
            c.recompute_modules == ()
        ),
        "--recompute-modules needs --recompute-granularity selective": None,
    },
    where(
        "--distribute-saved-activations",
        {
            "--distribute-saved-activations needs --tensor-model-parallel-size greater than 1 and "
            "--recompute-granularity full": lambda c: (
                c.tensor_model_parallel_size == 1 or c.recompute_granularity != "full"
            ),
            "--distribute-saved-activations and --sequence-parallel exclude each other: keep "
            "--sequence-parallel, which already shards hidden states over the same ranks": None,
        },
    ),
    {
        # the chunks of the logits are freed before that gradient would be computed
        "{--loss-chunk-size} and --defer-embedding-wgrad-compute exclude each other: keep the "
        "first to save the memory of the logits, the second to defer the output layer's weight "
        "gradient into "
        "the pipeline bubble": lambda c: c.loss_chunk_size and c.defer_embedding_wgrad_compute,
    },
)

_OFFLOADING = where(
    "--cpu-offloading",
    {
        # backward needs the last layers right away
        "{--cpu-offloading-num-layers} of {--num-layers}: with --cpu-offloading use 1 or more, but "
        "not all layers": lambda c: not 0 < c.cpu_offloading_num_layers < max(2, c.num_layers),
        "--cpu-offloading and {--recompute-granularity} exclude each other: keep the first to move "
        "activations to host memory, the second to compute them again in backward": (
            "--recompute-granularity"
        ),
        "--cpu-offloading and --enable-cuda-graph exclude each other: keep the first to move "
        "activations to host memory, the second to reduce launch overhead": lambda c: c.uses_graphs,
        "--cpu-offloading and --overlap-moe-expert-parallel-comm exclude each other: keep the "
        "first to move activations to host memory, "
        "the second to overlap the experts' all-to-all": None,
        "--cpu-offloading and fully sharded parameters (FSDP) exclude each other: keep the first "
        "to move activations to host memory, the second to "
        "shard parameters": lambda c: c.is_fully_sharded,
    },
)

_GRAPHS = rules(
    {
        "--enable-cuda-graph and --external-cuda-graph enable "
        "the same CUDA graphs: keep one": lambda c: c.enable_cuda_graph and c.external_cuda_graph,
        "{--cuda-graph-warmup-steps}: use 1 or more; communicators are created and kernels chosen "
        "in steps that run eagerly": lambda c: c.uses_graphs and c.cuda_graph_warmup_steps < 1,
    },
    # Checks of results make the host wait for each result, which capture does not allow.
    where(
        lambda c: c.uses_graphs and not c.captures_layers,
        {
            "{found}: a step that --cuda-graph-scope full_iteration captures validates no "
            "results; use --cuda-graph-scope full": lambda c: [
                *given("--check-for-spiky-loss --check-for-large-grads")(c),
                *given("--error-injection-rate", bool)(c),
                *given("--rerun-mode", lambda mode: mode == "report_stats")(c),
            ],
            "--cuda-graph-scope full_iteration cannot check each loss for NaN inside the graph: "
            "give --no-check-for-nan-in-loss-and-grad, "
            "or use --cuda-graph-scope full": lambda c: c.check_for_nan_in_grad,
        },
    ),
)

RULES = rules(
    _RECOMPUTATION,
    _OFFLOADING,
    _GRAPHS,
)
