"""Decide which parts of a run CUDA graphs capture.

A graph cannot contain decisions of the host.  Parts that need them run eagerly, with the same
results, and one warning at the start reports it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron.core.distributed.sharding import is_fully_sharded
from megatron.training.models.registry import model_kind


def cuda_graph_capture(ns: Namespace) -> Iterator[str]:
    """Reduce the capture scope to what the run supports; yield a warning per reduction."""
    if ns.enable_cuda_graph == ns.external_cuda_graph:  # neither, or both, which is refused
        return
    flag = "--enable-cuda-graph" if ns.enable_cuda_graph else "--external-cuda-graph"
    reasons = [reason for reason, applies in _nothing_is_captured(ns) if applies]
    if reasons:
        ns.enable_cuda_graph = ns.external_cuda_graph = False
        yield f"{flag} is without effect, nothing is captured: {'; '.join(reasons)}"
        return
    reasons = [reason for reason, applies in _no_whole_step(ns) if applies]
    if ns.cuda_graph_scope == "full_iteration" and reasons:
        ns.cuda_graph_scope = "full"
        yield (
            "--cuda-graph-scope full_iteration: each layer is captured instead of the whole step: "
            f"{'; '.join(reasons)}"
        )
    if ns.cuda_graph_scope == "full" and ns.num_experts:
        yield (
            f"{flag}: only attention is captured in layers with experts, whose token counts "
            "the host has to know"
        )


def _nothing_is_captured(ns: Namespace) -> Iterator[tuple[str, bool]]:
    recomputation = f"--recompute-granularity {ns.recompute_granularity} re-runs layers in backward"
    yield recomputation, ns.recompute_granularity is not None
    for name, low_precision in (("--fp8-format", ns.fp8), ("--fp4-format", ns.fp4)):
        scales = f"with {name} {low_precision} the host updates scales and quantised weights"
        yield scales, low_precision is not None
    yield "sharded parameters are gathered to a new address each time", is_fully_sharded(ns)
    schedule = f"--pipeline-schedule {ns.pipeline_schedule} computes weight gradients separately"
    yield schedule, str(ns.pipeline_schedule).startswith("zb")
    overlap = "--overlap-moe-expert-parallel-comm interleaves two micro-batches inside a layer"
    yield overlap, ns.overlap_moe_expert_parallel_comm
    yield "--virtual-ranks are threads on a CPU", ns.virtual_ranks is not None


def _no_whole_step(ns: Namespace) -> Iterator[tuple[str, bool]]:
    stages = f"--pipeline-model-parallel-size is {ns.pipeline_model_parallel_size}"
    yield stages, ns.pipeline_model_parallel_size > 1
    yield "with experts the host has to know token counts", bool(ns.num_experts)
    yield "the losses of --mtp-num-layers are read inside a step", ns.mtp_num_layers is not None
    kind = model_kind(ns.model_kind)
    yield f"the losses of {kind.title} are read inside a step", kind.has_masked_lm_head
    yield "--fp16 adapts its loss scale inside a step", ns.fp16 and ns.loss_scale is None
    yield "--timing-log-level above 0 times parts of a step", ns.timing_log_level > 0
    yield "--log-straggler times parts of a step", ns.log_straggler
