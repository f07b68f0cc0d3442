"""Rules about recomputation, offloading, compilation, CUDA graphs, and the order of sums."""

from __future__ import annotations

from megatron.training.arguments.rules.rule import Rule, given, where

_MODULES = ("core_attn", "mlp", "layernorm", "moe", "moe_act", "shared_experts", "mla_up_proj")
_MODULE_NEEDS = {
    "moe": "--num-experts",
    "moe_act": "--num-experts",
    "shared_experts": "--moe-shared-expert-intermediate-size",
    "mla_up_proj": "--multi-latent-attention",
}

_RECOMPUTATION = (
    *where(
        "--recompute-granularity full",
        Rule(
            "--recompute-granularity full needs --recompute-method uniform or block",
            lambda c: c.recompute_method is None,
        ),
        Rule(
            "--recompute-granularity full needs --recompute-num-layers",
        ),
    ),
    *where(
        lambda c: c.recompute_granularity != "full",
        Rule(
            "{found} needs --recompute-granularity full",
            "--recompute-method --recompute-num-layers",
        ),
    ),
    Rule(
        "--recompute-modules {found[0]} needs {found[1]}: add it; core_attn and layernorm are in "
        "every transformer layer",
        lambda c: [
            (module, flag)
            for module, flag in _MODULE_NEEDS.items()
            if module in (c.recompute_modules or ()) and not given(flag)(c)
        ],
    ),
    Rule(
        f"--recompute-modules {{found}}: use {', '.join(_MODULES)}",
        lambda c: " ".join(name for name in c.recompute_modules or () if name not in _MODULES),
    ),
    Rule(
        f"--recompute-modules names no module: give some of {', '.join(_MODULES)}",
        lambda c: c.recompute_modules == (),
    ),
    Rule(
        "--recompute-modules needs --recompute-granularity selective",
    ),
    *where(
        "--distribute-saved-activations",
        Rule(
            "--distribute-saved-activations needs --tensor-model-parallel-size greater than 1 and "
            "--recompute-granularity full",
            lambda c: c.tensor_model_parallel_size == 1 or c.recompute_granularity != "full",
        ),
        Rule(
            "--distribute-saved-activations and --sequence-parallel exclude each other: keep "
            "--sequence-parallel, which already shards hidden states over the same ranks",
        ),
    ),
    Rule(
        "{found}: use a share greater than 0 and at most 1",
        given("--memory-budget-fraction", lambda share: not 0 < share <= 1),
    ),
    Rule(  # the chunks of the logits are freed before that gradient would be computed
        "{--loss-chunk-size} and --defer-embedding-wgrad-compute exclude each other: keep the "
        "first to save the memory of the logits, the second to defer the output layer's weight "
        "gradient into the pipeline bubble",
        lambda c: c.loss_chunk_size and c.defer_embedding_wgrad_compute,
    ),
)

_OFFLOADING = where(
    "--cpu-offloading",
    Rule(  # backward needs the last layers right away
        "{--cpu-offloading-num-layers} of {--num-layers}: with --cpu-offloading use 1 or more, but "
        "not all layers",
        lambda c: not 0 < c.cpu_offloading_num_layers < max(2, c.num_layers),
    ),
    *(
        Rule(
            f"--cpu-offloading and {other} exclude each other: keep the first to move activations "
            f"to host memory, the second {purpose}",
            breach,
        )
        for other, breach, purpose in (
            (
                "{--recompute-granularity}",
                given("--recompute-granularity"),
                "to compute them again in backward",
            ),
            ("--enable-cuda-graph", lambda c: c.uses_graphs, "to reduce launch overhead"),
            (
                "--overlap-moe-expert-parallel-comm",
                given("--overlap-moe-expert-parallel-comm"),
                "to overlap the experts' all-to-all",
            ),
            (
                "fully sharded parameters (FSDP)",
                lambda c: c.is_fully_sharded,
                "to shard parameters",
            ),
        )
    ),
)

_GRAPHS = (
    Rule(
        "--enable-cuda-graph and --external-cuda-graph enable the same CUDA graphs: keep one",
        lambda c: c.enable_cuda_graph and c.external_cuda_graph,
    ),
    Rule(
        "{--cuda-graph-warmup-steps}: use 1 or more; communicators are created and kernels chosen "
        "in steps that run eagerly",
        lambda c: c.uses_graphs and c.cuda_graph_warmup_steps < 1,
    ),
    # Checks of results make the host wait for each result, which capture does not allow.
    *where(
        lambda c: c.uses_graphs and not c.captures_layers,
        Rule(
            "{found}: a step that --cuda-graph-scope full_iteration captures validates no results; "
            "use --cuda-graph-scope full",
            lambda c: [
                *given("--check-for-spiky-loss --check-for-large-grads")(c),
                *given("--error-injection-rate", bool)(c),
                *given("--rerun-mode", lambda mode: mode == "report_stats")(c),
            ],
        ),
        Rule(
            "--cuda-graph-scope full_iteration cannot check each loss for NaN inside the graph: "
            "give --no-check-for-nan-in-loss-and-grad, or use --cuda-graph-scope full",
            lambda c: c.check_for_nan_in_grad,
        ),
    ),
)

