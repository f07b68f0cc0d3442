"""Rules about CUDA graphs: Python does not run again what stands inside one."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.distributed.sharding import is_fully_sharded
from megatron.training.arguments.model_layers import kind_of
from megatron.training.config.run import RunConfig


def graphs_hold_what_needs_no_python(run: RunConfig) -> Iterator[str]:
    """What Python decides, counts or keeps for each micro-batch cannot be replayed."""
    m = run.model
    if not m.uses_graphs:
        return
    drop = "; drop --enable-cuda-graph or it"
    if m.enable_cuda_graph and m.external_cuda_graph:
        yield "--enable-cuda-graph and --external-cuda-graph do the same here: drop one of them"
    if m.cuda_graph_warmup_steps < 1:
        yield (
            f"--cuda-graph-warmup-steps {m.cuda_graph_warmup_steps}: at least 1 eager step is "
            "needed, in which communicators are made and kernels chosen"
        )
    if m.recompute_granularity is not None:
        yield (
            f"--enable-cuda-graph and --recompute-granularity {m.recompute_granularity}: what is "
            f"computed again is put together by Python in backward{drop}"
        )
    if m.num_moe_experts is not None and m.cuda_graph_scope != "attn":
        yield (
            "--enable-cuda-graph with --num-experts: how many tokens an expert gets is known to "
            "Python alone; use --cuda-graph-scope attn"
        )
    for flag, value in (("--fp8-format", m.fp8), ("--fp4-format", m.fp4)):
        if value is not None:
            yield (
                f"--enable-cuda-graph and {flag} {value}: Python renews scales and the codes of "
                f"weights once a step{drop}"
            )


def graphs_fit_the_layout(run: RunConfig) -> Iterator[str]:
    """Weights stay where they are, and all gradients of a layer come at once."""
    m = run.model
    if not m.uses_graphs:
        return
    drop = "; drop --enable-cuda-graph or it"
    if is_fully_sharded(run.ddp):
        yield (
            "--enable-cuda-graph with sharded parameters: each gather puts them elsewhere; use "
            "--use-distributed-optimizer"
        )
    if str(m.pipeline_schedule).startswith("zb"):
        yield (
            f"--enable-cuda-graph and --pipeline-schedule {m.pipeline_schedule}, which computes "
            f"weight gradients apart{drop}"
        )
    if m.overlap_moe_expert_parallel_comm:
        yield (
            "--enable-cuda-graph and --overlap-moe-expert-parallel-comm, which lets two "
            f"micro-batches take turns inside a layer{drop}"
        )
    if run.language_model.model_kind == "mamba":
        yield "--enable-cuda-graph is not for Mamba and hybrid models: drop it"
    if run.distributed.virtual_ranks is not None:
        yield "--enable-cuda-graph and --virtual-ranks: ranks here are threads on a CPU; drop one"


def a_step_in_one_graph_asks_nothing(run: RunConfig) -> Iterator[str]:
    """Inside a step neither numbers are looked at nor is anything told to the device anew."""
    m = run.model
    if not m.uses_graphs or m.records_layers:
        return
    for words, is_in_the_way in (
        ("--pipeline-model-parallel-size above 1", m.pipeline_model_parallel_size > 1),
        ("--mtp-num-layers", m.mtp_num_layers is not None),
        ("--model-kind bert", kind_of(run) == "bert"),
    ):
        if is_in_the_way:
            yield (
                f"--cuda-graph-scope full_iteration is not for {words}: use --cuda-graph-scope full"
            )
    for words, is_in_the_way, cure in (
        (
            "the check for NaN",
            run.ddp.check_for_nan_in_grad,
            "give --no-check-for-nan-in-loss-and-grad",
        ),
        (
            "a loss scale that adapts",
            m.fp16 and run.optimizer.loss_scale is None,
            "give --bf16 or --loss-scale",
        ),
        ("--timing-log-level above 0", run.logging.timing_log_level > 0, "give 0"),
        ("--log-straggler", run.resilience.log_straggler, "drop it"),
    ):
        if is_in_the_way:
            yield (
                f"--cuda-graph-scope full_iteration and {words}: Python would wait inside a step; "
                f"{cure}"
            )
