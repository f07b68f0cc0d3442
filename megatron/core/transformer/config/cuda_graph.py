"""Capture of CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class CudaGraphConfig:
    """Capture of CUDA graphs."""

    enable_cuda_graph: bool = option(
        False,
        "Replay layers as CUDA graphs, forward and backward, instead of launching their kernels.",
        group="inference",
    )
    cuda_graph_warmup_steps: int = option(
        3,
        "Steps that run eagerly before CUDA graphs are recorded.",
        group="inference",
    )
    external_cuda_graph: bool = option(
        False,
        "Record CUDA graphs by Transformer Engine.",
        group="inference",
        refused="it hands layers of Transformer Engine to its make_graphed_callables(), which is "
        "not done in this version; use --enable-cuda-graph",
    )
    cuda_graph_scope: str = option(
        "full",
        "What a CUDA graph covers: a whole layer, or its attention.",
        group="inference",
        choices=("full", "attn", "full_iteration"),
    )