# The compiler traces plain arithmetic.  It does not support layers that draw random numbers, save
# tensors themselves, quantize or wait for communication.
_COMPILATION = where(
    lambda c: c.compile != "none",
    *(
        Rule(f"{{--compile}} does not support {words}", breach)
        for words, breach in (
            (
                "dropout: give --hidden-dropout 0 --attention-dropout 0",
                lambda c: c.hidden_dropout > 0 or c.attention_dropout > 0,
            ),
            (
                "{--recompute-granularity}: use --compile layer with --recompute-granularity full",
                lambda c: c.recompute_granularity not in (None, "full"),
            ),
            (
                "{--model-kind}: use pretrain_gpt.py, or train this model with --compile none",
                lambda c: not c.kind.supports_compile,
            ),
            ("{--num-experts}: use --compile none", given("--num-experts")),
            (
                "{--virtual-ranks}: use torchrun, with one process per rank",
                given("--virtual-ranks"),
            ),
            (
                "--{format_flag}: keep --compile for bf16 and fp32 GEMMs, or use --compile none "
                "for quantized ones",
                lambda c: c.is_quantized,
            ),
            (
                "fully sharded parameters: use --use-distributed-optimizer instead of FSDP",
                lambda c: c.is_fully_sharded,
            ),
            (
                "{--context-parallel-size}: for long sequences use --compile layer with "
                "--tensor-model-parallel-size and --sequence-parallel",
                lambda c: c.context_parallel_size > 1,
            ),
            (
                "--multi-latent-attention: use --compile none for it, or keep --compile with "
                "--group-query-attention",
                given("--multi-latent-attention"),
            ),
            (
                "--cpu-offloading: to save memory use --compile layer with --recompute-granularity "
                "full",
                given("--cpu-offloading"),
            ),
            (
                "CUDA graphs: keep --compile to fuse operations, or --enable-cuda-graph with "
                "--compile none to reduce launch overhead",
                lambda c: c.uses_graphs,
            ),
            (
                "{--pipeline-schedule}: use the default schedule, which is 1F1B, or interleaved "
                "with --num-virtual-stages-per-pipeline-rank",
                given("--pipeline-schedule"),
            ),
            (
                "--defer-embedding-wgrad-compute: use --compile none to defer weight gradients",
                given("--defer-embedding-wgrad-compute"),
            ),
        )
    ),
    Rule(  # operations between layers would be traced together with the layers
        "--compile model compiles all layers as one region and does not support "
        "--recompute-granularity full, --overlap-param-gather or tensor parallelism: use "
        "--compile layer",
        lambda c: (
            c.compile == "model"
            and (
                c.recompute_granularity == "full"
                or c.overlap_param_gather
                or c.tensor_model_parallel_size > 1
            )
        ),
    ),
)

_NO_KERNEL = "has no kernel that sums in a fixed order"
_READS_BATCH = "depends on all tokens of a batch"
_IS_RANDOM = "changes the log-probabilities at random"

_BATCH_INVARIANCE = where(
    "--batch-invariant-mode",
    *(
        Rule(f"--batch-invariant-mode: {{found}} {reason}; {fix}", given(flag, is_wrong))
        for flag, is_wrong, reason, fix in (
            ("--attention-dropout --hidden-dropout", bool, _IS_RANDOM, "use 0"),
            ("--fp16", bool, _NO_KERNEL, "use --bf16 or fp32"),
            ("--compile", lambda name: name != "none", "replaces its kernels", "use none"),
            ("--context-parallel-size", lambda size: size > 1, _NO_KERNEL, "use 1"),
            ("--cache-mla-latents", bool, "generates in another order", "leave it out"),
            (
                "--position-embedding-type",
                lambda name: name in ("alibi", "relative"),
                _NO_KERNEL,
                "use rope or learned_absolute",
            ),
            ("--reset-attention-mask", bool, _NO_KERNEL, "leave it out"),
            ("--loss-chunk-size", bool, "computes logits in another order", "use 0"),
            ("--moe-expert-capacity-factor", lambda _: True, _READS_BATCH, "leave it out"),
            ("--moe-input-jitter-eps", bool, _IS_RANDOM, "leave it out"),
            (
                "--moe-router-load-balancing-type",
                lambda names: names == ("sinkhorn",),
                _READS_BATCH,
                "use aux_loss",
            ),
            ("--moe-router-force-load-balancing", bool, _READS_BATCH, "leave it out"),
        )
    ),
    Rule(
        f"--batch-invariant-mode: --{{format_flag}} {_READS_BATCH}; leave it out",
        lambda c: c.is_quantized,
    ),
)

RULES = (*_RECOMPUTATION, *_OFFLOADING, *_GRAPHS, *_COMPILATION, *_BATCH_INVARIANCE)
