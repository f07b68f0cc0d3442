"""Rules about CUDA graphs: Python does not run again what stands inside one."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.distributed.sharding import is_fully_sharded
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
    if m.cuda_graph_scope == "full_iteration":
        yield (
            "--cuda-graph-scope full_iteration: schedule and optimizer are run by Python; use full"
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
